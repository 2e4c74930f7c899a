"""The examples of a model, a loop and an environment of the user's own: each learns, beyond what chance explains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compose.harness import metrics, summary
from tests.examples.test_examples import ROOT


def run(name: str, folder: Path, *flags: str) -> str:
    """Run an example as a user does, in a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *flags]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["own_model.py", "own_loop.py", "own_environment.py"])
def test_it_is_short(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 60


def test_a_module_of_the_users_own_learns_the_bandit(tmp_path: Path) -> None:
    out = run("own_model.py", tmp_path, "--run-dir", "run", "--steps", "20")
    found = summary(tmp_path / "run")
    before, after = found["before"], found["after"]
    assert after["interval"][0] > before["interval"][1] and after["score"] - before["score"] > 0.2
    assert f"held-out reward: {before['score']:.2f} before, {after['score']:.2f} after" in out
    rewards = [row["reward_mean"] for row in metrics(tmp_path / "run") if row["phase"] == "rl"]
    assert len(rewards) == 20 and sum(rewards[-5:]) > sum(rewards[:5])


def test_a_loop_of_the_users_own_learns_to_count(tmp_path: Path) -> None:
    found = re.findall(r"step +(\d+)  reward ([\d.]+)  entropy ([\d.]+)", run("own_loop.py", tmp_path))
    assert [int(step) for step, _, _ in found] == list(range(10, 101, 10))
    rewards, entropies = ([float(row[column]) for row in found] for column in (1, 2))
    assert rewards[0] < 0.3 and rewards[-1] > 0.9, "a random answer has a tenth of its tokens right"
    assert entropies[-1] < 0.2 * entropies[0]
    assert not list(tmp_path.iterdir()), "a loop without a run writes nothing"


def test_an_environment_of_the_users_own_is_won(tmp_path: Path) -> None:
    out = run("own_environment.py", tmp_path, "--run-dir", "run")
    found = summary(tmp_path / "run")
    before, after = found["before"], found["after"]
    assert after["interval"][0] > before["score"] and after["score"] > 5 / 9, "better than before, and than by chance"
    assert f"games won: {before['score']:.2f} before, {after['score']:.2f} after" in out
    records = metrics(tmp_path / "run")
    assert sum(row["reward_mean"] for row in records[-5:]) / 5 > 0.85, "whoever listens wins"
    assert records[0]["reward_mean"] < 0.75
