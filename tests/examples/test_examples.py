"""Every example runs as its first lines say, and does what it claims."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from novarl.core.types import Prompt, Rollout
from novarl.rewards.compose import RewardSet
from novarl.rewards.user_file import load

ROOT = Path(__file__).parents[2]


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def one_thread() -> Iterator[None]:
    """As the example runs: so small a network is slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["directions", "bandit"])
def lines(request: pytest.FixtureRequest) -> list[str]:
    """What minimal_ppo_sync.py prints, run as users run it."""
    return run("examples/minimal_ppo_sync.py", "--env", request.param, "--iterations", "60", "--seed", "0").splitlines()


def test_minimal_ppo_comes_within_five_per_cent_of_the_optimum(lines: list[str]) -> None:
    share = float(re.search(r"([\d.]+) % of the optimum", lines[-1])[1])  # type: ignore[index]
    assert 95.0 <= share <= 100.1
    found = [dict(re.findall(r"(reward|kl|entropy|clip_fraction|steps/s) +(-?[\d.]+)", line)) for line in lines[:60]]
    assert all(set(line) == {"reward", "kl", "entropy", "clip_fraction", "steps/s"} for line in found)
    first, last = found[0], found[-1]
    assert float(first["reward"]) < 0.6 * float(last["reward"]), "it began little better than chance"
    assert float(first["kl"]) > 0 and float(first["clip_fraction"]) > 0, "updates move the policy, and the clip binds"
    assert float(last["entropy"]) < 0.2 * float(first["entropy"])


def test_minimal_ppo_learns_each_prompt_of_the_bandit(lines: list[str]) -> None:
    learnt = {line[:26].strip(): [float(x) for x in line[26:].split()] for line in lines[60:-1]}
    best = {text: chances.index(max(chances)) for text, chances in learnt.items()}
    wanted = {"Prefer action 0": 0, "Prefer action 1": 1, "Action 2 wins": 2, "Action 2 slightly better": 2}
    assert best in ({}, wanted) and len(best) == len(lines) - 61


def test_minimal_ppo_repeats_with_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    module = load_module(ROOT / "examples" / "minimal_ppo_sync.py")

    def rewards(seed: int) -> list[str]:
        with one_thread():
            module.train("directions", 2, seed)
        return re.findall(r"reward [\d.]+  kl [\d.]+", capsys.readouterr().out)

    assert rewards(3) == rewards(3) != rewards(4)


def scored(spec: str, rows: list[tuple[str, Any]]) -> list[float | None]:
    messages = ({"role": "user", "content": "q"},)
    rollouts = [
        Rollout(Prompt("r", (), messages, answer), 0, 0, (), (*messages, {"role": "assistant", "content": text}), text)
        for text, answer in rows
    ]
    rewards = RewardSet({"reward": load(str(ROOT / "examples" / spec))})
    try:
        return [item.reward for item in asyncio.run(rewards.score(rollouts))]
    finally:
        rewards.close()


def test_the_gsm8k_reward() -> None:
    solution = "48/2 = <<48/2=24>>24 clips in May.\n48+24 = 72\n#### 72"
    rows = [
        ("#### 72", solution),
        ("so 72", solution),
        ("#### 7", solution),
        ("#### 1,072.0", "#### 1072"),
        ("#### 7", "7"),
    ]
    assert scored("gsm8k_reward.py:reward_fn", rows) == [1.0, 0.0, 0.0, 1.0, None]


def test_the_trl_rewards() -> None:
    assert scored("trl_reward.py:number_reward", [("so 72.", "#### 72"), ("7", "#### 72"), ("", "5")]) == [
        1.0,
        0.0,
        0.0,
    ]
    assert scored("trl_reward.py:brevity_reward", [("one two", None), ("", None)]) == [0.5, None]


def test_the_bandit_reward() -> None:
    answer = {"0": 1.2, "1": 0.0, "2": -0.5}
    assert scored("bandit/reward.py:reward_fn", [("0", answer), ("2\n", answer), ("x", answer)]) == [1.2, -0.5, -1.0]
