"""Faults to plant in the library, and the case that must catch each: an index, a sign, a mask, a convention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from novarl.algos import (
    advantages,
    aggregate,
    calibration,
    kl,
    off_policy,
    preference_losses as preference,
    reward_modeling,
    surrogates,
)
from tests.certificates.fault import Fault, Function, planted, scaled, shifted, swapped, with_options
from tests.oracles import inputs


def rolled(*names: str) -> Any:
    """Named columns, one step late."""

    def plant(function: Function) -> Function:
        return lambda **given: function(**{k: v.roll(1, 1) if k in names else v for k, v in given.items()})

    return plant


def without_bootstrap(function: Function) -> Function:
    return lambda **given: function(**{**given, "bootstrap": torch.zeros_like(given["bootstrap"])})


def exchanged(function: Function) -> Function:
    """Target and behaviour policy in each other's place."""
    return lambda *, logp, behavior_logp, **given: function(logp=behavior_logp, behavior_logp=logp, **given)


def gaps_are_steps(function: Function) -> Function:
    """The mask filled between a row's first and last step, with values there that are 0."""

    def faulty(**given: Any) -> Any:
        mask = given["mask"]
        reached = mask.int().cummax(1).values.bool() & mask.int().flip(1).cummax(1).values.flip(1).bool()
        values = torch.where(mask, given["values"], 0.0)
        return function(**{**given, "mask": reached, "values": values})

    return faulty


def one_more(function: Function) -> Function:
    return lambda *, n, **given: function(n=n + 1, **given)


def swap_bounds(function: Function) -> Function:
    return lambda *given, clip_low, clip_high, **rest: function(*given, clip_low=clip_high, clip_high=clip_low, **rest)


def unmasked(function: Function) -> Function:
    return lambda logp, old, advantage, mask, **rest: function(logp, old, advantage, torch.ones_like(mask), **rest)


def population(function: Function) -> Function:
    """The deviation that divides by k and not by k - 1."""

    def faulty(rewards: Tensor, group: Tensor, *, norm_std: bool = False, eps: float = 1e-6) -> Tensor:
        size = inputs.GENERATIONS
        found: Tensor = function(rewards, group, norm_std=norm_std, eps=eps)
        return found * (size / (size - 1)) ** 0.5 if norm_std else found

    return faulty


def tie_is_a_loss(function: Function) -> Function:
    """Equal scores ordered as they come."""
    return lambda score, label: function(score - 1e-9 * label.double(), label)


FAULTS: list[Fault] = [
    *planted(
        advantages,
        "vtrace",
        ("rewards one step late", rolled("rewards"), "vtrace"),
        ("ratios one step late", rolled("logp", "behavior_logp"), "vtrace, lam"),
        ("policies exchanged", exchanged, "vtrace"),
        ("lam ignored", with_options(lam=1.0), "vtrace, lam"),
        ("pg_rho_max ignored", with_options(pg_rho_max=1.0), "vtrace, clips apart"),
        ("c_max ignored", with_options(c_max=1.0), "vtrace, no clips"),
        ("gaps are steps", gaps_are_steps, "vtrace"),
    ),
    *planted(
        advantages,
        "retrace",
        ("ratios one step late", rolled("logp", "behavior_logp"), "retrace, returns"),
        ("trace not clipped", with_options(c_max=float("inf")), "retrace, advantage"),
    ),
    *planted(advantages, "td_lambda", ("no bootstrap", without_bootstrap, "td_lambda")),
    *planted(
        advantages,
        "gae",
        ("values one step late", rolled("values"), "gae"),
        ("gaps are steps", gaps_are_steps, "gae"),
    ),
    *planted(advantages, "monte_carlo", ("no discount", with_options(gamma=1.0), "monte_carlo")),
    *planted(advantages, "n_step", ("one step more", one_more, "n_step, n=3")),
    *planted(
        advantages,
        "group",
        ("population deviation", population, "group, norm_std"),
        ("another eps", with_options(eps=1e-6), "group, norm_std"),
    ),
    *planted(advantages, "leave_one_out", ("own reward included", scaled(0.75), "leave_one_out")),
    *planted(advantages, "whiten", ("another eps", with_options(eps=1e-8), "leave_one_out, whitened")),
    *planted(
        surrogates,
        "ppo_clip",
        ("old log-probs one token late", shifted(1, 1), "grpo"),
        ("sign of the advantage", scaled(-1.0, 0), "dapo"),
        ("bounds exchanged", swap_bounds, "dr_grpo"),
    ),
    *planted(surrogates, "dual_clip", ("second bound ignored", with_options(clip_dual=1e6), "delta")),
    *planted(surrogates, "gspo", ("padding in the mean", unmasked, "gspo")),
    *planted(surrogates, "cispo", ("bound ignored", with_options(clip_high=1e6), "cispo")),
    *planted(surrogates, "sapo", ("one temperature", with_options(tau_neg=inputs.TAU_POS), "sapo")),
    *planted(
        kl,
        "k3",
        ("directions exchanged", swapped(0, 1), "grpo, k3"),
        ("reference one token late", shifted(1, 1), "grpo, k3 corrected"),
    ),
    *planted(kl, "corrected", ("ratio left out", lambda _: lambda penalty, *_: penalty, "grpo, k3 corrected")),
    *planted(aggregate, "weights", ("mean over tokens", with_options(how="token"), "grpo")),
    *planted(off_policy, "truncated_weight", ("inverse ratio", swapped(0, 1), "token_truncate")),
    *planted(off_policy, "masked_weight", ("low bound ignored", with_options(low=0.0), "token_mask")),
    *planted(off_policy, "sequence_truncated_weight", ("root", with_options(geometric=True), "sequence_truncate")),
    *planted(off_policy, "sequence_masked_weight", ("sampler one row late", shifted(1), "sequence_mask")),
    *planted(preference, "sigmoid", ("references exchanged", swapped(2, 3), "sigmoid")),
    *planted(preference, "hinge", ("pairs shifted", shifted(1), "hinge")),
    *planted(preference, "ipo", ("sums, not means", with_options(chosen_length=None, rejected_length=None), "ipo")),
    *planted(preference, "robust", ("smoothing ignored", with_options(label_smoothing=0.0), "robust")),
    *planted(preference, "simpo", ("no margin", with_options(gamma=0.0), "simpo")),
    *planted(preference, "orpo", ("sides exchanged", swapped(0, 1), "orpo, odds ratio")),
    *planted(preference, "kto_unpaired", ("labels one row late", shifted(2), "kto")),
    *planted(preference, "kto_point", ("point of the opposite sign", scaled(-1.0), "kto")),
    *planted(
        reward_modeling,
        "bt",
        ("sides exchanged", swapped(0, 1), "bt"),
        ("no centring", with_options(centring=0.0), "bt, margin and centring"),
    ),
    *planted(reward_modeling, "bce", ("labels one row late", shifted(1), "bce")),
    *planted(calibration, "auroc", ("a tie is a loss", tie_is_a_loss, "auroc")),
    *planted(calibration, "accuracy", ("labels one row late", shifted(1), "accuracy")),
    *planted(calibration, "brier", ("half", scaled(0.5), "brier")),
    *planted(calibration, "reliability", ("a bin more", with_options(bins=inputs.BINS + 1), "reliability")),
    *planted(calibration, "ece", ("a bin more", with_options(bins=inputs.BINS + 1), "ece")),
]
