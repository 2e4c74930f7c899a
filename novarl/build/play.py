"""Sampling and scoring as one: here, with rewards that begin while others are sampled, or in a process of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from novarl.build.lora import adapt, model_source
from novarl.build.machine import keep_freed_memory, pick_device
from novarl.build.resolve import resolve_rl
from novarl.build.rewards import build_rewards, close_env
from novarl.build.sampling import Sampler, training_sampler
from novarl.core.types import Prompt, Rollout, Scored
from novarl.engines.shared import Entry, SharedWeights
from novarl.engines.worker import Worker
from novarl.learn.agreement import switch_dropout_off
from novarl.models.load import load
from novarl.rewards.compose import RewardSet

if TYPE_CHECKING:
    from novarl.build.rl import Online
    from novarl.config.tree import RLConfig


class Play:
    """The first two verbs of a loop, `sample` and then `score` of what it gave. Between them rewards go on: the event
    loop is one for the whole run."""

    def __init__(self, sampler: Sampler, rewards: RewardSet) -> None:
        self.sampler, self.rewards = sampler, rewards
        self._runner = asyncio.Runner()
        self._begun = rewards.begin()

    def sample(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Rollout]:
        self._begun = self.rewards.begin()
        return self._runner.run(self.sampler.rollouts(asked, step, ended=self._begun.add))

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        return self._runner.run(self.rewards.score(rollouts, self._begun))

    def close(self) -> None:
        self._runner.close()


class Apart:
    """A sampler with the weights of its own process, which `far_sampler` makes there."""

    def __init__(self, sampler: Sampler, rewards: RewardSet, weights: SharedWeights) -> None:
        self._play, self._weights = Play(sampler, rewards), weights

    def publish(self, version: int) -> None:
        self._play.sampler.engine.publish(self._weights.named_tensors(), version)

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
        return self._play.score(self._play.sample(asked, step))

    def close(self) -> None:
        self._play.close()
        self._play.rewards.close()
        close_env(self._play.sampler.env)


def far_sampler(config: RLConfig, source: str, path: str, size: int, layout: Sequence[Entry], threads: int) -> Apart:
    """In the sampling process: a model like the policy, whose weights come from the shared block before each step."""
    weights = SharedWeights.open(path, size, layout)
    weights.forget()
    torch.set_num_threads(threads)
    keep_freed_memory()
    plan = resolve_rl(config)
    policy = load(source, seed=config.seed, dtype=config.dtype, device=pick_device(config.device))
    switch_dropout_off(policy.model)
    adapt(config, policy, None)
    sampler = training_sampler(config, plan, policy)
    return Apart(sampler, build_rewards(config, plan.task), weights)


class FarSampler:
    """The learner's end of the sampling process; `loops.stale.Sampler`."""

    def __init__(self, run: Online, worker: Worker, *, threads: int) -> None:
        self._model = run.policy.model
        self._weights = SharedWeights.of(self._model)
        place = (self._weights.path, self._weights.size, self._weights.layout)
        self._worker = worker
        worker.make(far_sampler, run.config, model_source(run.config, run.opened, run.state), *place, threads)

    def publish(self, version: int) -> None:
        self._weights.write(self._model)
        self._worker.call("publish", version)

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
        found: list[Scored] = self._worker.call("play", list(asked), step)
        return found

    def close(self) -> None:
        self._worker.close()
        self._weights.forget()  # where the process ended before it had it open
