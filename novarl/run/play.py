"""Sampling and scoring for a loop. Scoring starts while other answers are still being sampled."""

from __future__ import annotations

from collections.abc import Sequence

from novarl.core.types import Prompt, Rollout, Scored
from novarl.rewards.compose import RewardSet
from novarl.run.sampler import Sampler


class Play:
    """`sample`, then `score` of its result. Rewards run in between, since the run has one event loop."""

    def __init__(self, sampler: Sampler, rewards: RewardSet) -> None:
        self.sampler, self.rewards = sampler, rewards
        self._begun = rewards.begin()

    def sample(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Rollout]:
        self.rewards.progress.step = step
        self._begun = self.rewards.begin()
        return self.sampler.train(asked, step, ended=self._begun.add)

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        return self.sampler.loop.run(self.rewards.score(rollouts, self._begun))
