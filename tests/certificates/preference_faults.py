"""Faults of what `preference_cases` certifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from novarl.algos import calibration, implicit_prm, preference_losses as preference, reward_modeling
from tests.certificates.fault import Fault, Function, instead, planted, scaled, shifted, swapped, with_options

Planted = tuple[str, Callable[[Function], Function], str]


def lengths_swapped(function: Function) -> Function:
    return lambda *arguments, chosen_length, rejected_length, **options: function(
        *arguments, chosen_length=rejected_length, rejected_length=chosen_length, **options
    )


def label_turned(position: int) -> Callable[[Function], Function]:
    """Good for bad."""

    def plant(function: Function) -> Function:
        def faulty(*arguments: Any, **options: Any) -> Any:
            turned = [1 - a if i == position else a for i, a in enumerate(arguments)]
            return function(*turned, **options)

        return faulty

    return plant


def of_pairs(name: str, caught_by: str, *more: Planted, reference: bool = True) -> list[Fault]:
    """What every paired loss must be guarded against."""
    referred: list[Planted] = [
        ("the references' sides exchanged", swapped(2, 3), caught_by),
        ("the reference one pair late", shifted(2), caught_by),
    ]
    return planted(
        preference,
        name,
        ("sign", scaled(-1.0), caught_by),
        ("sides exchanged", swapped(0, 1), caught_by),
        ("rejected answers one pair late", shifted(1), caught_by),
        *(referred if reference else []),
        *more,
    )


def of_labels(module: Any, name: str, *, label: int, caught_by: str) -> list[Fault]:
    """What every loss of labelled answers must be guarded against."""
    return planted(
        module,
        name,
        ("sign", scaled(-1.0), caught_by),
        ("labels the other way round", label_turned(label), caught_by),
        ("columns one apart", shifted(1), caught_by),
    )


def unweighted_kto(
    logp: Tensor, ref_logp: Tensor, label: Tensor, kl: Tensor | float, *, beta: float, **weights: float
) -> Tensor:
    distance = beta * (logp - ref_logp - kl)
    return torch.where(label > 0.5, torch.sigmoid(-distance), torch.sigmoid(distance))


def without_ties(score: Tensor, label: Tensor) -> Tensor:
    good = label > 0.5
    return (score[good][:, None] > score[~good]).to(score.dtype).mean()


FAULTS: list[Fault] = [
    *of_pairs(
        "sigmoid",
        "sigmoid",
        ("label smoothing ignored", with_options(label_smoothing=0.0), "sigmoid, label smoothing 0.1"),
        ("sides exchanged", swapped(0, 1), "optimum of sigmoid"),
        ("beta twice", with_options(beta=1.4), "optimum of sigmoid"),
    ),
    *of_pairs("ipo", "ipo", ("lengths exchanged", lengths_swapped, "ipo, per token")),
    *planted(preference, "ipo", ("sides exchanged", swapped(0, 1), "optimum of ipo")),
    *of_pairs(
        "dpop",
        "dpop",
        ("no penalty", with_options(penalty=0.0), "dpop"),
        ("label smoothing ignored", with_options(label_smoothing=0.0), "dpop"),
    ),
    *of_pairs(
        "robust",
        "robust, a tenth of the labels flipped",
        ("conservative instead", instead(preference.sigmoid), "robust, a tenth of the labels flipped"),
        ("label smoothing ignored", with_options(label_smoothing=0.0), "robust, a tenth of the labels flipped"),
    ),
    *of_pairs("hinge", "hinge", ("never flat", instead(lambda a, b, c, d, beta: -beta * (a - b - c + d)), "hinge")),
    *of_pairs(
        "simpo",
        "simpo",
        ("lengths exchanged", lengths_swapped, "simpo"),
        ("no margin", with_options(gamma=0.0), "simpo"),
        ("label smoothing ignored", with_options(label_smoothing=0.0), "simpo"),
        reference=False,
    ),
    *of_pairs(
        "orpo",
        "orpo",
        ("lengths exchanged", lengths_swapped, "orpo"),
        ("odds ratio ignored", with_options(beta=0.0), "orpo"),
        reference=False,
    ),
    *of_pairs("kto", "kto, paired", ("point of reference ignored", with_options(kl=0.0), "kto, paired")),
    *of_labels(preference, "kto_unpaired", label=2, caught_by="kto_unpaired"),
    *planted(preference, "kto_unpaired", ("weights ignored", instead(unweighted_kto), "kto_unpaired")),
    *planted(preference, "kto_point", ("direction", swapped(0, 1), "kto_point, policies exchanged")),
    *of_labels(reward_modeling, "implicit_kto", label=2, caught_by="implicit_kto"),
    *of_labels(reward_modeling, "implicit_ce", label=2, caught_by="implicit_ce"),
    *planted(
        reward_modeling,
        "implicit_dpo",
        ("sides exchanged", swapped(0, 1), "optimum of implicit_dpo"),
        ("the references' sides exchanged", swapped(2, 3), "optimum of implicit_dpo"),
        ("the reference one pair late", shifted(2), "optimum of implicit_dpo"),
    ),
    *planted(
        reward_modeling,
        "bt",
        ("sign", scaled(-1.0), "bt, margins"),
        ("sides exchanged", swapped(0, 1), "optimum of bt"),
        ("rejected answers one pair late", shifted(1), "bt, margins"),
        ("margin ignored", with_options(margin=None), "bt, margins"),
        ("not centred", with_options(centring=0.0), "bt, centring 0.05"),
        ("label smoothing ignored", with_options(label_smoothing=0.0), "bt, margins, label smoothing 0.1"),
    ),
    *planted(
        reward_modeling,
        "bce",
        ("sign", scaled(-1.0), "bce, label smoothing 0.1"),
        ("labels the other way round", label_turned(1), "optimum of bce"),
        ("labels one late", shifted(1), "optimum of bce"),
        ("label smoothing ignored", with_options(label_smoothing=0.0), "bce, label smoothing 0.1"),
    ),
    *planted(
        preference,
        "implicit_rewards",
        ("direction", swapped(0, 1), "implicit_rewards"),
        ("the reference one late", shifted(1), "implicit_rewards"),
    ),
    *planted(preference, "margins", ("direction", swapped(0, 1), "margins")),
    *planted(preference, "preferred", ("direction", swapped(0, 1), "preferred")),
    *planted(
        implicit_prm,
        "token_rewards",
        ("direction", swapped(0, 1), "implicit q_values"),
        ("the reference one token late", shifted(1, 1), "implicit outcome"),
        ("mask one token late", shifted(2, 1), "implicit outcome"),
        ("beta ignored", with_options(beta=1.0), "implicit outcome"),
    ),
    *planted(
        implicit_prm,
        "q_values",
        ("of the state", instead(lambda rewards: rewards.cumsum(-1) - rewards), "implicit q_values"),
    ),
    *planted(implicit_prm, "outcome", ("a mean", instead(lambda rewards: rewards.mean(-1)), "implicit outcome")),
    *planted(implicit_prm, "step_rewards", ("steps one token late", shifted(1, 1), "implicit step_rewards")),
    *planted(
        calibration,
        "auroc",
        ("ties lost", instead(without_ties), "auroc"),
        ("labels one late", shifted(1), "auroc"),
        ("labels the other way round", label_turned(1), "auroc"),
    ),
    *planted(calibration, "accuracy", ("labels the other way round", label_turned(1), "accuracy")),
    *planted(calibration, "brier", ("labels one late", shifted(1), "brier")),
    *planted(
        calibration,
        "ece",
        ("labels one late", shifted(1), "ece"),
        ("bins ignored", with_options(bins=1), "ece"),
    ),
    *planted(
        calibration,
        "reliability",
        ("labels one late", shifted(1), "reliability"),
        ("labels one late", shifted(1), "ece"),
    ),
]
