"""The kit's smoke command does what the kit promises: it trains, and what it trained is better."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.compose.harness import ROOT, metrics, summary


def train(run: Path, *flags: str) -> str:
    """`python train.py flags...` as a user types it, with fewer held-out prompts; what it printed."""
    words = (*flags, "eval.n=100", f"run_dir={run}", "log.tensorboard=false", "threads=1")
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words], capture_output=True, text=True, check=False, cwd=run.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_smoke_command_learns(tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = train(run, "--epochs", "2", "--steps_per_epoch", "6", "--batch_size", "2")
    found, updates = summary(run), [record for record in metrics(run) if record["phase"] == "rl"]
    before, after = weights(run / "reference"), weights(run / "checkpoints/latest/model")
    assert all(not torch.equal(before[name], after[name]) for name in before), "weights moved"
    assert found["steps"] == 12 and all(update["grad_norm"] > 0 and update["reward_std"] > 0 for update in updates)
    assert found["after"]["interval"][0] > found["before"]["interval"][1], "beyond the interval"
    assert found["findings"] == [] and "Training completed successfully!" in out
    assert "A step: 2 prompts (batch_size) with 8 answers each, of at most 75 bytes" in out


def test_a_run_that_the_kit_could_not_learn_from_says_so(tmp_path: Path) -> None:
    """Answers of 10 bytes, without the supervised steps, and with its learning rate."""
    run = tmp_path / "run"
    flags = ("--epochs", "1", "--steps_per_epoch", "5", "--batch_size", "2", "--warmup", "0")
    out = train(run, *flags, "--learning_rate", "1e-5", "--max_new_tokens", "2", "eval.n=8")
    assert "successfully" not in out and "learned little or nothing" in out
    said = {finding["sign"] for finding in summary(run)["findings"]}
    assert {"no_signal", "always_cut"} <= said
