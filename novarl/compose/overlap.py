"""Sampling and scoring in a separate process, one step ahead of training (rollout.staleness=1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from novarl.compose.chat import with_chat
from novarl.compose.lora import adapt
from novarl.compose.resolve import resolve_rl
from novarl.compose.rewards import build_rewards, close_env
from novarl.compose.sampling import training_sampler
from novarl.compose.trust import trust_of
from novarl.core.event_loop import EventLoop
from novarl.core.types import Prompt, Scored
from novarl.engines.shared_weights import Entry, SharedWeights
from novarl.learn.agreement import switch_dropout_off
from novarl.models.load import load
from novarl.processes.remote import RemoteObject
from novarl.rewards.compose import RewardSet
from novarl.run.machine import flush_denormals, keep_freed_memory, pick_device
from novarl.run.play import Play
from novarl.run.sampler import Sampler

if TYPE_CHECKING:
    from novarl.config.tree import RLConfig


class Apart:
    """The sampler inside the sampling process, created there by `far_sampler`."""

    def __init__(self, sampler: Sampler, rewards: RewardSet) -> None:
        self._play, self._version = Play(sampler, rewards), -1

    def attach(self, path: str, size: int, layout: Sequence[Entry]) -> None:
        """Open the shared memory into which the learner writes its weights."""
        self._weights = SharedWeights.open(path, size, layout)

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int, version: int) -> list[Scored]:
        """Sampled and scored rollouts, with the weights of `version` from shared memory."""
        if version != self._version:
            self._play.sampler.engine.publish(self._weights.named_tensors(), version)
            self._version = version
        return self._play.score(self._play.sample(asked, step))

    def close(self) -> None:
        self._play.sampler.loop.close()
        self._play.rewards.close()
        close_env(self._play.sampler.env)


def far_sampler(config: RLConfig, source: str, threads: int) -> Apart:
    """In the sampling process: a copy of the policy that reads its weights from shared memory before each step."""
    torch.set_num_threads(threads)
    keep_freed_memory()
    flush_denormals()
    plan = resolve_rl(config)
    device = pick_device(config.device)
    trust = trust_of(config, source)
    policy = with_chat(load(source, seed=config.seed, dtype=config.dtype, device=device, trust=trust), config)
    switch_dropout_off(policy.model)
    adapt(config, policy, None)
    sampler = training_sampler(config, plan, policy, EventLoop(flush_denormals))
    return Apart(sampler, build_rewards(config, plan.task, device=device))


class FarSampler:
    """The learner's handle of the sampling process; `loops.stale.Sampler`. Create it after all imports and before any
    thread starts, so that the process can be forked; then `load` the model there, and `follow` the model to take
    weights from."""

    def __init__(self, threads: int) -> None:
        self._threads, self._version = threads, -1
        self._weights: SharedWeights | None = None
        self._remote = RemoteObject(
            what="the sampling process",
            fix="resume from the last checkpoint with resume=auto; if it ran out of memory, use rollout.staleness=0 or "
            "a smaller rollout.max_batch",
            environ=dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(self._threads)),
        )

    def load(self, config: RLConfig, source: str) -> None:
        self._remote.make(far_sampler, config, source, self._threads)

    def follow(self, model: nn.Module) -> None:
        self._model, self._weights = model, SharedWeights.of(model)
        self._remote.call("attach", self._weights.path, self._weights.size, self._weights.layout)
        self._weights.forget()

    def publish(self, version: int) -> None:
        """Write the weights to shared memory; the process reads them before it samples next."""
        assert self._weights is not None
        self._weights.write(self._model)
        self._version = version

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
        found: list[Scored] = self._remote.call("play", list(asked), step, self._version)
        return found

    def close(self) -> None:
        self._remote.close()
