"""Faults to plant in the library, and the certificate that must catch each.

What no certificate can see is a wrong baseline that still ignores the sample (another group's greedy reward, say): it
stays unbiased and only adds noise. Those are caught by the golden numbers in tests/algos.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from novarl.algos import advantages, aggregate, kl, off_policy, surrogates
from novarl.kernels import logprobs
from tests.certificates import (
    constraint_cases,
    objective_cases,
    preference_faults,
    rows_cases,
    surrogate_faults,
    temporal_faults,
)
from tests.certificates.fault import Fault, Function, instead, planted, scaled, shifted, swapped, with_options


def half_frozen_head(function: Function) -> Function:
    """Half of the head's gradient is lost on the way."""
    return lambda hidden, weight, *rest, **options: function(hidden, (weight + weight.detach()) / 2, *rest, **options)


def target_for_likeliest(function: Function) -> Function:
    """The third of the results is the first."""

    def faulty(*arguments: Any, **options: Any) -> Any:
        logp, entropy, _ = function(*arguments, **options)
        return logp, entropy, logp.detach()

    return faulty


def swap_bounds(function: Function) -> Function:
    return lambda *arguments, clip_low, clip_high: function(*arguments, clip_low=clip_high, clip_high=clip_low)


def larger_surrogate(
    logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, **clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
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


def own_reward_excluded(rewards: Tensor, group: Tensor) -> Tensor:
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


FAULTS: list[Fault] = [
    *planted(
        logprobs,
        "chunked_logprobs",
        ("predicted by the token itself", shifted(0), "no baseline"),
        ("targets one late", shifted(2), "no baseline"),
        ("sign of the log-probability", scaled(-1.0, 0), "no baseline"),
        ("sign of the entropy", scaled(-1.0, 1), "entropy bonus"),
        ("half of the head's gradient lost", half_frozen_head, "no baseline"),
        ("temperature ignored", with_options(temperature=1.0), "no baseline, at temperature 0.7"),
        ("not renormalised", with_options(support=None), "truncated: top_k 2"),
        ("not renormalised", with_options(support=None), "truncated: top_p 0.75, temperature 0.7"),
        ("not renormalised", with_options(support=None), "truncated: entropy bonus"),
        ("not renormalised", with_options(support=None), "truncated: k3, value"),
    ),
    *planted(
        logprobs,
        "chunked_scores",
        ("sign of the log-probability", scaled(-1.0, 0), "no baseline"),
        ("sign of the entropy", scaled(-1.0, 1), "entropy bonus"),
        ("the target for the likeliest", target_for_likeliest, "log-probability of the likeliest token"),
        ("targets one late", shifted(2), "no baseline"),
        ("sign of the greedy log-probability", scaled(-1.0, 2), "log-probability of the likeliest token"),
        ("temperature ignored", with_options(temperature=1.0), "log-probability of the likeliest token"),
        ("not renormalised", with_options(support=None), "truncated: top_k, top_p and min_p"),
    ),
    *planted(kl, "k1", ("direction", swapped(0, 1), "k1 as reward, beta 0.5")),
    *planted(
        kl,
        "k2",
        ("without its half", scaled(2.0), "k2 as loss"),
        ("sign", scaled(-1.0), "k2 as loss"),
        ("columns one apart", shifted(1), "k2 as loss"),
    ),
    *planted(
        kl,
        "k3",
        ("direction", swapped(0, 1), "k3 as loss"),
        ("sign", scaled(-1.0), "k3 as loss"),
        ("columns one apart", shifted(1), "k3 as loss"),
    ),
    *planted(advantages, "constant_baseline", ("sign", scaled(-1.0), "constant baseline")),
    *planted(advantages, "ema_baseline", ("the batch itself in it", instead(ema_with_own_batch), "ema baseline, B=2")),
    *planted(advantages, "scst", ("sign", scaled(-1.0), "scst baseline")),
    *planted(
        advantages,
        "batch",
        ("sign", scaled(-1.0), "mean baseline, B=3"),
        ("mean of the others only", instead(own_reward_excluded), "mean baseline, B=3"),
    ),
    *planted(
        advantages,
        "group",
        ("sign", scaled(-1.0), "group, k=2"),
        ("rewards one late", shifted(0), "group, k=2"),
        ("groups ignored", groups_ignored, "group, groups of 2 and 1 interleaved"),
        ("deviation ignored", with_options(norm_std=False), "group with norm_std, k=3"),
        ("population deviation", instead(population_std), "group with norm_std, k=3"),
    ),
    *planted(
        advantages,
        "leave_one_out",
        ("own reward in the baseline", instead(own_reward_included), "leave_one_out, k=3"),
        ("groups ignored", groups_ignored, "leave_one_out, groups of 2 and 1 interleaved"),
    ),
    *planted(
        advantages,
        "whiten",
        ("population deviation", instead(population_whiten), "whiten over tokens, B=2"),
        ("mask one late", shifted(1), "whiten over tokens, B=2"),
    ),
    *planted(advantages, "zero_variance_groups", ("sees no flat group", scaled(0.0), "dynamic sampling, k=3")),
    *planted(
        surrogates,
        "reinforce",
        ("sign", scaled(-1.0, 0), "no baseline"),
        ("advantage one late", shifted(2), "no baseline"),
        ("mask one late", shifted(3), "no baseline"),
    ),
    *planted(
        surrogates,
        "ppo_clip",
        ("sign", scaled(-1.0, 0), "ppo_clip at ratio 1"),
        ("ratio upside down", swapped(0, 1), "ppo_clip at ratio 1"),
        ("advantage one late", shifted(2), "ppo_clip at ratio 1"),
        ("mask one late", shifted(3), "ppo_clip at ratio 1"),
        ("old columns one late", shifted(1), "ppo_clip off policy"),
        ("bounds swapped", swap_bounds, "ppo_clip off policy"),
        ("the larger of the two", instead(larger_surrogate), "ppo_clip off policy"),
    ),
    *planted(
        off_policy,
        "truncated_weight",
        ("mu / pi_old", swapped(0, 1), "truncated weight, one token, no cap"),
        ("not truncated", with_options(maximum=1e9), "truncated weight"),
        ("mask one late", shifted(2), "truncated weight, one token, no cap"),
        ("mu one late", shifted(1), "truncated weight, one token, no cap"),
    ),
    *planted(
        aggregate,
        "weights",
        ("mask one late", shifted(0), "no baseline"),
        ("prompts counted", prompt_counted, "token aggregation, no baseline, B=3"),
        ("prompts counted", prompt_counted, "sequence aggregation, leave_one_out, k=3"),
        ("one trajectory too many", one_more_trajectory, "leave_one_out, k=2"),
        ("constant ignored", with_options(constant=1.0), "constant aggregation, max_tokens"),
        ("token for sequence", with_options(how="token"), "sequence aggregation, group, k=3"),
        ("sequence for token", with_options(how="sequence"), "token aggregation, group, k=2"),
    ),
    *surrogate_faults.FAULTS,
    *preference_faults.FAULTS,
    *objective_cases.FAULTS,
    *temporal_faults.FAULTS,
    *constraint_cases.FAULTS,
    *rows_cases.FAULTS,
]
