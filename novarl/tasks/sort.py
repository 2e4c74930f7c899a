"""Sort letters; the teacher's demonstrations mostly copy them.

    sort: dcaeb   ->   abcde

The teacher copies the letters 80 % of the time and sorts them 20 % of the time. Imitation therefore learns to copy (the
most likely answer) and sometimes to sort; rewards distinguish the two. Held-out problems use other *sets* of letters,
so their answers are also unseen.
"""

from __future__ import annotations

import random
from typing import Any

from novarl.rewards.per_rollout import by_answer
from novarl.tasks.task import Problem, Task, whole

LETTERS = "abcdefghij"
COPY_SHARE = 0.8


def is_sorted(text: str, answer: Any) -> float:
    """1.0 if the response is exactly the sorted letters (ignoring surrounding white space), else 0.0."""
    return float(text.strip() == answer)


def task(*, difficulty: int = 5) -> Task:
    """Sorting `difficulty` (4 to 7) of the first ten letters."""
    count = whole(difficulty, "difficulty", lowest=4, highest=7)

    def draw(rng: random.Random) -> Problem:
        letters = rng.sample(LETTERS, count)
        answer = "".join(sorted(letters))
        return Problem(f"sort: {''.join(letters)}", answer, key=answer)

    def teach(rng: random.Random, problem: Problem) -> str:
        return problem.text.removeprefix("sort: ") if rng.random() < COPY_SHARE else str(problem.answer)

    return Task(
        name="sort" if count == 5 else f"sort-{count}",
        summary=f"sort {count} letters; the demonstrations mostly copy them",
        draw=draw,
        teach=teach,
        rewards=lambda: {"sorted": by_answer(is_sorted)},
        max_tokens=count + 3,
        warmup=250,
        warmup_lr=3e-3,
        rl_lr=5e-4,
        split="",
        held_out_share=0.3,
    )
