"""Faults for `make bench-alarms`, put into real runs from outside: by replacing the engine, rewards, learner settings
or the optimiser of a run, never through a hook in the library.

A fault begins at a step (`onset`). Engines count their steps by `publish`, which a run calls once before each.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from novarl.compose import rl
from novarl.core.types import Batch, Completion, Rollout, Sampling, Scored
from novarl.learn.scorer import Scorer
from novarl.loops.online import Stages
from novarl.models.load import Policy
from novarl.run.sampler import local_engine


@dataclass
class Fault:
    """One fault: how it changes the engine (given the policy and the onset) or the stages. `expected` is the alert that
    names it, `families` the algorithms that it can occur in (None: all), `settings` what its runs need besides."""

    name: str
    expected: str
    kind: str
    engine: Callable[[Policy, int], Any] | None = None
    stages: Callable[[Stages, int, int], Stages] | None = None
    families: tuple[str, ...] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    onset: int = 9
    steps: int = 24


class Wrapped:
    """An engine around the run's own that changes requests or completions from step `onset` on."""

    def __init__(self, policy: Policy, onset: int) -> None:
        self.policy, self.onset, self.begun = policy, onset, 0
        self.inner = local_engine(policy)
        self.shares_weights = True

    @property
    def on(self) -> bool:
        return self.begun >= self.onset

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        if not self.on:
            return await self.inner.sample(tokens, sampling, key=key)
        return await self.faulty(tokens, sampling, key=key)

    async def faulty(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        raise NotImplementedError

    def publish(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        self.begun += 1
        self.inner.publish(weights, version)

    def close(self) -> None:
        self.inner.close()


class Sampled(Wrapped):
    """Samples with other settings than it is asked for."""

    def __init__(self, policy: Policy, onset: int, **changes: Any) -> None:
        super().__init__(policy, onset)
        self.changes = changes

    async def faulty(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        found = await self.inner.sample(tokens, replace(sampling, supports=False, **self.changes), key=key)
        return replace(found, kept_logmass=(0.0,) * len(found.tokens), support=None)


class Prompted(Wrapped):
    """Samples from a changed prompt."""

    def __init__(self, policy: Policy, onset: int, change: Callable[[Policy, list[int]], list[int]]) -> None:
        super().__init__(policy, onset)
        self.change = change

    async def faulty(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        return await self.inner.sample(self.change(self.policy, list(tokens)), sampling, key=key)


class Retokenised(Wrapped):
    """Some tokens come back as others, as after decoding and encoding."""

    async def faulty(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        found = await self.inner.sample(tokens, sampling, key=key)
        draw = random.Random(f"{key} {sampling.seed}")
        changed = list(found.tokens)
        if draw.random() < 0.3:
            changed[draw.randrange(len(changed))] = ord(" ")
        return replace(found, tokens=tuple(changed))


class Stale(Wrapped):
    """Samples from the weights of `lag` steps before; `lag` None: from those of the beginning."""

    def __init__(self, policy: Policy, onset: int, lag: int | None) -> None:
        super().__init__(policy, onset)
        self.lag = lag
        self.held: list[list[Tensor]] = []
        self.copy = deepcopy(policy.model)
        self.inner = local_engine(replace(policy, model=self.copy))

    async def faulty(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        return await self.inner.sample(tokens, sampling, key=key)

    def publish(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        self.begun += 1
        self.held.append([parameter.detach().clone() for parameter in self.policy.model.parameters()])
        self.held = self.held[-4:]
        if not self.on or self.lag is not None:
            back = self.lag if self.on and self.lag is not None else 0
            with torch.no_grad():
                for mine, theirs in zip(
                    self.copy.parameters(), self.held[-1 - min(back, len(self.held) - 1)], strict=True
                ):
                    mine.copy_(theirs)
        self.inner.publish(None, version)


class Undelivered(Wrapped):
    """Samples from the base model: adapters never arrive."""

    def __init__(self, policy: Policy, onset: int) -> None:
        super().__init__(policy, onset)
        self.base = deepcopy(policy.model)
        self.inner = local_engine(replace(policy, model=self.base))

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        return await self.inner.sample(tokens, sampling, key=key)

    def publish(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        self.inner.publish(None, version)


@dataclass(frozen=True, slots=True)
class Noisy(Scorer):
    """A learner with dropout before the output head."""

    dropout: float = 0.1

    def hidden(self, batch: Batch) -> Tensor:
        return torch.nn.functional.dropout(Scorer.hidden(self, batch), self.dropout, training=True)


@contextmanager
def injected(fault: Fault | None, seed: int) -> Iterator[None]:
    """Runs of this process have the fault while the block runs."""
    if fault is None or fault.stages is None:
        yield
        return
    build, change = rl.online_stages, fault.stages

    def built(*args: Any, **options: Any) -> Stages:
        return change(build(*args, **options), fault.onset, seed)

    rl.online_stages = built
    try:
        yield
    finally:
        rl.online_stages = build


def _each_step(stages: Stages, act: Callable[[int], None]) -> Stages:
    """The stages, calling `act(step)` before each step, which counts from 1."""
    steps, publish = itertools.count(1), stages.publish

    def published(version: int) -> None:
        act(next(steps))
        publish(version)

    return replace(stages, publish=published)


def _scored(change: Callable[[Rollout, float, int], float]) -> Callable[[Stages, int, int], Stages]:
    """Replaces the reward from the onset on by `change(rollout, reward, step)`."""

    def inject(stages: Stages, onset: int, seed: int) -> Stages:
        now, score = [0], stages.score

        def scored(rollouts: list[Rollout]) -> list[Scored]:
            found = score(rollouts)
            if now[0] < onset:
                return found
            return [
                replace(one, reward=change(one.rollout, one.reward, now[0])) if one.reward is not None else one
                for one in found
            ]

        return _each_step(replace(stages, score=scored), lambda step: now.__setitem__(0, step))

    return inject


def _coin(rollout: Rollout, reward: float, step: int) -> float:
    return float(hashlib.sha256(f"{rollout.prompt.id} {rollout.text} {step}".encode()).digest()[0] % 4 == 0)


def _of_prompt(rollout: Rollout, reward: float, step: int) -> float:
    return float(hashlib.sha256(rollout.prompt.id.encode()).digest()[0] % 2)


def _length(rollout: Rollout, reward: float, step: int) -> float:
    return float(len(rollout.text) - 5)


def _once(stages: Stages, onset: int, act: Callable[[], None]) -> Stages:
    return _each_step(stages, lambda step: act() if step == onset else None)


def _faster(factor: float) -> Callable[[Stages, int, int], Stages]:
    def inject(stages: Stages, onset: int, seed: int) -> Stages:
        optimizer = stages.learner.optimizer

        def act() -> None:
            optimizer.settings = replace(optimizer.settings, lr=optimizer.settings.lr * factor)

        return _once(stages, onset, act)

    return inject


def _length_pays(stages: Stages, onset: int, seed: int) -> Stages:
    """Longer answers earn more, and a larger rate shows it sooner."""
    return _faster(4.0)(_scored(_length)(stages, onset, seed), onset, seed)


def _faster_critic(stages: Stages, onset: int, seed: int) -> Stages:
    optimizer = getattr(stages.supplier, "optimizer")  # noqa: B009 - of the critic, which is a supplier with one

    def act() -> None:
        optimizer.settings = replace(optimizer.settings, lr=optimizer.settings.lr * 300)

    return _once(stages, onset, act)


def _drawn_in(stages: Stages, onset: int, seed: int) -> Stages:
    """Rewards of a coin, a penalty on entropy and a larger rate: the policy becomes certain of what does not pay."""
    fixed, optimizer = stages.governor.entropy, stages.learner.optimizer

    def act() -> None:
        optimizer.settings = replace(optimizer.settings, lr=optimizer.settings.lr * 2)
        fixed.coef = -20.0  # type: ignore[misc]

    return _once(_scored(_coin)(stages, onset, seed), onset, act)


def _one_large_gradient(stages: Stages, onset: int, seed: int) -> Stages:
    optimizer = stages.learner.optimizer
    step, due = optimizer.step, [False]

    def stepped() -> tuple[float, float]:
        if due[0]:
            due[0] = False
            for gradient in optimizer.gradients():
                gradient.mul_(100.0)
        return step()

    optimizer.step = stepped  # type: ignore[method-assign]
    return _once(stages, onset, lambda: due.__setitem__(0, True))


def _not_a_number(stages: Stages, onset: int, seed: int) -> Stages:
    """One gradient of the optimiser is NaN."""
    optimizer = stages.learner.optimizer
    step, due = optimizer.step, [False]

    def stepped() -> tuple[float, float]:
        if due[0]:
            optimizer.gradients()[seed % 3].view(-1)[0] = math.nan
        return step()

    optimizer.step = stepped  # type: ignore[method-assign]
    return _once(stages, onset, lambda: due.__setitem__(0, True))


def _clipped(stages: Stages, onset: int, seed: int) -> Stages:
    """The clip range closes."""

    def act() -> None:
        objective = stages.learner.objective
        surrogate = objective.surrogate
        assert isinstance(surrogate, partial)
        narrow = {name: 1e-7 for name in surrogate.keywords if name in ("clip_low", "clip_high")}
        stages.learner.objective = replace(objective, surrogate=partial(surrogate.func, **surrogate.keywords | narrow))

    return _once(stages, onset, act)


def _scorer(change: Callable[[Scorer], Scorer]) -> Callable[[Stages, int, int], Stages]:
    def inject(stages: Stages, onset: int, seed: int) -> Stages:
        def act() -> None:
            stages.learner.scorer = change(stages.learner.scorer)

        return _once(stages, onset, act)

    return inject


def _noisy(scorer: Scorer) -> Scorer:
    return Noisy(scorer.model, scorer.temperature, scorer.chunk, scorer.layout, scorer.compute_dtype)


def _drop_last(policy: Policy, tokens: list[int]) -> list[int]:
    return tokens[:-1]


class Padded(Prompted):
    """Prompts are padded on the left to the longest, and the padding is attended to."""

    def __init__(self, policy: Policy, onset: int, width: int) -> None:
        super().__init__(
            policy, onset, lambda policy, tokens: [policy.tokenizer.pad_token_id] * (width - len(tokens)) + tokens
        )


PPO = ("ppo", "dapo", "ppo_clip")
WIDEST = 14
"""Tokens of the longest prompt of the benchmark's rows."""


TRAINING = (
    Fault("constant_reward", "no_signal", "training", stages=_scored(lambda *_: 0.5), onset=1, steps=8),
    Fault("lr_x300", "kl_explosion", "training", stages=_faster(300.0), steps=14),
    Fault("entropy_penalty", "entropy_collapse", "training", stages=_drawn_in, steps=40),
    Fault("gradient_x100", "gradient_spike", "training", stages=_one_large_gradient, onset=12, steps=14),
    Fault("reward_of_prompt", "dead_groups", "training", stages=_scored(_of_prompt), steps=18),
    Fault("reward_lost", "reward_variance_collapse", "training", stages=_scored(lambda *_: 0.0), steps=18),
    Fault("clip_closed", "clip_saturation", "training", stages=_clipped, families=PPO, steps=18),
    Fault("critic_lr_x300", "value_divergence", "training", stages=_faster_critic, families=("ppo",)),
    Fault("length_pays", "length_drift", "training", stages=_length_pays, steps=40),
    Fault("nan_gradient", "nan", "training", stages=_not_a_number, steps=12),
)

PLUMBING = (
    Fault("truncated", "truncated_sampling", "plumbing", engine=partial(Sampled, top_p=0.9), onset=3, steps=8),
    Fault("temperature", "temperature", "plumbing", engine=partial(Sampled, temperature=0.7), onset=3, steps=8),
    Fault("template", "template", "plumbing", engine=partial(Prompted, change=_drop_last), onset=3, steps=8),
    Fault("retokenised", "template", "plumbing", engine=Retokenised, onset=3, steps=8),
    Fault("stale", "stale_weights", "plumbing", engine=partial(Stale, lag=1), onset=3, steps=10),
    Fault("frozen", "stale_weights", "plumbing", engine=partial(Stale, lag=None), onset=3, steps=10),
    Fault(
        "undelivered",
        "adapter_not_delivered",
        "plumbing",
        engine=Undelivered,
        settings={"lora": {"rank": 4}},
        onset=1,
        steps=10,
    ),
    Fault(
        "dtype", "dtype", "plumbing", stages=_scorer(partial(replace, compute_dtype=torch.bfloat16)), onset=3, steps=8
    ),
    Fault("dropout", "dropout", "plumbing", stages=_scorer(_noisy), onset=3, steps=8),
    Fault("padding", "padding", "plumbing", engine=partial(Padded, width=WIDEST), onset=3, steps=8),
)

FAULTS = {fault.name: fault for fault in (*TRAINING, *PLUMBING)}
