"""Guards: what a run does when an alert is raised, and that it is part of the checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from novarl.core.errors import NovaError
from novarl.learn.optim import Optimizer
from tests.compose.harness import (
    ON_TASK,
    Ended,
    deterministic_metrics,
    events,
    finished,
    metrics,
    novarl,
    summary,
    weights,
)

MOVING = (*ON_TASK, "entropy.coef=1", "save_every=1", "keep=9")
"""Runs whose every update changes the weights."""
EXPLODING = (*MOVING, "optim.lr=0.5", "steps=3")


def started(run: Path, *words: str) -> Ended:
    return novarl("rl", *words, f"run_dir={run}")


def broken(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The gradient of RL update `at` (from 0) is NaN."""
    step = Optimizer.step

    def stepped(self: Optimizer) -> tuple[float, float]:
        if self.settings.lr < 1e-3 and self.update == at and not getattr(stepped, "done", False):
            stepped.done = True  # type: ignore[attr-defined]
            self.gradients()[0].view(-1)[0] = math.nan
        return step(self)

    monkeypatch.setattr(Optimizer, "step", stepped)


def test_stop_saves_and_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = started(run, *EXPLODING, "guard.on_alert={kl_explosion: stop}")
    assert ended.code == 2
    assert "guard.on_alert.kl_explosion: the guard stopped the run after step 1; everything is saved" in ended.err
    assert len([row for row in metrics(run) if row["phase"] == "rl"]) == 1
    found = summary(run)
    assert found["status"] == "stopped" and found["stopped_by"]["alert"] == "kl_explosion"
    (guard,) = events(run, "guard")
    assert guard["action"] == "stop" and guard["alert"] == "kl_explosion" and guard["step"] == 1
    finished("rl", *EXPLODING, "guard.on_alert={kl_explosion: stop}", "resume=auto", f"run_dir={run}")
    assert summary(run)["status"] == "done" and summary(run)["steps"] == 3, "the alert had been raised"


def test_warn_is_the_default_and_changes_nothing(tmp_path: Path) -> None:
    finished("rl", *EXPLODING, f"run_dir={tmp_path / 'plain'}")
    finished("rl", *EXPLODING, "guard.on_alert={kl_explosion: warn}", f"run_dir={tmp_path / 'warned'}")
    assert events(tmp_path / "warned", "guard") == []
    assert deterministic_metrics(tmp_path / "plain") == deterministic_metrics(tmp_path / "warned")


def test_skip_undoes_the_update(tmp_path: Path) -> None:
    run = tmp_path / "run"
    finished("rl", *EXPLODING, "guard.on_alert={kl_explosion: skip}", f"run_dir={run}")
    rows = [row for row in metrics(run) if row["phase"] == "rl"]
    assert [row["skipped_update"] for row in rows] == [1.0, 1.0, 1.0]
    assert len(events(run, "guard")) == 3
    start = {name: value for name, value in weights_at(run, "warmup-000002").items()}
    assert all(torch.equal(value, start[name]) for name, value in weights(run).items())


def weights_at(run: Path, checkpoint: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(run / "checkpoints" / checkpoint / "model" / "model.safetensors")


def test_a_gradient_that_is_not_finite_ends_the_run_unless_it_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (*MOVING, "steps=3")
    with monkeypatch.context() as patch:
        broken(patch, 1)
        ended = started(tmp_path / "plain", *words)
        assert ended.code == 2 and "not finite" in ended.err
    with monkeypatch.context() as patch:
        broken(patch, 1)
        finished("rl", *words, "guard.on_alert={nan: skip}", f"run_dir={tmp_path / 'run'}")
    rows = [row for row in metrics(tmp_path / "run") if row["phase"] == "rl"]
    assert [row["skipped_update"] for row in rows] == [0.0, 1.0, 0.0] and math.isnan(rows[1]["grad_norm"])
    (guard,) = events(tmp_path / "run", "guard")
    assert guard["alert"] == "nan" and "backward pass" in guard["evidence"]
    after = [weights_at(tmp_path / "run", f"step-00000{step}") for step in (1, 2, 3)]
    assert all(torch.equal(value, after[1][name]) for name, value in after[0].items())
    assert any(not torch.equal(value, after[2][name]) for name, value in after[1].items())


def test_a_resumed_run_skips_what_one_that_was_not_stopped_skips(tmp_path: Path) -> None:
    words = (*MOVING, "optim.lr=0.0015", "guard.on_alert={kl_explosion: skip, gradient_spike: skip}")
    finished("rl", *words, "steps=6", f"run_dir={tmp_path / 'whole'}")
    finished("rl", *words, "steps=3", f"run_dir={tmp_path / 'parts'}")
    finished("rl", *words, "steps=6", "resume=auto", f"run_dir={tmp_path / 'parts'}")
    skipped = [row["skipped_update"] for row in metrics(tmp_path / "whole") if row["phase"] == "rl"]
    assert 0.0 in skipped and 1.0 in skipped
    assert deterministic_metrics(tmp_path / "parts") == deterministic_metrics(tmp_path / "whole")
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "parts")[name])


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("{kl_explosoin: stop}", "there is no such alert (did you mean kl_explosion?)"),
        ("{temperature: stop}", "guards act on alerts about metrics"),
        ("{dead_groups: skip}", "not about a single update"),
        ("{nan: panic}", "guard.on_alert.nan"),
    ],
)
def test_a_wrong_action_is_refused_before_anything_is_written(tmp_path: Path, action: str, said: str) -> None:
    run = tmp_path / "run"
    try:
        ended = started(run, *ON_TASK, f"guard.on_alert={action}")
    except NovaError as refused:
        ended = Ended(2, "", str(refused))
    assert ended.code == 2 and said in ended.err
    assert not (run / "metrics.jsonl").exists()
