"""What a built-in task is: problems, an imperfect teacher, rewards, and settings under which a tiny model learns it.

Every row is a pure function of (task and its options, split, seed, position): the first 100 of 2,000 rows are the
rows of a request for 100, and "sort/train/41" is the same row in every process, under every `PYTHONHASHSEED`. Which
split a problem belongs to is decided by a hash of the problem itself, so train and held-out can never share one,
whatever the numbers and seeds asked for.
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
"""`id`, `messages` and, for prompts that have one, `answer`."""

_PATIENCE = 2000
"""Problems drawn in vain, one after another, before a task counts as having no more."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question: its text, the answer that rewards see, and what the split goes by (the text where not given)."""

    text: str
    answer: Any = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A task with its options settled.

    name, summary   its name, with options that change its rows ("arithmetic-8"), and one line on it
    draw            a random problem
    teach           a demonstration: how the imperfect teacher answers a problem
    rewards         its named rewards, made afresh
    weights         of the rewards, 1.0 where not named
    max_tokens      the longest answer it takes, in tokens of the built-in byte tokenizer
    warmup          supervised steps of 64 demonstrations after which an untrained `tiny` is worth training on rewards
    warmup_lr       the learning rate of those, and
    rl_lr           that of reinforcement learning afterwards
    split           what ends a step of an answer: a string, or every token where it is empty
    held_out_share  of all problems
    train_rows      how many there are unless said
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
        """`n` different rows to train on (`train_rows` if not said) or held out (500), with ids "sort/train/41".

        Seed 0 are *the* rows of a task; another seed gives others, with the seed in their ids. NovaError where the task
        has fewer than `n` different problems.
        """
        if split not in ("train", "held_out"):
            raise NovaError(f"unknown split {split!r}", where=f"task {self.name}", fix="use train or held_out")
        wanted = n if n is not None else self.train_rows if split == "train" else 500
        problems = self._problems(split, seed)
        rows: list[Row] = []
        for index in range(wanted):
            problem = next(problems, None)
            if problem is None:
                what = f"has only {index} different {split} problems, and {wanted} are asked for"
                raise NovaError(what, where=f"task {self.name}", fix="ask for fewer, or raise its difficulty")
            origin = split if seed == 0 else f"{split}-seed{seed}"
            row: Row = {"id": f"{self.name}/{origin}/{index}", "messages": [{"role": "user", "content": problem.text}]}
            rows.append(row if problem.answer is None else row | {"answer": problem.answer})
        return rows

    def demonstrations(self, n: int | None = None, seed: int = 0) -> list[Row]:
        """`n` (10,000 if not said) solutions of train problems as the imperfect teacher writes them; problems may
        recur."""
        rows: list[Row] = []
        for index in range(10_000 if n is None else n):
            rng = random.Random(derive(seed, "demonstration", self.name, index))
            problem = self.draw(rng)
            while self._side(problem) != "train":
                problem = self.draw(rng)
            answer = {"role": "assistant", "content": self.teach(rng, problem)}
            origin = "demonstration" if seed == 0 else f"demonstration-seed{seed}"
            question = {"role": "user", "content": problem.text}
            rows.append({"id": f"{self.name}/{origin}/{index}", "messages": [question, answer]})
        return rows

    def _problems(self, split: Split, seed: int) -> Iterator[Problem]:
        """Different problems of one side of the split, until the task seems to have no more."""
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
    """A task's option, checked to lie within its range."""
    if not lowest <= value <= highest:
        what = f"is {value}, not from {lowest} to {highest}"
        raise NovaError(what, where=f"task_options.{name}", fix="choose a number in that range")
    return value
