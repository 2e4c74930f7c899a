"""Sampling and scoring as one: here, with rewards that begin while others are sampled, or in a process of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from novarl.build.chat import with_chat
from novarl.build.lora import adapt
from novarl.build.machine import divided_threads, flush_denormals, keep_freed_memory, pick_device
from novarl.build.resolve import resolve_rl
from novarl.build.rewards import build_rewards, close_env
from novarl.build.sampling import Sampler, training_sampler
from novarl.build.trust import trust_of
from novarl.core.types import Prompt, Rollout, Scored
from novarl.engines.shared import Entry, SharedWeights
from novarl.engines.worker import Worker
from novarl.learn.agreement import switch_dropout_off
from novarl.models.load import load
from novarl.rewards.compose import RewardSet

if TYPE_CHECKING:
    from novarl.config.tree import RLConfig


class Play:
    """The first two verbs of a loop, `sample` and then `score` of what it gave. Between them rewards go on: the event
    loop is one for the whole run."""

    def __init__(self, sampler: Sampler, rewards: RewardSet) -> None:
        self.sampler, self.rewards = sampler, rewards
        self._runner = asyncio.Runner()
        self._begun = rewards.begin()

    def sample(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Rollout]:
        self.rewards.progress.step = step
        self._begun = self.rewards.begin()
        return self._runner.run(self.sampler.rollouts(asked, step, ended=self._begun.add))

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        return self._runner.run(self.rewards.score(rollouts, self._begun))

    def close(self) -> None:
        self._runner.close()


class Apart:
    """A sampler with the weights of its own process, which `far_sampler` makes there."""

    def __init__(self, sampler: Sampler, rewards: RewardSet) -> None:
        self._play, self._version = Play(sampler, rewards), -1

    def attach(self, path: str, size: int, layout: Sequence[Entry]) -> None:
        """Where the learner leaves its weights."""
        self._weights = SharedWeights.open(path, size, layout)

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int, version: int) -> list[Scored]:
        """Sampled and scored rollouts, by the weights of the shared block, which are those of `version`."""
        if version != self._version:
            self._play.sampler.engine.publish(self._weights.named_tensors(), version)
            self._version = version
        return self._play.score(self._play.sample(asked, step))

    def close(self) -> None:
        self._play.close()
        self._play.rewards.close()
        close_env(self._play.sampler.env)


def far_sampler(config: RLConfig, source: str, threads: int) -> Apart:
    """In the sampling process: a model like the policy, whose weights come from the shared block before each step."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    flush_denormals()
    plan = resolve_rl(config)
    device = pick_device(config.device)
    trust = trust_of(config, source)
    policy = with_chat(load(source, seed=config.seed, dtype=config.dtype, device=device, trust=trust), config)
    switch_dropout_off(policy.model)
    adapt(config, policy, None)
    sampler = training_sampler(config, plan, policy)
    return Apart(sampler, build_rewards(config, plan.task, device=device))


class FarSampler:
    """The learner's end of the sampling process; `loops.stale.Sampler`.

    To be made after all imports and before anything starts a thread, so that the process is a fork; then it is told
    what to `load`, while the run is composed here, and at last whose weights to sample by (`follow`).
    """

    def __init__(self, config: RLConfig) -> None:
        _, self._threads = divided_threads(config)
        self._version = -1
        self._weights: SharedWeights | None = None
        self._worker = Worker(
            what="the sampling process",
            fix="go on from the last checkpoint with resume=auto; if memory was short, with rollout.staleness=0 or "
            "fewer rollout.max_batch",
            environ=dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self._threads)),
        )

    def load(self, config: RLConfig, source: str) -> None:
        self._worker.make(far_sampler, config, source, self._threads)

    def follow(self, model: nn.Module) -> None:
        self._model, self._weights = model, SharedWeights.of(model)
        self._worker.call("attach", self._weights.path, self._weights.size, self._weights.layout)
        self._weights.forget()

    def publish(self, version: int) -> None:
        """Leave the weights where the process reads them when it begins to play, which it does before the next."""
        assert self._weights is not None
        self._weights.write(self._model)
        self._version = version

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
        found: list[Scored] = self._worker.call("play", list(asked), step, self._version)
        return found

    def close(self) -> None:
        self._worker.close()
