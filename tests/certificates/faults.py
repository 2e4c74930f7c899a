"""Faults to plant in the library, and the certificate that must catch each.

What no certificate can see is a wrong baseline that still ignores the sample (another group's greedy reward, say): it
stays unbiased and only adds noise. Those are caught by the golden numbers in tests/algos.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from novarl.algos import advantages, aggregate, kl, logprobs, off_policy, surrogates

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """`plant` takes the function `module.function` and returns a faulty one."""

    name: str
    module: ModuleType
    function: str
    plant: Callable[[Function], Function]
    caught_by: str

    @property
    def where(self) -> str:
        return f"{self.module.__name__.rsplit('.', 1)[-1]}.{self.function}"


def shifted(position: int, axis: int = 0) -> Callable[[Function], Function]:
    """The argument at `position` is one row late."""

    def plant(function: Function) -> Function:
        def faulty(*arguments: Any, **options: Any) -> Any:
            moved = [a.roll(1, axis) if i == position else a for i, a in enumerate(arguments)]
            return function(*moved, **options)

        return faulty

    return plant


def swapped(first: int, second: int) -> Callable[[Function], Function]:
    """Two arguments in each other's place."""

    def plant(function: Function) -> Function:
        def faulty(*arguments: Any, **options: Any) -> Any:
            order = list(arguments)
            order[first], order[second] = order[second], order[first]
            return function(*order, **options)

        return faulty

    return plant


def with_options(**changed: Any) -> Callable[[Function], Function]:
    """Some options have no effect."""
    return lambda function: lambda *arguments, **options: function(*arguments, **{**options, **changed})


