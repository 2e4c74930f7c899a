"""A whole run in about two seconds: the trained model, its prompts as a data file, a reward file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from novarl.compose import run_training
from novarl.config.load import load
from novarl.config.tree import RLConfig
from novarl.models.load import save
from novarl.run import report
from tests.invariance.sharp import WORDS, question, sharp_policy

REWARD = """\
def reward_fn(messages, answer):
    said = messages[-1]["content"]
    return float(said == answer) + 0.01 * len(said)
"""
ROWS = 30


def write(folder: Path) -> list[str]:
    """Put model, rows and reward into `folder`; the words of a configuration that uses them."""
    save(sharp_policy(), folder / "model")
    rows = [{"messages": [question(WORDS[row % len(WORDS)])], "answer": WORDS[row % len(WORDS)]} for row in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return [
        f"model={folder / 'model'}",
        f"data={folder / 'rows.jsonl'}",
        f"reward={folder / 'reward.py'}:reward_fn",
        "rollout.max_tokens=16",
        "optim.lr=1e-3",
        "device=cpu",
        "threads=1",
        "steps=2",
        "prompts_per_rollout=3",
        "responses_per_prompt=4",
        "updates_per_rollout=2",
        "save_every=1",
        "eval.n=3",
        "log.console=false",
        "log.tensorboard=false",
    ]


def run(words: list[str], run_dir: Path) -> dict[str, Any]:
    """Run it, without drawing curves, which takes longer than everything else; returns its summary."""
    with mock.patch.object(report, "draw"):
        return run_training(load(RLConfig, None, [*words, f"run_dir={run_dir}"]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without the clocks."""
    return [
        {name: value for name, value in line.items() if not name.startswith("time/")}
        for line in lines(run_dir / "metrics.jsonl")
    ]
