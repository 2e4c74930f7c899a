"""Measuring a policy on held-out rows, and showing what it says."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from novarl.build.sampling import Sampler
from novarl.core.types import Prompt, Rollout, Sampling, Scored
from novarl.distributed.ranks import Ranks
from novarl.loops.evaluate import Evaluation, evaluate
from novarl.rewards.compose import RewardSet

SHOWN = 10
"""Rows in samples.md."""


@dataclass(frozen=True, slots=True)
class Judge:
    """Answers held-out rows greedily, and `k` more times by `sampling` for pass@k."""

    prompts: Sequence[Prompt]
    sampler: Sampler
    rewards: RewardSet
    ranks: Ranks
    sampling: Sampling
    k: int

    def __call__(self) -> Evaluation:
        return evaluate(
            self.prompts, self._sample, self.score, ranks=self.ranks, k=self.k, temperature=self.sampling.temperature
        )

    def score(self, rollouts: list[Rollout]) -> list[Scored]:
        return asyncio.run(self.rewards.score(rollouts))

    def _sample(self, asked: Sequence[tuple[int, Prompt]], samples: int, temperature: float) -> list[Rollout]:
        return self.sampler.evaluate(asked, samples, replace(self.sampling, temperature=temperature))


def write_samples(path: Path, rows: Sequence[Scored]) -> None:
    """samples.md: the first rows of an evaluation, with the question, the answer wanted and the one given."""
    parts = ["# Samples\n\nThe first held-out rows, answered greedily after training.\n"]
    for number, row in enumerate(rows[:SHOWN], start=1):
        rollout = row.rollout
        question = str(rollout.prompt.messages[-1]["content"])
        score = "failed" if row.reward is None else "not asked for" if math.isnan(row.reward) else f"{row.reward:.3f}"
        parts.append(
            f"## {number}. {rollout.prompt.id}\n\n{_fence(question)}\n\n"
            + (f"wanted:\n\n{_fence(str(rollout.prompt.answer))}\n\n" if rollout.prompt.answer is not None else "")
            + f"given (reward {score}, {rollout.finish_reason}):\n\n{_fence(rollout.text)}\n"
        )
    path.write_text("\n".join(parts), encoding="utf-8", errors="backslashreplace")


def _fence(text: str) -> str:
    """`text` as a code block, whatever backquotes it holds."""
    ticks = "```"
    while ticks in text:
        ticks += "`"
    return f"{ticks}\n{text}\n{ticks}"
