"""`novarl runs`, `show`, `compare` and `alerts` on whole, growing, killed, damaged and foreign run directories."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from novarl import cli
from novarl.core.rundir import RunDir
from novarl.observe.listing import QUIET, overview
from novarl.observe.writer import RunWriter


def write_run(path: Path, scores: dict[int, list[float]] | None = None, **settings: Any) -> Path:
    """A finished run of NovaRL with three updates."""
    seed = settings.pop("seed", 0)
    config = {"kind": "rl", "task": "sort", "algo": "grpo", "model": "tiny", "seed": seed, "optim": {"lr": 0.001}}
    with RunWriter(path, writer="x", steps=3, config=config | settings, manifest={"novarl": "0.1.0"}) as run:
        run.event("eval", name="before", score=0.25, interval=[0.1, 0.4], n=4)
        for step in (1, 2, 3):
            run.step(step, {"reward_mean": 0.1 * step, "grad_norm": 0.0, "my_number": 1.0, "groups_kept": 4.0})
        run.event("alert", message="The warm-up was short.")
        for step, values in (scores or {}).items():
            run.evaluation(step, rows(values))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["writer"]
    (path / "manifest.json").write_text(json.dumps(manifest | {"seed": seed}))
    return path


def rows(values: list[float]) -> list[dict[str, Any]]:
    return [{"prompt_id": f"q/{n}", "prompt": f"{n}?", "score": value, "text": "a"} for n, value in enumerate(values)]


def kill(path: Path) -> Path:
    (path / "summary.json").unlink()
    return path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(list(words)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    return error


def test_runs_are_listed_with_their_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "done")
    kill(write_run(tmp_path / "deep" / "killed"))
    going = kill(write_run(tmp_path / "going"))
    (write_run(tmp_path / "cut") / "manifest.json").write_text('{"novarl": "0.')
    (tmp_path / "latest").symlink_to("done")
    (tmp_path / "notes").mkdir()
    claimed = RunDir(going)
    assert claimed.claim() is None
    found = {Path(run["path"]).name: run for run in json.loads(said(capsys, "runs", str(tmp_path), "--json"))}
    text = said(capsys, "runs", str(tmp_path))
    claimed.release()
    assert {name: run["status"] for name, run in found.items()} == {
        "done": "done", "killed": "killed", "going": "running", "cut": "unreadable",
    }  # fmt: skip
    assert found["done"]["before"] == 0.25 and (found["done"]["steps"], found["done"]["total"]) == (3, 3)
    assert "rl grpo sort" in text and "deep/killed" in text and "manifest.json: is damaged" in " ".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line)
    assert json.loads(said(capsys, "runs", str(tmp_path), "--json"))[0]["status"] != "running"


def test_a_long_name_is_kept_whole_and_the_numbers_stay_aligned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "qwen3-8b-instruct-math-level5-grpo-lr1e-6-beta0.001-seed0"
    write_run(tmp_path / name)
    write_run(tmp_path / "short")
    lines = said(capsys, "runs", str(tmp_path)).splitlines()
    assert name in lines
    ends = {line.index("3/3") for line in lines if "3/3" in line}
    assert len(ends) == 1 and max(map(len, lines)) <= 80


def test_a_run_of_another_library_runs_as_long_as_it_writes(tmp_path: Path) -> None:
    run = RunWriter(tmp_path / "x", writer="other 1.0")
    run.step(1, {"reward_mean": 0.5})
    assert overview(tmp_path / "x").status == "running"
    old = time.time() - 2 * QUIET
    for name in ("metrics.jsonl", "events.jsonl"):
        os.utime(tmp_path / "x" / name, (old, old))
    assert overview(tmp_path / "x").status == "killed"
    run.close()
    assert overview(tmp_path / "x").status == "done"


def test_a_run_that_was_resumed_and_killed_is_not_done(tmp_path: Path) -> None:
    path = write_run(tmp_path / "x")
    with (path / "events.jsonl").open("a") as file:
        for kind in ("summary", "start"):
            file.write(
                json.dumps({"schema": 1, "kind": kind, "step": 3, "timestamp": "2026-01-15T10:30:00+00:00"}) + "\n"
            )
    assert overview(path).status == "killed"


def test_asking_whether_a_run_is_in_progress_does_not_disturb_it(tmp_path: Path) -> None:
    asked, writing = RunDir(tmp_path), RunDir(tmp_path)
    assert not asked.is_claimed()
    assert writing.claim() is None
    assert asked.is_claimed()
    writing.release()
    assert not asked.is_claimed()


def test_show_prints_status_settings_metrics_findings_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = kill(write_run(tmp_path / "x", prompts_per_rollout=4))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"schema": 1, "phase": "rl", "st')
    text = said(capsys, "show", str(path))
    assert "killed, 3/3 steps" in text and "prompts_per_rollout  4" in text and "algo" in text
    assert "seed " not in text.partition("defaults:")[2].partition("metric")[0], "the default seed"
    assert "The gradient was 0 in 3 of 3 updates" in text and "The warm-up was short." in text
    row = next(line for line in text.splitlines() if line.startswith("reward_mean"))
    assert row.split() == ["reward_mean", "0.1", "0.3", "rises"]
    assert f"novarl rl {path}/config.yaml run_dir={path} resume=auto" in text
    assert all(len(line) <= 80 for line in text.splitlines() if str(path) not in line)
    found = json.loads(said(capsys, "show", str(path), "--json"))
    assert found["metrics"]["my_number"] == {"first": 1.0, "last": 1.0, "unit": None, "healthy": None}
    assert "groups_kept" not in text and "groups_kept" in said(capsys, "show", str(path), "--all")
    only = said(capsys, "alerts", str(path))
    assert "The gradient was 0" in only and "reward_mean" not in only
    assert "No alerts." in only and "Notes:\n- step 3: The warm-up was short." in only


def test_what_is_absent_is_shown_as_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunWriter(tmp_path / "x", writer="other 1.0")
    text = said(capsys, "show", str(tmp_path / "x"))
    assert "No metrics yet." in text and "Score    -" in text
    assert said(capsys, "alerts", str(tmp_path / "x")) == "No findings in the metrics.\nNo alerts.\n"


def test_reading_changes_no_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def prints() -> dict[str, str]:
        files = [file for file in tmp_path.rglob("*") if file.is_file()]
        return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    path = write_run(tmp_path / "x", {0: [0.0, 1.0], 3: [1.0, 1.0]})
    before = prints()
    for words in (("runs", str(tmp_path)), ("show", str(path)), ("alerts", str(path)), ("compare", str(path))):
        said(capsys, *words)
    assert prints() == before


def seeded(tmp_path: Path, name: str, effect: float, seed: int, prompts: int = 200) -> Path:
    chance, hard = random.Random(f"{name}{seed}"), random.Random(1)
    values = [float(chance.random() < hard.uniform(0.2, 0.6) + effect) for _ in range(prompts)]
    return write_run(tmp_path / f"{name}{seed}", {3: values}, seed=seed, optim={"lr": 0.1 if effect else 0.01})


def test_compare_joins_seeds_and_finds_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [seeded(tmp_path, name, effect, seed) for name, effect in (("a", 0.0), ("b", 0.3)) for seed in (0, 1, 2)]
    found = json.loads(said(capsys, "compare", *map(str, paths), "--json"))
    assert [len(side["runs"]) for side in found["sides"]] == [3, 3]
    (one,) = found["comparisons"]
    assert one["p"] < 0.05 and one["low"] < 0.3 < one["high"] and one["seeds_known"]
    assert one["changed"] == {"optim.lr": [0.01, 0.1]}
    text = said(capsys, "compare", *map(str, paths))
    assert "verdict    B is better by 0." in text and "optim.lr 0.01 -> 0.1" in text
    assert max(map(len, text.splitlines())) <= 80


def test_one_run_per_side_is_said_to_say_nothing_about_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (seeded(tmp_path, "a", 0.0, seed) for seed in (0, 1))
    text = said(capsys, "compare", str(first), str(second), "--detect", "0.01")
    assert "covers the choice of prompts, not of the seed" in " ".join(text.split())
    assert "80% power for a difference of 0.010" in text and "more)" in text
    grouped = json.loads(said(capsys, "compare", f"{first},{second}", str(second), "--json"))
    assert [len(side["runs"]) for side in grouped["sides"]] == [2, 1]


def test_a_single_run_is_compared_with_its_first_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "x", {0: [0.0] * 6, 3: [1.0] * 6})
    text = said(capsys, "compare", str(path))
    assert "x, step 0" in text and "x, step 3" in text and "p = 0.0312" in text
    assert "one side only" in refused(capsys, "compare", str(write_run(tmp_path / "y", {3: [1.0]})))


def test_samples_and_rows_without_a_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("a", "b"):
        path = write_run(tmp_path / name, optim={"lr": 0.1 if name == "a" else 0.2})
        lines = [{"prompt_id": str(n), "score": float(n % 2), "samples": [0.0, float(name == "b")]} for n in range(9)]
        lines[0]["score"] = None
        RunWriter(path, writer="x", manifest={"novarl": "0.1.0"}, extend=True).evaluation(3, lines)
        paths.append(str(path))
    text = said(capsys, "compare", *paths)
    assert "8 held-out prompts, greedy answers" in text and "1 prompt has no score" in text
    assert "+0.500" in said(capsys, "compare", *paths, "--samples")


BAD = {
    "no directory": (("show", "{}/none"), "no such directory"),
    "no run": (("show", "{}"), "the directory contains no run"),
    "no runs": (("runs", "{}/empty"), "contains no runs"),
    "other format": (("show", "{}/newer"), "run directory format 99; this version of NovaRL reads format 1"),
    "broken line": (("show", "{}/broken"), "metrics.jsonl:2: not JSON"),
    "no rows": (("compare", "{}/x", "{}/bare"), "the run has no scores of held-out rows"),
    "other prompts": (("compare", "{}/x", "{}/more"), "evaluated on other prompts than"),
    "no samples": (("compare", "{}/x", "{}/x,{}/x", "--samples"), "the evaluation has no samples"),
    "no such step": (("compare", "{}/x", "{}/more", "--step", "7"), "no evaluation after step 7"),
    "not a row": (("compare", "{}/x", "{}/odd"), "not a held-out row (KeyError: 'score')"),
    "unknown option": (("runs", "--jsn"), "unrecognized arguments: --jsn"),
    "no run named": (("compare",), "the following arguments are required: RUN"),
    "bad effect": (("compare", "{}/x", "{}/more", "--detect", "0"), "--detect must be above 0"),
}


@pytest.mark.parametrize(("words", "wanted"), BAD.values(), ids=BAD)
def test_bad_input_is_one_clear_sentence(
    words: tuple[str, ...], wanted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "x", {3: [1.0, 0.0]})
    write_run(tmp_path / "more", {3: [1.0, 0.0, 1.0]})
    write_run(tmp_path / "bare")
    (write_run(tmp_path / "newer") / "manifest.json").write_text('{"format": 99, "kind": "rl", "novarl": "9"}')
    broken = write_run(tmp_path / "broken") / "metrics.jsonl"
    lines = broken.read_text().splitlines()
    broken.write_text("\n".join([lines[0], lines[1][:20], lines[2]]) + "\n")
    (write_run(tmp_path / "odd", {3: [1.0]}) / "evals" / "step-000003.jsonl").write_text('{"prompt_id": "a"}\n')
    assert wanted in refused(capsys, *(word.replace("{}", str(tmp_path)) for word in words))


def test_help_of_each_viewer_shows_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.VIEWERS:
        text = said(capsys, command, "--help")
        assert text.startswith(f"usage: novarl {command}") and "--json" in text and "examples:" in text
