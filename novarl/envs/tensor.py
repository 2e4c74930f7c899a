"""Vector environments over tensors, learnable in seconds, with known optima (`core.types.TensorEnv`)."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor


class Directions:
    """Point the way: each observation x ~ N(0, I) in the plane has one right action, floor((angle(x) / 2 pi + 1/2) *
    actions), the one of `actions` equal sectors that x lies in; it pays 1, any other 0. Observations depend neither on
    the past nor on the actions, and episodes last `horizon` steps. The best policy earns `optimum` = 1 per step, a
    blind one 1 / actions."""

    optimum = 1.0

    def __init__(self, *, actions: int = 4, horizon: int = 4, seed: int = 0) -> None:
        self.actions, self.horizon = actions, horizon
        self.observation_size = 2
        self._random = torch.Generator().manual_seed(seed)
        self._seen = torch.zeros(0, 2)
        self._step = 0

    def reset(self, batch_size: int) -> Tensor:
        """Begin `batch_size` episodes: their first observations [B, 2]."""
        self._step = 0
        self._seen = self._observe(batch_size)
        return self._seen

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Act [B] in every episode: next observations [B, 2], rewards [B], and whether each is over [B]."""
        rewards = (actions == self.right(self._seen)).float()
        self._step += 1
        self._seen = self._observe(len(actions))
        return self._seen, rewards, torch.full((len(actions),), self._step >= self.horizon)

    def right(self, observations: Tensor) -> Tensor:
        """The right action [B] of each observation [B, 2]."""
        turn = torch.atan2(observations[:, 1], observations[:, 0]) / (2 * torch.pi) + 0.5
        return (turn * self.actions).long().remainder(self.actions)

    def _observe(self, batch_size: int) -> Tensor:
        return torch.randn(batch_size, 2, generator=self._random)


class PreferenceBandit:
    """One step: features [P, F] of a prompt, drawn uniformly, are shown, and an action is chosen that is worth
    `rewards` [P, A]. `optimum` is the mean over prompts of the best action's reward."""

    def __init__(self, features: Tensor, rewards: Tensor, *, texts: tuple[str, ...] = (), seed: int = 0) -> None:
        if len(features) != len(rewards):
            raise ValueError(f"{len(features)} prompts have features, {len(rewards)} have rewards")
        self.features, self.rewards, self.texts = features, rewards, texts
        self.actions = rewards.shape[1]
        self.observation_size = features.shape[1]
        self.optimum = float(rewards.max(dim=1).values.mean())
        self._random = torch.Generator().manual_seed(seed)
        self._prompts = torch.zeros(0, dtype=torch.int64)

    @staticmethod
    def read(path: Path, *, seed: int = 0) -> PreferenceBandit:
        """From JSON lines with `features`, `answer` (action -> reward) and `messages`, as in examples/bandit."""
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        features = torch.tensor([row["features"] for row in rows])
        rewards = torch.tensor([[row["answer"][action] for action in sorted(row["answer"])] for row in rows])
        return PreferenceBandit(
            features, rewards, texts=tuple(row["messages"][-1]["content"] for row in rows), seed=seed
        )

    def reset(self, batch_size: int) -> Tensor:
        """Draw `batch_size` prompts: their features [B, F]."""
        self._prompts = torch.randint(len(self.features), (batch_size,), generator=self._random)
        return self.features[self._prompts]

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose an action [B] for each prompt: fresh prompts' features [B, F], rewards [B], and all ones [B]."""
        rewards = self.rewards[self._prompts, actions]
        return self.reset(len(actions)), rewards, torch.ones(len(actions), dtype=torch.bool)
