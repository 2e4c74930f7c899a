"""Evaluation of a policy on held-out rows, and samples.md."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from novarl.core.checkpoint import write_atomic
from novarl.core.errors import visible
from novarl.core.types import Message, Prompt, Rollout, Sampling, Scored
from novarl.distributed.ranks import Ranks
from novarl.loops.admit import turns_of
from novarl.loops.evaluate import Evaluation, evaluate
from novarl.rewards.compose import RewardSet
from novarl.run.sampler import Sampler

SHOWN = 10
"""Rows in samples.md."""

ENDED = {
    "stop": "complete",
    "length": "truncated at the token limit",
    "turns": "truncated at the turn limit",
    "context": "truncated at the end of the model's context",
}


@dataclass(frozen=True, slots=True)
class Judge:
    """Answers held-out rows greedily, and `k` more times with `sampling` for pass@k and best-of-k by the reward
    `best_of`."""

    prompts: Sequence[Prompt]
    sampler: Sampler
    rewards: RewardSet
    ranks: Ranks
    sampling: Sampling
    k: int
    best_of: str | None = None

    def __call__(self) -> Evaluation:
        return evaluate(
            self.prompts,
            self._sample,
            self.score,
            ranks=self.ranks,
            k=self.k,
            temperature=self.sampling.temperature,
            best_of=self.best_of,
        )

    def score(self, rollouts: list[Rollout]) -> list[Scored]:
        return self.sampler.loop.run(self.rewards.score(rollouts))

    def _sample(self, asked: Sequence[tuple[int, Prompt]], samples: int, temperature: float) -> list[Rollout]:
        return self.sampler.evaluate(asked, samples, replace(self.sampling, temperature=temperature))


def write_samples(path: Path, rows: Sequence[Scored]) -> None:
    """samples.md: the first rows of an evaluation with prompt, expected answer and the model's answer."""
    parts = ["# Samples\n\nThe first held-out rows, answered with greedy decoding.\n"]
    for number, row in enumerate(rows[:SHOWN], start=1):
        rollout = row.rollout
        score = "failed" if row.reward is None else "none" if math.isnan(row.reward) else f"{row.reward:.3f}"
        parts.append(
            f"## {number}. {rollout.prompt.id}\n\n{_conversation(rollout.prompt.messages)}\n\n"
            + (f"expected:\n\n{_fence(str(rollout.prompt.answer))}\n\n" if rollout.prompt.answer is not None else "")
            + f"answer (reward {score}, {ENDED.get(rollout.finish_reason, rollout.finish_reason)}):\n\n"
            + f"{_conversation(_said(rollout)) if turns_of(rollout) > 1 else _fence(rollout.text)}\n"
        )
    write_atomic(path, visible("\n".join(parts)))


def _said(rollout: Rollout) -> Sequence[Message]:
    """The messages after the prompt, from the policy and its environment."""
    asked = len(rollout.prompt.messages)
    begins = rollout.messages[:asked] == rollout.prompt.messages
    return rollout.messages[asked:] if begins else rollout.messages


def _conversation(messages: Sequence[Message]) -> str:
    """The text of one message, or the role and text of each of several."""
    if len(messages) == 1:
        return _fence(str(messages[0]["content"]))
    return "\n\n".join(f"{message['role']}:\n\n{_fence(str(message['content']))}" for message in messages)


def _fence(text: str) -> str:
    """`text` as a code block, with a fence longer than any run of backquotes in it."""
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}\n{text}\n{ticks}"
