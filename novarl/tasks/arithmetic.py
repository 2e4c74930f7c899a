"""Add a column of digits step by step; the teacher's demonstrations often forget to carry.

    6+1+9+3   ->   6+1=7 7+9=16 16+3=19 #19

In 60 % of the demonstrations the teacher drops every carry (7+9=6, 15+8=13), and in addition 2 % of all sums are off by
one. Imitation can do no better than its teacher. The verifier checks only the final answer, so it rewards carrying if
every step is right. The difficulty is the number of digits.
"""

from __future__ import annotations

import random
import re
from typing import Any

from novarl.rewards.per_rollout import by_answer
from novarl.tasks.task import Problem, Task, whole

HASTY_SHARE = 0.6
SLIP_RATE = 0.02
_FINAL = re.compile(r"#(\d+)\s*$")


def is_right(text: str, answer: Any) -> float:
    """1.0 if the response ends in `#` and the right sum, else 0.0."""
    final = _FINAL.search(text)
    return float(final is not None and final.group(1) == str(answer))


def add_without_carry(a: int, b: int) -> int:
    """Add digit by digit, each modulo ten.

    >>> add_without_carry(7, 9), add_without_carry(15, 8)
    (6, 13)
    """
    total, place = 0, 1
    while a or b:
        total += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def task(*, difficulty: int = 5) -> Task:
    """Adding `difficulty` (3 to 12) digits from 1 to 9."""
    count = whole(difficulty, "difficulty", lowest=3, highest=12)

    def draw(rng: random.Random) -> Problem:
        digits = [rng.randint(1, 9) for _ in range(count)]
        return Problem("+".join(map(str, digits)), str(sum(digits)))

    def teach(rng: random.Random, problem: Problem) -> str:
        total, *rest = map(int, problem.text.split("+"))
        hasty = rng.random() < HASTY_SHARE
        steps: list[str] = []
        for digit in rest:
            right = add_without_carry(total, digit) if hasty else total + digit
            written = max(0, right + rng.choice((-1, 1))) if rng.random() < SLIP_RATE else right
            steps.append(f"{total}+{digit}={written}")
            total = written
        return f"{' '.join(steps)} #{total}"

    return Task(
        name="arithmetic" if count == 5 else f"arithmetic-{count}",
        summary=f"add {count} digits step by step; most demonstrations forget to carry",
        draw=draw,
        teach=teach,
        rewards=lambda: {"right": by_answer(is_right)},
        max_tokens=9 * count + 1,
        warmup=400,
        warmup_lr=3e-3,
        rl_lr=2e-4,
        split=" ",
    )
