"""Faults of the surrogates, corrections and KL weights that `surrogate_cases` certifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from novarl.algos import aggregate, kl, off_policy, surrogates
from tests.certificates.fault import Fault, Function, planted, scaled, shifted, swapped, with_options

OFF = "corrected k3 as loss, off policy"


def bounds_swapped(function: Function) -> Function:
    """The lower bound for the upper and the other way round."""
    return lambda *arguments, clip_low, clip_high, **options: function(
        *arguments, clip_low=clip_high, clip_high=clip_low, **options
    )


def advantage_negated(function: Function) -> Function:
    """The rule for good tokens is applied to bad ones, with the right sign of the loss."""

    def faulty(logp: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, **options: Any) -> Any:
        loss, stats = function(logp, old, -advantage, mask, **options)
        return -loss, stats

    return faulty


def weight_inverted(function: Function) -> Function:
    """pi_old / pi for pi / pi_old, where the loss is still of log pi."""
    return lambda logp, old, *rest, **options: function(logp, 2 * logp.detach() - old, *rest, **options)


def sequences_merged(function: Function) -> Function:
    """All tokens as one sequence."""
    return lambda *arguments, sequence, **options: function(*arguments, sequence=torch.zeros_like(sequence), **options)


def masks_ignored(function: Function) -> Function:
    """Sums over every token, the prompt's too: here they are 0, and only lengths can tell."""
    return lambda values, mask, *rest: function(values, torch.ones_like(mask), *rest)


def sequences_late(function: Function) -> Function:
    """By three: each answer starts with the two tokens of its prompt, whose values do not count."""
    return lambda values, mask, sequence: function(values, mask, sequence.roll(3))


def detached_ratio(function: Function) -> Function:
    """The ratio weighs, and has no gradient."""
    return lambda estimate, logp, old: function(estimate, logp.detach(), old)


def of_surrogate(name: str, *more: tuple[str, Callable[[Function], Function], str]) -> list[Fault]:
    """What every surrogate of this family must be guarded against."""
    at_one, off = f"{name} at ratio 1", f"{name} off policy"
    return planted(
        surrogates,
        name,
        ("sign", scaled(-1.0, 0), at_one),
        ("advantage one late", shifted(2), at_one),
        ("mask one late", shifted(3), at_one),
        ("old columns one late", shifted(1), off),
        *more,
    )


FAULTS = [
    *of_surrogate(
        "dual_clip",
        ("ratio upside down", swapped(0, 1), "dual_clip at ratio 1"),
        ("bounds swapped", bounds_swapped, "dual_clip off policy"),
        ("third bound ignored", with_options(clip_dual=1e9), "dual_clip off policy"),
        ("good for bad", advantage_negated, "dual_clip off policy"),
    ),
    *of_surrogate(
        "gspo",
        ("ratio upside down", swapped(0, 1), "gspo at ratio 1"),
        ("bounds swapped", bounds_swapped, "gspo off policy"),
        ("good for bad", advantage_negated, "gspo off policy"),
        ("all tokens one sequence", sequences_merged, "gspo off policy, B=2"),
    ),
    *of_surrogate(
        "cispo",
        ("bounds swapped", bounds_swapped, "cispo off policy"),
        ("not bounded", with_options(clip_low=1.0, clip_high=1e9), "cispo off policy"),
        ("ratio upside down", weight_inverted, "cispo off policy"),
    ),
    *of_surrogate(
        "sapo",
        ("ratio upside down", swapped(0, 1), "sapo at ratio 1"),
        ("temperatures swapped", with_options(tau_pos=3.0, tau_neg=2.0), "sapo off policy"),
        ("good for bad", advantage_negated, "sapo off policy"),
    ),
    *planted(
        surrogates,
        "gpg",
        ("sign", scaled(-1.0, 0), "gpg, two groups of 2"),
        ("alpha ignored", with_options(alpha=1.0), "gpg, two groups of 2"),
        ("advantage one late", shifted(2), "gpg, two groups of 2"),
        ("mask one late", shifted(3), "gpg, two groups of 2"),
    ),
    *planted(
        surrogates,
        "gpg_alpha",
        ("groups one late", shifted(1), "gpg, two groups of 2"),
        ("doubled", scaled(2.0), "gpg, two groups of 2"),
    ),
    *planted(
        off_policy,
        "masked_weight",
        ("mu / pi_old", swapped(0, 1), "masked weight, one token, no bounds"),
        ("mask one late", shifted(2), "masked weight, one token, no bounds"),
        ("mu one late", shifted(1), "masked weight"),
        ("lower bound ignored", with_options(low=0.0), "masked weight"),
        ("upper bound ignored", with_options(high=1e9), "masked weight"),
    ),
    *planted(
        off_policy,
        "sequence_truncated_weight",
        ("mu / pi_old", swapped(0, 1), "sequence truncated weight, no cap"),
        ("mask one late", shifted(2), "sequence truncated weight, no cap"),
        ("mu one late", shifted(1), "sequence truncated weight, no cap"),
        ("all tokens one sequence", sequences_merged, "sequence truncated weight"),
        ("not truncated", with_options(maximum=1e9), "sequence truncated weight"),
        ("root taken", with_options(geometric=True), "sequence truncated weight, no cap"),
        ("root not taken", with_options(geometric=False), "sequence truncated weight, geometric"),
    ),
    *planted(
        off_policy,
        "sequence_masked_weight",
        ("mu / pi_old", swapped(0, 1), "sequence masked weight, no bounds"),
        ("mask one late", shifted(2), "sequence masked weight, no bounds"),
        ("mu one late", shifted(1), "sequence masked weight, no bounds"),
        ("all tokens one sequence", sequences_merged, "sequence masked weight"),
        ("lower bound ignored", with_options(low=0.0), "sequence masked weight"),
        ("upper bound ignored", with_options(high=1e9), "sequence masked weight"),
        ("root not taken", with_options(geometric=False), "sequence masked weight, geometric"),
    ),
    *planted(
        kl,
        "corrected",
        ("ratio without its gradient", detached_ratio, OFF),
        ("ratio upside down", swapped(1, 2), OFF),
        ("sign", scaled(-1.0), OFF),
        ("old columns one late", shifted(2), OFF),
        ("estimates one late", shifted(0), OFF),
        ("ratio without its gradient", detached_ratio, "corrected k3 as loss, on policy"),
    ),
    *planted(
        aggregate,
        "per_sequence",
        ("prompts counted", masks_ignored, "gspo off policy"),
        ("sign", scaled(-1.0, 0), "gspo off policy"),
        ("mask one late", shifted(1), "sequence truncated weight, no cap"),
        ("sequences late", sequences_late, "k1 per sequence, its mean square, B=2"),
    ),
]
