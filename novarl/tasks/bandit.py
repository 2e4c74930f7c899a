"""A preference bandit as text: choose one of three actions for one of four prompts, with known rewards.

    Mira: Prefer action 1   ->   1

The prompts and the table are data (`data/bandit.jsonl`). An irrelevant name before the prompt gives many rows; held-out
rows have other names. The teacher usually chooses the action after the best, so imitation learns to distinguish the
prompts but is wrong in each. The best policy earns the mean of the rows' maxima, 1.05; anything else earns -1.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from novarl.rewards.per_rollout import by_answer
from novarl.tasks.task import Problem, Task

INVALID = -1.0
ONE_OFF_SHARE = 0.6
_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


@cache
def table() -> tuple[tuple[str, Mapping[str, float]], ...]:
    """The four prompts with the reward of every action."""
    text = (resources.files("novarl.tasks") / "data" / "bandit.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return tuple((row["messages"][0]["content"], row["answer"]) for row in rows)


def worth(text: str, answer: Mapping[str, Any]) -> float:
    """The reward of the action that the response names, -1 if it names none."""
    return float(answer.get(text.strip(), INVALID))


def task() -> Task:
    """Choosing the best action for each prompt."""

    def draw(rng: random.Random) -> Problem:
        name = (rng.choice(_SYLLABLES) + rng.choice(_SYLLABLES)).capitalize()
        prompt, actions = rng.choice(table())
        return Problem(f"{name}: {prompt}", dict(actions), key=name)

    def teach(rng: random.Random, problem: Problem) -> str:
        best = max(problem.answer, key=problem.answer.__getitem__)
        one_off = str((int(best) + 1) % len(problem.answer))
        return one_off if rng.random() < ONE_OFF_SHARE else rng.choice(sorted(problem.answer))

    return Task(
        name="bandit",
        summary="choose the best of three actions for each of four prompts",
        draw=draw,
        teach=teach,
        rewards=lambda: {"preference": by_answer(worth)},
        max_tokens=4,
        warmup=150,
        warmup_lr=3e-3,
        rl_lr=1e-3,
        split="",
    )
