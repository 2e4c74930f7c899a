"""The definition of a built-in task: problems, an imperfect teacher, rewards, and settings for a tiny model.

Every row is a pure function of (task and its options, split, seed, position): the first 100 of 2,000 rows are the rows
of a request for 100, and "sort/train/41" is the same row in every process, under every `PYTHONHASHSEED`. The split of a
problem is determined by a hash of the problem itself, so train and held-out never share one, whatever the sizes and
seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.rewards.verdict import Scorer

Split = Literal["train", "held_out"]
Row = dict[str, Any]
"""`id`, `messages` and optionally `answer`."""

_PATIENCE = 2000
"""Consecutive duplicates after which a task is considered exhausted."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question: its text, the answer for rewards, and the key that determines the split (default: the text)."""

    text: str
    answer: Any = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A task with its options applied.

    name, summary   its name, with options that change its rows ("arithmetic-8"), and one line on it
    draw            a random problem
    teach           a demonstration: how the imperfect teacher answers a problem
    rewards         creates its named rewards
    weights         of the rewards (default 1.0)
    max_tokens      the longest answer, in tokens of the built-in byte tokenizer
    warmup          supervised steps of 64 demonstrations before reinforcement learning of an untrained `tiny`
    warmup_lr       the learning rate of those steps
    rl_lr           the learning rate of reinforcement learning afterwards
    split           the string that ends a step of an answer (empty: every token is a step)
    held_out_share  of all problems
    train_rows      the default number of training rows
    """

    name: str
    summary: str
    draw: Callable[[random.Random], Problem]
    teach: Callable[[random.Random, Problem], str]
    rewards: Callable[[], Mapping[str, Scorer]]
    max_tokens: int
    warmup: int
    warmup_lr: float
    rl_lr: float
    split: str
    weights: Mapping[str, float] = field(default_factory=dict)
    held_out_share: float = 0.2
    train_rows: int = 2000

    def rows(self, split: Split, n: int | None = None, seed: int = 0) -> list[Row]:
        """`n` distinct rows for training (default `train_rows`) or held out (default 500), with ids "sort/train/41"; a
        seed other than 0 gives other rows and is part of their ids. NovaError if there are fewer than `n` problems."""
        if split not in ("train", "held_out"):
            raise NovaError(f"unknown split {split!r}", where=f"task {self.name}", fix="use train or held_out")
        wanted = n if n is not None else self.train_rows if split == "train" else 500
        problems = self._problems(split, seed)
        rows: list[Row] = []
        for index in range(wanted):
            problem = next(problems, None)
            if problem is None:
                what = f"has only {index} distinct {split} problems, but {wanted} were requested"
                raise NovaError(what, where=f"task {self.name}", fix="request fewer, or raise the difficulty")
            row = self._row(split, seed, index, problem)
            rows.append(row if problem.answer is None else row | {"answer": problem.answer})
        return rows

    def demonstrations(self, n: int | None = None, seed: int = 0) -> list[Row]:
        """`n` (default 10,000) solutions of training problems by the imperfect teacher; problems may repeat."""
        rows: list[Row] = []
        for index in range(10_000 if n is None else n):
            rng = random.Random(derive(seed, "demonstration", self.name, index))
            problem = self.draw(rng)
            while self._side(problem) != "train":
                problem = self.draw(rng)
            row = self._row("demonstration", seed, index, problem)
            row["messages"].append({"role": "assistant", "content": self.teach(rng, problem)})
            rows.append(row)
        return rows

    def _row(self, kind: str, seed: int, index: int, problem: Problem) -> Row:
        origin = kind if seed == 0 else f"{kind}-seed{seed}"
        return {"id": f"{self.name}/{origin}/{index}", "messages": [{"role": "user", "content": problem.text}]}

    def _problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Distinct problems of one split, until the task is exhausted."""
        rng = random.Random(derive(seed, "rows", self.name, split))
        seen: set[str] = set()
        vain = 0
        while vain < _PATIENCE:
            problem = self.draw(rng)
            if problem.text in seen or self._side(problem) != split:
                vain += 1
                continue
            seen.add(problem.text)
            vain = 0
            yield problem

    def _side(self, problem: Problem) -> Split:
        digest = hashlib.blake2b((problem.key or problem.text).encode(), digest_size=8).digest()
        return "held_out" if int.from_bytes(digest, "little") < self.held_out_share * 2**64 else "train"


def whole(value: int, name: str, *, lowest: int, highest: int) -> int:
    """Validate the range of a task option."""
    if not lowest <= value <= highest:
        what = f"must be from {lowest} to {highest}, not {value}"
        raise NovaError(what, where=f"task_options.{name}", fix="use a number in that range")
    return value
