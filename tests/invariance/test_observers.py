"""Nobody who watches a run changes it: with every sink and log on or with all of them off, the weights are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from novarl.core.types import Sink
from novarl.observe.stability.monitor import Monitor
from novarl.run import lifecycle
from tests.invariance import little_run

ON = ["log.console=true", "log.tensorboard=true", "log.rollouts_every=1", "log.samples_every=1"]
OFF = ["log.console=false", "log.tensorboard=false", "log.rollouts_every=null", "log.samples_every=null"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return little_run.write(tmp_path_factory.mktemp("given"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def checkpoints(run_dir: Path) -> dict[str, bytes]:
    """Every file of every checkpoint, but for what tells how long the logs were."""
    found = files(run_dir / "checkpoints")
    return {name: data for name, data in found.items() if Path(name).name not in ("state.json", "MANIFEST")}


def states(run_dir: Path) -> list[dict[str, Any]]:
    """The state.json of each checkpoint, but for how long the logs were."""
    found = [json.loads(path.read_text()) for path in sorted((run_dir / "checkpoints").glob("step-*/state.json"))]
    for document in found:
        document["state"].pop("logs")
    return found


def test_watching_changes_nothing(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off, on = tmp_path / "off", tmp_path / "on"
    little_run.run([*words, *OFF], off)
    silent = capsys.readouterr().out
    little_run.run([*words, *ON], on)
    shown = capsys.readouterr().out
    # First of all: they did watch.
    assert "reward" in shown and "reward" not in silent
    assert files(on / "tb") and not (off / "tb").exists()
    assert len(files(on / "rollouts")) == 6 and not (off / "rollouts").exists()
    kinds = [line["kind"] for line in little_run.lines(on / "events.jsonl")]
    assert kinds.count("sample") == 2
    # And the run did learn.
    records = little_run.metrics(on)
    assert len(records) == 4 and all(record["grad_norm"] > 0 and record["reward_std"] > 0 for record in records)
    seen, unseen = checkpoints(on), checkpoints(off)
    assert seen["step-000001/model/model.safetensors"] != seen["step-000002/model/model.safetensors"]
    assert sum(name.endswith(".safetensors") for name in seen) == 4
    assert seen == unseen
    assert states(on) == states(off) and len(states(on)) == 2
    assert records == little_run.metrics(off)


def test_another_seed_is_another_run(words: list[str], tmp_path: Path) -> None:
    for seed in (0, 1):
        little_run.run([*words, *OFF, f"seed={seed}", "steps=1"], tmp_path / str(seed))
    one, other = (checkpoints(tmp_path / str(seed)) for seed in (0, 1))
    for name in ("step-000001/model/model.safetensors", "step-000001/tensors.safetensors"):
        assert one[name] != other[name]


class Meddler:
    """A sink that draws one random number."""

    def step(self, step: int, record: Mapping[str, float]) -> None:
        torch.rand(1)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def test_a_sink_that_meddles_is_caught(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little_run.run([*words, *OFF, "steps=1"], tmp_path / "alone")
    opened = lifecycle.open_sinks

    def with_meddler(*args: Any, **options: Any) -> list[Sink]:
        return [*opened(*args, **options), Meddler()]

    monkeypatch.setattr(lifecycle, "open_sinks", with_meddler)
    little_run.run([*words, *OFF, "steps=1"], tmp_path / "meddled")
    assert checkpoints(tmp_path / "alone") != checkpoints(tmp_path / "meddled")


def test_alerts_change_nothing(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that raises alerts, with the monitor and without."""
    far = [*words, *OFF, "log.rollouts_every=1", "optim.lr=0.5"]
    little_run.run(far, tmp_path / "watched")
    opened = lifecycle.open_sinks

    def without_monitor(*args: Any, **options: Any) -> list[Sink]:
        return [sink for sink in opened(*args, **options) if not isinstance(sink, Monitor)]

    monkeypatch.setattr(lifecycle, "open_sinks", without_monitor)
    little_run.run(far, tmp_path / "alone")
    raised = [
        [line["alert"] for line in little_run.lines(tmp_path / name / "events.jsonl") if "alert" in line]
        for name in ("watched", "alone")
    ]
    assert raised[0] and not raised[1]
    assert checkpoints(tmp_path / "watched") == checkpoints(tmp_path / "alone")
    assert states(tmp_path / "watched") == states(tmp_path / "alone")
    assert files(tmp_path / "watched" / "rollouts") == files(tmp_path / "alone" / "rollouts")
    assert little_run.metrics(tmp_path / "watched") == little_run.metrics(tmp_path / "alone")