def scaled(factor: float, output: int | None = None) -> Callable[[Function], Function]:
    """The result, or one of several, times a factor."""

    def plant(function: Function) -> Function:
        def faulty(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if output is None:
                return factor * result
            return tuple(factor * part if i == output else part for i, part in enumerate(result))

        return faulty

    return plant


def instead(replacement: Function) -> Callable[[Function], Function]:
    """Another formula."""
    return lambda _: replacement


def half_frozen_head(function: Function) -> Function:
    """Half of the head's gradient is lost on the way."""
    return lambda hidden, weight, *rest, **options: function(hidden, (weight + weight.detach()) / 2, *rest, **options)


def swap_bounds(function: Function) -> Function:
    return lambda *arguments, clip_low, clip_high: function(*arguments, clip_low=clip_high, clip_high=clip_low)


def larger_surrogate(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, **clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = (logp - old).exp()
    clipped = ratio.clamp(1 - clip["clip_low"], 1 + clip["clip_high"])
    return torch.where(mask, -torch.maximum(ratio * advantage, clipped * advantage), 0.0), {}


def ema_with_own_batch(rewards: Tensor, ema: float | None, *, beta: float) -> tuple[Tensor, float]:
    updated = beta * (ema or 0.0) + (1 - beta) * float(rewards.mean())
    return rewards - updated, updated


def population_std(rewards: Tensor, group: Tensor, *, norm_std: bool, eps: float) -> Tensor:
    return (rewards - rewards.mean()) / (rewards.std(unbiased=False) + eps)


def own_reward_included(rewards: Tensor, group: Tensor) -> Tensor:
    return rewards - rewards.mean()


def own_reward_excluded(rewards: Tensor) -> Tensor:
    return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)


def groups_ignored(function: Function) -> Function:
    return lambda rewards, group, **options: function(rewards, torch.zeros_like(group), **options)


def population_whiten(advantage: Tensor, mask: Tensor, *, eps: float) -> Tensor:
    chosen = advantage[mask]
    white = (chosen - chosen.mean()) / (chosen.std(unbiased=False) + eps)
    return torch.zeros_like(advantage).masked_scatter(mask, white)


def prompt_counted(function: Function) -> Function:
    """Denominators over all tokens, the prompts' too."""
    return lambda mask, *rest, **options: function(torch.ones_like(mask), *rest, **options) * mask


def one_more_trajectory(function: Function) -> Function:
    return lambda *arguments, trajectories, **options: function(*arguments, trajectories=trajectories + 1, **options)


_LOGPROBS = [
    Fault("predicted by the token itself", logprobs, "chunked_logprobs", shifted(0), "no baseline"),
    Fault("targets one late", logprobs, "chunked_logprobs", shifted(2), "no baseline"),
    Fault("sign of the log-probability", logprobs, "chunked_logprobs", scaled(-1.0, 0), "no baseline"),
    Fault("sign of the entropy", logprobs, "chunked_logprobs", scaled(-1.0, 1), "entropy bonus"),
    Fault("half of the head's gradient lost", logprobs, "chunked_logprobs", half_frozen_head, "no baseline"),
    Fault("temperature ignored", logprobs, "chunked_logprobs", with_options(temperature=1.0), "no baseline, at temperature 0.7"),
]
_KL = [
    Fault("k1, direction", kl, "k1", swapped(0, 1), "k1 as reward, beta 0.5"),
    Fault("k2, without its half", kl, "k2", scaled(2.0), "k2 as loss"),
    Fault("k2, sign", kl, "k2", scaled(-1.0), "k2 as loss"),
    Fault("k3, direction", kl, "k3", swapped(0, 1), "k3 as loss"),
    Fault("k3, columns one apart", kl, "k3", shifted(1), "k3 as loss"),
]
_ADVANTAGES = [
    Fault("constant, sign", advantages, "constant_baseline", scaled(-1.0), "constant baseline"),
    Fault("ema with the batch itself in it", advantages, "ema_baseline", instead(ema_with_own_batch), "ema baseline, B=2"),
    Fault("scst, sign", advantages, "scst", scaled(-1.0), "scst baseline"),
    Fault("mean of the others only", advantages, "batch_mean", instead(own_reward_excluded), "mean baseline, B=3"),
    Fault("population deviation", advantages, "group", instead(population_std), "group with norm_std, k=3"),
    Fault("deviation ignored", advantages, "group", with_options(norm_std=False), "group with norm_std, k=3"),
    Fault("groups ignored", advantages, "group", groups_ignored, "group, groups of 2 and 1 interleaved"),
    Fault("rewards one late", advantages, "group", shifted(0), "group, k=2"),
    Fault("own reward in the baseline", advantages, "leave_one_out", instead(own_reward_included), "leave_one_out, k=3"),
    Fault("groups ignored", advantages, "leave_one_out", groups_ignored, "leave_one_out, groups of 2 and 1 interleaved"),
    Fault("population deviation", advantages, "whiten", instead(population_whiten), "whiten over tokens, B=2"),
    Fault("mask one late", advantages, "whiten", shifted(1), "whiten over tokens, B=2"),
    Fault("sees no flat group", advantages, "zero_variance_groups", scaled(0.0), "dynamic sampling, k=3, rewards 0 and 1"),
]
_SURROGATES = [
    Fault("sign", surrogates, "reinforce", scaled(-1.0, 0), "no baseline"),
    Fault("advantage one late", surrogates, "reinforce", shifted(2), "no baseline"),
    Fault("mask one late", surrogates, "reinforce", shifted(3), "no baseline"),
    Fault("sign", surrogates, "ppo_clip", scaled(-1.0, 0), "ppo_clip at ratio 1"),
    Fault("ratio upside down", surrogates, "ppo_clip", swapped(0, 1), "ppo_clip at ratio 1"),
    Fault("old columns one late", surrogates, "ppo_clip", shifted(1), "ppo_clip off policy, clip 0.2 and 0.28"),
    Fault("mask one late", surrogates, "ppo_clip", shifted(3), "ppo_clip at ratio 1"),
    Fault("bounds swapped", surrogates, "ppo_clip", swap_bounds, "ppo_clip off policy, clip 0.2 and 0.28"),
    Fault("the larger of the two", surrogates, "ppo_clip", instead(larger_surrogate), "ppo_clip off policy, clip 0.2 and 0.28"),
]
_OFF_POLICY = [
    Fault("mu / pi_old", off_policy, "truncated_weight", swapped(0, 1), "truncated weight, one token, no truncation"),
    Fault("not truncated", off_policy, "truncated_weight", with_options(maximum=1e9), "truncated weight, cap 1.1"),
    Fault("mask one late", off_policy, "truncated_weight", shifted(2), "truncated weight, one token, no truncation"),
]
_AGGREGATE = [
    Fault("mask one late", aggregate, "weights", shifted(0), "no baseline"),
    Fault("prompts counted", aggregate, "weights", prompt_counted, "token aggregation, no baseline, B=3"),
    Fault("prompts counted", aggregate, "weights", prompt_counted, "sequence aggregation, leave_one_out, k=3"),
    Fault("one trajectory too many", aggregate, "weights", one_more_trajectory, "leave_one_out, k=2"),
    Fault("constant ignored", aggregate, "weights", with_options(constant=1.0), "constant aggregation, max_tokens"),
    Fault("token mean for sequence mean", aggregate, "weights", with_options(how="token"), "sequence aggregation, group, k=3"),
    Fault("sequence mean for token mean", aggregate, "weights", with_options(how="sequence"), "token aggregation, group, k=2"),
]

FAULTS = [*_LOGPROBS, *_KL, *_ADVANTAGES, *_SURROGATES, *_OFF_POLICY, *_AGGREGATE]
