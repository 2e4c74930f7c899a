"""Enhanced RL2's ExperimentTracker: its document's code with another import, and what it writes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import novarl
from novarl.compat import ExperimentConfig, ExperimentTracker
from novarl.core.errors import NovaError
from novarl.observe.trackers import registry
from tests.observe.test_trackers import Fake


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    """The trackers that were made, in an empty current directory; every library is installed."""
    made: dict[str, Fake] = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(registry, "_make", lambda name: made.setdefault(name, Fake()))
    return made


def test_the_documents_code_runs_with_another_import(fakes: dict[str, Fake]) -> None:
    # Experiment tracking
    tracker = ExperimentTracker(
        experiment_name="RL2_Enhanced_Training",
        enable_mlflow=True,
        enable_wandb=True
    )  # fmt: skip
    tracker.log_params({"lr": 1e-4, "api_key": "SECRET"})
    tracker.log_metrics({"reward_mean": 0.25}, step=1)
    tracker.log_metrics({"reward_mean": 0.5})
    tracker.finish()
    assert set(fakes) == {"mlflow", "wandb"}
    for fake in fakes.values():
        assert fake.rows == [(1, {"reward_mean": 0.25}), (2, {"reward_mean": 0.5})]
        assert fake.about.project == "RL2_Enhanced_Training" and fake.about.config["lr"] == 1e-4
        assert "SECRET" not in str(fake.about.config) and fake.calls[-1] == ("finish", "done")
    run = novarl.load_run(tracker.path)
    assert run.metrics.series("reward_mean") == [0.25, 0.5] and run.config["lr"] == 1e-4
    assert run.summary is not None and run.summary["status"] == "done"


def test_its_own_configuration_class_texts_tables_and_artifacts(fakes: dict[str, Fake], tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("weights")
    with ExperimentTracker(ExperimentConfig("x", enable_trackio=True, run_dir="here")) as tracker:
        tracker.log_table("samples", ["prompt"], [["1+1="]])
        tracker.log_text("note", "hello")
        tracker.log_artifact("model.pt")
    assert (tmp_path / "here" / "texts" / "note.txt").read_text() == "hello"
    assert fakes["trackio"].tables == {"samples": [["1+1="]]}
    assert [call[1] for call in fakes["trackio"].calls if call[0] == "artifact"] == ["note.txt", "model.pt"]


def test_without_the_libraries_everything_is_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with ExperimentTracker("x", enable_mlflow=True, run_dir=tmp_path / "run") as tracker:
        tracker.log_metrics({"loss": 1.0})
    assert capsys.readouterr().err == (
        "novarl: mlflow is not installed, so the experiment is not recorded there (pip install 'novarl[track]')\n"
    )
    assert novarl.load_run(tmp_path / "run").metrics[0]["loss"] == 1.0


def test_late_parameters_are_said_to_be_late(fakes: dict[str, Fake], capsys: pytest.CaptureFixture[str]) -> None:
    with ExperimentTracker("x", enable_mlflow=True, run_dir="run") as tracker:
        tracker.log_metrics({"loss": 1.0})
        tracker.log_params({"lr": 1.0})
    assert "not in the trackers" in capsys.readouterr().err and "lr" not in fakes["mlflow"].about.config
    assert novarl.load_run("run").config["lr"] == 1.0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t.log_metrics({"loss": "high"}), "log_metrics: not a number"),
        (lambda t: t.log_artifact("nowhere"), "no such file"),
        (lambda t: ExperimentTracker("y", enable_comet=True), "unknown argument 'enable_comet'"),
    ],
)
def test_mistakes_are_one_sentence(call: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(NovaError, match=said), ExperimentTracker("x", run_dir=tmp_path / "run") as tracker:
        call(tracker)
    assert (novarl.load_run(tmp_path / "run").summary or {})["status"] == "failed"
