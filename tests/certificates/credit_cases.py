"""Certificates of credit: baselines, deviations, and what the sum over tokens is divided by."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.certificates import exact, losses
from tests.certificates.certificate import (
    BINARY,
    COLD,
    LONG,
    MIDDLE,
    Certificate,
    certify,
    grad_j,
    scored,
    success_rate,
)
from tests.certificates.losses import policy_loss
from tests.certificates.world import World


def baselines() -> list[Certificate]:
    def case(
        name: str,
        claim: str,
        world: World,
        k: int,
        credit: losses.Credit,
        *,
        factor: float = 1.0,
        groups: Sequence[int] | None = None,
    ) -> Certificate:
        return certify(name, claim, world, k, policy_loss(credit), grad_j(world, factor), groups=groups)

    mixed = [5, -(2**40), 5]
    return [
        case("no baseline", "grad J", LONG, 1, losses.none),
        case("no baseline, at temperature 0.7", "grad J", COLD, 1, losses.none),
        case("constant baseline", "grad J", LONG, 1, losses.constant),
        case("ema baseline, B=2", "grad J", MIDDLE, 2, losses.ema),
        case("ema baseline, first batch", "grad J", MIDDLE, 2, losses.ema_first),
        case("scst baseline", "grad J", LONG, 1, losses.scst),
        case("mean baseline, B=3", "(1 - 1/3) grad J", MIDDLE, 3, losses.mean, factor=2 / 3),
        case("leave_one_out, k=2", "grad J", LONG, 2, losses.leave_one_out),
        case("leave_one_out, k=3", "grad J", MIDDLE, 3, losses.leave_one_out),
        case(
            "leave_one_out, groups of 2 and 1 interleaved",
            "(2/3) grad J: the single one learns nothing",
            MIDDLE,
            3,
            losses.leave_one_out,
            factor=2 / 3,
            groups=mixed,
        ),
        case("group, k=2", "(1 - 1/2) grad J", LONG, 2, losses.group, factor=1 / 2),
        case("group, k=3", "(1 - 1/3) grad J", MIDDLE, 3, losses.group, factor=2 / 3),
        case(
            "group, groups of 2 and 1 interleaved",
            "(2/3) (1 - 1/2) grad J",
            MIDDLE,
            3,
            losses.group,
            factor=1 / 3,
            groups=mixed,
        ),
    ]


def deviations() -> list[Certificate]:
    """What dividing by a deviation, and dropping groups without any, makes of the objective."""
    sharp = policy_loss(lambda batch: losses.group_std(batch, eps=losses.NO_EPS))
    return [
        certify(
            "group with norm_std, k=2",
            "2^(-1/2) grad (P(beats a frozen twin) - P(is beaten))",
            LONG,
            2,
            sharp,
            lambda: exact.win_rate_gradient(LONG) / 2**0.5,
        ),
        certify(
            "group with norm_std, k=3, rewards 0 or 1",
            "c(p, 3) grad p, by binomials",
            BINARY,
            3,
            sharp,
            lambda: grad_j(BINARY, exact.standardised_success_factor(success_rate(), 3))(),
        ),
        certify(
            "group with norm_std, k=3",
            "by enumeration of (R - mean)/(std + eps)",
            MIDDLE,
            3,
            policy_loss(losses.group_std),
            scored(MIDDLE, lambda: exact.group_weights(MIDDLE, 3, std=True, how="constant")),
        ),
        certify(
            "whiten over tokens, B=2",
            "E[(L' (R - R')/n) / sqrt(L L' (R - R')^2/(n(n-1))) grad log pi(y)], n = L + L'",
            MIDDLE,
            2,
            policy_loss(losses.whitened),
            lambda: exact.score_gradient(MIDDLE, exact.whitened_pair_weights(MIDDLE)),
        ),
        certify(
            "dynamic sampling, k=3",
            "(1 - 1/3) grad J / P(rewards not all equal)",
            BINARY,
            3,
            policy_loss(losses.group),
            lambda: grad_j(BINARY, 2 / 3 / exact.mixed_rate(success_rate(), 3))(),
            admitted=losses.varies,
        ),
    ]


def aggregations() -> list[Certificate]:
    def centred(factor: float = 1.0) -> Tensor:
        return factor * (MIDDLE.reward - exact.expected_reward(MIDDLE)) / MIDDLE.lengths

    return [
        certify(
            "constant aggregation, max_tokens",
            "(1/max_tokens) grad J",
            LONG,
            2,
            policy_loss(losses.leave_one_out, divisor=3.0),
            grad_j(LONG, 1 / 3),
        ),
        certify(
            "sequence aggregation, no baseline, B=2",
            "E[R/L grad log pi(y)]",
            LONG,
            2,
            policy_loss(losses.none, how="sequence"),
            scored(LONG, lambda: LONG.reward / LONG.lengths),
        ),
        certify(
            "sequence aggregation, leave_one_out, k=3",
            "E[(R - J)/L grad log pi(y)]",
            MIDDLE,
            3,
            policy_loss(losses.leave_one_out, how="sequence"),
            scored(MIDDLE, centred),
        ),
        certify(
            "sequence aggregation, group, k=3",
            "(1 - 1/3) E[(R - J)/L grad log pi(y)]",
            MIDDLE,
            3,
            policy_loss(losses.group, how="sequence"),
            scored(MIDDLE, lambda: centred(2 / 3)),
        ),
        certify(
            "token aggregation, no baseline, B=3",
            "E[w(L) R grad log pi(y)], w(L) = 3 E[1/(L + L' + L'')]",
            MIDDLE,
            3,
            policy_loss(losses.none, how="token"),
            scored(MIDDLE, lambda: exact.length_mixing(MIDDLE, 3) * MIDDLE.reward),
        ),
        certify(
            "token aggregation, group, k=2",
            "E[(R - R')/(L + L') grad log pi(y)]",
            LONG,
            2,
            policy_loss(losses.group, how="token"),
            scored(LONG, lambda: exact.group_weights(LONG, 2, std=False, how="token")),
        ),
    ]
