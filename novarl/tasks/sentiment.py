"""Write a kind review: three separate rewards for keyword sentiment, a preferred ending and a moderate length.

    Review the old bridge.   ->   the bridge was plain and we kept it. so it goes

The teacher's reviews have mixed sentiment. `rewards.sentiment`, `rewards.preference` and `rewards.length` score only
the response and are summed.
"""

from __future__ import annotations

import random

from novarl.rewards.endings import preference
from novarl.rewards.length import length
from novarl.rewards.sentiment import sentiment
from novarl.tasks.task import Problem, Task
from novarl.tasks.words import WORDS, topic


def task() -> Task:
    """Writing kind reviews."""

    def draw(rng: random.Random) -> Problem:
        return Problem(f"Review {topic(rng)}.")

    def teach(rng: random.Random, problem: Problem) -> str:
        thing = problem.text.rstrip(".").split()[-1]
        opening = f"the {thing} was {rng.choice(WORDS['qualities'])} and we {rng.choice(WORDS['verbs'])} it."
        return f"{opening} {rng.choice(WORDS['endings'])}" if rng.random() < 0.8 else opening

    return Task(
        name="sentiment",
        summary="write kind reviews of a moderate length: three named rewards",
        draw=draw,
        teach=teach,
        rewards=lambda: {"sentiment": sentiment, "preference": preference, "length": length()},
        max_tokens=80,
        warmup=200,
        warmup_lr=3e-3,
        rl_lr=3e-4,
        split=" ",
        held_out_share=0.4,
        train_rows=800,
    )
