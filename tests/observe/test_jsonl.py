"""The run's own record: exact, stable, strict JSON, whole at every instant, and one stream again after a resume."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from novarl.core.errors import NovaError
from novarl.core.rundir import RunDir
from novarl.observe.sinks.jsonl import JsonlSink, plain_name, read_lines, read_metrics, stable_name


def strict(line: str) -> dict[str, object]:
    """One line of strict JSON: NaN and Infinity, which Python's reader would let pass, are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, object]]:
    return [strict(line) for line in path.read_text().splitlines()]


def test_a_record_as_it_stands_in_the_files(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.event("phase", {"name": "rl", "steps": 20})
    machine = {"tokens_per_second": 812.5, "time/rollout_s": 0.25, "memory_rss_mb": 64.0}
    sink.step(5, {"reward_mean": 0.1, "kl": 1e-4, "epoch": 2.0, **machine})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"schema": 1, "phase": "rl", "step": 5, "epoch": 2.0, "kl": 0.0001, "reward_mean": 0.1, '
        '"time/memory_rss_mb": 64.0, "time/rollout_s": 0.25, "time/tokens_per_second": 812.5}\n'
    )
    (train,) = lines(tmp_path / "logs" / "train.jsonl")
    assert list(train)[:4] == ["timestamp", "step", "epoch", "phase"]
    assert list(train)[4:] == ["kl", "memory_rss_mb", "reward_mean", "time/rollout_s", "tokens_per_second"]
    assert (train["step"], train["epoch"], train["tokens_per_second"]) == (5, 2, 812.5)
    assert isinstance(train["epoch"], int)
    (event,) = lines(tmp_path / "events.jsonl")
    assert (event["kind"], event["name"], event["steps"], event["schema"]) == ("phase", "rl", 20, 1)
    assert next(read_metrics(tmp_path / "metrics.jsonl"))["tokens_per_second"] == 812.5


def test_two_equal_runs_write_equal_lines_but_for_what_stands_under_time(tmp_path: Path) -> None:
    for name, speed in (("a", 100.0), ("b", 90.0)):
        sink = JsonlSink(tmp_path / name)
        record = {
            "tokens_per_second": speed,
            "episodes_per_second": speed,
            "memory_rss_mb": speed,
            "time/step_s": speed,
        }
        metrics = {"reward_mean": 0.5, "kl": 0.1}
        sink.step(1, {**record, **metrics} if name == "a" else {**dict(reversed(metrics.items())), **record})
    texts = [(tmp_path / name / "metrics.jsonl").read_text() for name in "ab"]
    assert texts[0] != texts[1]
    kept = [{k: v for k, v in strict(text).items() if not k.startswith("time/")} for text in texts]
    assert json.dumps(kept[0]) == json.dumps(kept[1])
    assert kept[0] == {"schema": 1, "phase": None, "step": 1, "kl": 0.1, "reward_mean": 0.5}


@given(value=st.floats())
@settings(max_examples=200, deadline=None)
def test_every_float_comes_back_bit_for_bit(value: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = tmp_path_factory.mktemp("run")
    sink = JsonlSink(run)
    sink.step(1, {"loss": value, "tokens_per_second": value})
    strict((run / "metrics.jsonl").read_text())
    (row,) = read_metrics(run / "metrics.jsonl")
    for name in ("loss", "tokens_per_second"):
        assert struct.pack("d", row[name]) == struct.pack("d", value) or (math.isnan(value) and math.isnan(row[name]))
    assert ("nonfinite" in strict((run / "metrics.jsonl").read_text())) == (not math.isfinite(value))


def test_nan_and_infinity_are_null_and_say_which(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.step(1, {"loss": math.nan, "entropy": math.inf, "kl": 0.0})
    sink.event("alert", {"message": "loss", "values": [math.nan, {"low": -math.inf}]})
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert row["loss"] is None
    assert row["nonfinite"] == {"entropy": "inf", "loss": "nan"}
    assert lines(tmp_path / "logs" / "train.jsonl")[0]["nonfinite"] == row["nonfinite"]
    assert lines(tmp_path / "events.jsonl")[0]["values"] == ["nan", {"low": "-inf"}]


def test_each_line_is_on_disk_when_step_returns_and_nothing_is_kept(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for step in range(1, 4):
        sink.step(step, {"loss": 1.0})
        sink.event("alert", {"message": "x"})
        for name in ("metrics.jsonl", "logs/train.jsonl", "events.jsonl"):
            assert len(lines(tmp_path / name)) == step
    assert not any(isinstance(kept, (list, dict, set)) for kept in vars(sink).values())


def test_a_resumed_run_reads_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    def play(run: Path, steps: range) -> None:
        sink = JsonlSink(run)
        sink.event("phase", {"name": "rl", "steps": 9, "done": steps.start - 1})
        for step in steps:
            sink.step(step, {"loss": 1.0 / step, "update": float(step)})
        sink.flush()
        sink.close()
        sink.close()

    play(tmp_path / "whole", range(1, 10))
    cut = RunDir(tmp_path / "cut")
    play(cut.path, range(1, 5))
    sizes = cut.log_sizes()
    sink = JsonlSink(cut.path)
    sink.step(5, {"loss": 0.0})  # beyond the checkpoint: to be forgotten
    sink.metrics.write('{"torn')
    sink.close()
    cut.cut_logs(sizes)
    play(cut.path, range(5, 10))
    whole, again = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut"))
    assert again == whole
    assert [row["step"] for row in lines(cut.path / "logs" / "train.jsonl")] == list(range(1, 10))


def test_an_event_knows_the_phase_and_step_it_fell_into(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.event("start", {"run_dir": tmp_path})
    sink.event("phase", {"name": "warmup", "steps": 3})
    sink.step(3, {"loss": 1.0})
    sink.event("save", {"path": tmp_path / "x"})
    sink.event("phase", {"name": "rl", "steps": 9, "done": 4})
    sink.event("bad_row", {"where": "rows.jsonl:3", "step": 0})
    found = [(event["kind"], event["phase"], event["step"]) for event in lines(tmp_path / "events.jsonl")]
    assert found == [
        ("start", None, 0),
        ("phase", "warmup", 0),
        ("save", "warmup", 3),
        ("phase", "rl", 4),
        ("bad_row", "rl", 0),
    ]


@pytest.mark.parametrize("text", ["日本語 é", "\ud800 alone", "\u2028\u2029\x85", 'a "quote" \\ \r\n\t\x00\x1b', "🎲"])
def test_any_text_makes_one_line_and_comes_back(text: str, tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    sink.event("sample", {"text": text})
    (event,) = read_lines(tmp_path / "events.jsonl")
    assert event["text"] == text
    assert (tmp_path / "events.jsonl").read_bytes().count(b"\n") == 1


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert [row["step"] for row in read_metrics(path)] == [1]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(NovaError, match="not JSON") as caught:
        list(read_metrics(path))
    assert caught.value.where == f"{path}:2"


@pytest.mark.parametrize(
    "name", ["loss", "time/rollout_s", "tokens_per_second", "episodes_per_second", "memory_rss_mb", "novel"]
)
def test_names_go_there_and_back(name: str) -> None:
    assert plain_name(stable_name(name)) == name
