"""A score on rows that a model has learnt from says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from novarl.run.lineage import runs_behind, trained_on
from tests.compose.harness import QUIET, alerts, finished, questions, write_rows

EVAL = ("eval", "eval.n=2", "rollout.max_tokens=4", "reward=length")
RL = (
    "reward=length",
    "algo=grpo",
    "steps=1",
    "prompts_per_rollout=2",
    "responses_per_prompt=2",
    "rollout.max_tokens=4",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", questions())
    write_rows(tmp_path / "others.jsonl", questions())
    finished("rl", "model=tiny", "data=rows.jsonl", *RL, *QUIET, "run_dir=first")
    finished("rl", "model=first/checkpoints/latest/model", "data=others.jsonl", *RL, *QUIET, "run_dir=second")
    return tmp_path


def test_the_runs_behind_a_model(home: Path) -> None:
    model = "second/checkpoints/latest/model"
    assert [run.name for run, _ in runs_behind(model)] == ["second", "first"]
    assert trained_on(model, str(home / "rows.jsonl")) == home / "first"
    assert trained_on(model, "./others.jsonl") == home / "second"
    assert trained_on("first/checkpoints/latest/model", "others.jsonl") is None
    assert trained_on("tiny", "rows.jsonl") is None
    (home / "first/config.yaml").write_text("model: second/checkpoints/latest/model\n")
    assert [run.name for run, _ in runs_behind(model)] == ["second", "first"], "a ring has an end"
    (home / "first/config.yaml").write_text("{")
    assert [run.name for run, _ in runs_behind(model)] == ["second"]


def test_an_evaluation_says_so(home: Path) -> None:
    for data, run in (("rows.jsonl", "first"), ("others.jsonl", "second")):
        folder = f"on-{run}"
        said = finished(*EVAL, "model=second/checkpoints/latest/model", f"data={data}", f"run_dir={folder}").out
        note = f"The model was trained on rows of {data}, so the score is contaminated."
        assert f"Note: {note}" in said and f"{home / run / 'summary.json'}" in said
        assert [message.startswith(note) for message in alerts(Path(folder))] == [True]
    said = finished(*EVAL, "model=first/checkpoints/latest/model", "data=others.jsonl", "run_dir=new").out
    assert "contaminated" not in said and not alerts(Path("new"))
