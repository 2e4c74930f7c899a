"""Event files that TensorBoard itself reads back, step by step, also after a resume."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from novarl.core.rundir import RunDir
from novarl.observe.sinks.records import framed
from novarl.observe.sinks.tensorboard import TensorBoardSink


def curve(directory: Path, tag: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(tag)]


def tags(directory: Path) -> set[str]:
    reader = EventAccumulator(str(directory))
    reader.Reload()
    return set(reader.Tags()["scalars"])


def test_records_are_framed_as_tensorboards_own_writer_does() -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    for size in (0, 1, 7, 8, 255, 4096):
        record = random.Random(size).randbytes(size)
        theirs = io.BytesIO()
        RecordWriter(theirs).write(record)
        assert framed(record) == theirs.getvalue()


def test_scalars_are_read_back_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.event("phase", {"name": "rl", "steps": 2})
    sink.step(1, {"reward_mean": 0.25, "rewards/length_mean": 1.0, "time/rollout_s": 0.5})
    sink.step(2, {"reward_mean": 0.5})
    assert tags(tmp_path) == {"reward_mean", "rewards/length_mean", "time/rollout_s"}
    assert curve(tmp_path, "reward_mean") == [(1, 0.25), (2, 0.5)]


def test_a_warm_up_stands_apart(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for phase, steps in (("warmup", 3), ("rl", 2)):
        sink.event("phase", {"name": phase, "steps": steps})
        for step in range(1, steps + 1):
            sink.step(step, {"entropy": float(step)})
    sink.close()
    assert curve(tmp_path, "warmup/entropy") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert curve(tmp_path, "entropy") == [(1, 1.0), (2, 2.0)]


def test_a_run_resumed_twice_within_a_second_is_one_curve(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for start in (1, 4, 7):
        sink = TensorBoardSink(tmp_path / "tb")
        for step in range(start, start + 3):
            sink.step(step, {"loss": 1.0 / step})
        sink.flush()
        sizes = run.log_sizes()
        sink.step(start + 3, {"loss": -1.0})  # beyond the checkpoint: to be forgotten
        sink.close()
        sink.close()
        TensorBoardSink(tmp_path / "tb").close()  # a file made after the checkpoint: to be removed
        run.cut_logs(sizes)
    assert curve(tmp_path / "tb", "loss") == [(step, pytest.approx(1.0 / step)) for step in range(1, 10)]
    assert len(list((tmp_path / "tb").iterdir())) == 3


def test_a_new_file_sorts_after_the_old_ones_whatever_the_clock_says(tmp_path: Path) -> None:
    (tmp_path / "events.out.tfevents.4000000000.host.1").touch()
    TensorBoardSink(tmp_path).close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[1].startswith("events.out.tfevents.4000000001.")


def test_not_a_number_is_written_as_one(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.step(1, {"loss": float("nan")})
    sink.close()
    ((step, value),) = curve(tmp_path, "loss")
    assert step == 1
    assert value != value
