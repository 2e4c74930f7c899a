"""evals/: every evaluation leaves the score of each held-out row; a resumed run rewrites those after its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from novarl.observe.evaluations import evaluated_steps, read_rows
from tests.compose.harness import ON_TASK, RL, SFT, finished, metrics, questions, summary, write_rows

ROWS = ("rl", *RL, "data=rows.jsonl", "reward=lexical", "eval_every=1", "save_every=1", "keep=9", "run_dir=run")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_rows(tmp_path / "rows.jsonl", questions())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_rows_are_those_that_the_scores_are_means_of(folder: Path) -> None:
    finished(*ROWS, "steps=2", "eval.k=2")
    run = folder / "run"
    assert evaluated_steps(run) == [0, 1, 2]
    ends = summary(run)
    assert ends["before"]["score"] == fmean(row.score for row in read_rows(run, 0) if row.score is not None)
    for step, row in enumerate(metrics(run), start=1):
        found = read_rows(run, step)
        assert row["eval/score"] == fmean(row.score for row in found if row.score is not None)
        assert all(row.prompt and len(row.samples) == 2 for row in found)
    assert [row.prompt_id for row in read_rows(run, 0)] == [row.prompt_id for row in read_rows(run, 2)]


def test_a_resumed_run_has_the_rows_of_one_that_never_stopped(folder: Path) -> None:
    finished(*ROWS, "steps=3")
    whole = {file.name: file.read_bytes() for file in (folder / "run" / "evals").iterdir()}
    (folder / "run" / "evals" / "step-000003.jsonl").write_text("left by a killed process")
    finished(*ROWS, "steps=3", "resume=run/checkpoints/step-000001")
    assert {file.name: file.read_bytes() for file in (folder / "run" / "evals").iterdir()} == whole


def test_a_run_that_goes_back_forgets_later_evaluations(folder: Path) -> None:
    finished(*ROWS, "steps=3")
    finished(*ROWS, "steps=2", "resume=run/checkpoints/step-000001")
    assert evaluated_steps(folder / "run") == [0, 1, 2]


def test_evaluations_and_runs_that_generate_nothing_have_rows_too(folder: Path) -> None:
    finished("eval", "task=sort", "model=tiny", "eval.n=3", "run_dir=scored")
    assert len(read_rows(folder / "scored")) == 3
    finished("sft", *SFT, "data=rows.jsonl", "run_dir=fitted")
    found = read_rows(folder / "fitted")
    assert fmean(row.score for row in found if row.score is not None) == pytest.approx(
        summary(folder / "fitted")["after"]["score"], rel=1e-12
    )
    assert len({row.prompt_id for row in found}) == len(found) == 2
    finished("rl", *ON_TASK, "eval.n=0", "run_dir=unasked")
    assert evaluated_steps(folder / "unasked") == []


def test_pairs_have_the_score_of_each_pair(folder: Path) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(12)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    finished("rm", *SFT, "data=pairs.jsonl", "run_dir=run")
    found = read_rows(folder / "run")
    assert {row.score for row in found} <= {0.0, 0.5, 1.0}
    assert fmean(row.score for row in found if row.score is not None) == summary(folder / "run")["after"]["score"]
