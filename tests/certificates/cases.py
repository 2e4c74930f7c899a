"""The certificates: what the library's gradient is in expectation, and what it should be.

Each compares two vectors (or two numbers) that were computed in different ways; they must agree to 1e-8 in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from novarl.algos.named import ALGORITHMS
from tests.certificates import exact, losses
from tests.certificates.expected import ascent, expectation
from tests.certificates.losses import policy_loss
from tests.certificates.world import World, make_world

TOLERANCE = 1e-8
LONG, MIDDLE, SHORT = make_world(3), make_world(2), make_world(1)
"""15 answers of up to three tokens, 7 of up to two, 3 of one."""
BINARY = make_world(2, binary=True, seed=3)
COLD = make_world(3, temperature=0.7)
CLIP = (0.2, 0.28)
WIDE_CLIP = (0.9, 9.0)
CAP = 1.1


@dataclass(frozen=True, slots=True)
class Certificate:
    """`name`: what is certified; `claim`: the exact side in a formula; both sides, computed when called."""

    name: str
    claim: str
    library: Callable[[], Tensor]
    exact: Callable[[], Tensor]

    def error(self) -> float:
        """The largest absolute difference between the two sides."""
        return float((self.library() - self.exact()).detach().abs().max())


def _grad_j(world: World) -> Tensor:
    return exact.objective_gradient(world, world.reward)


def _score(world: World, weight: Tensor) -> Tensor:
    """sum_y pi(y) weight(y) sum_t grad log pi(y_t)."""
    p = exact.fixed(world, world.policy)
    return exact.score_gradient(world, (p if weight.ndim == 1 else p[:, None]) * weight)


def baselines() -> list[Certificate]:
    def case(name: str, claim: str, world: World, k: int, credit: losses.Credit, factor: float = 1.0) -> Certificate:
        return Certificate(
            name, claim, lambda: ascent(world, k, policy_loss(credit)), lambda: factor * _grad_j(world)
        )

    mixed = [5, -(2**40), 5]
    uneven: list[tuple[str, losses.Credit, float]] = [("leave_one_out", losses.leave_one_out, 2 / 3), ("group", losses.group, 1 / 3)]
    return [
        case("no baseline", "grad J", LONG, 1, losses.none),
        case("no baseline, at temperature 0.7", "grad J", COLD, 1, losses.none),
        case("constant baseline", "grad J", LONG, 1, losses.constant),
        case("ema baseline, B=2", "grad J", MIDDLE, 2, losses.ema),
        case("ema baseline, first batch", "grad J", MIDDLE, 2, losses.ema_first),
        case("scst baseline", "grad J", LONG, 1, losses.scst),
        case("mean baseline, B=3", "(1 - 1/3) grad J", MIDDLE, 3, losses.mean, 2 / 3),
        case("leave_one_out, k=2", "grad J", LONG, 2, losses.leave_one_out),
        case("leave_one_out, k=3", "grad J", MIDDLE, 3, losses.leave_one_out),
        case("group, k=2", "(1 - 1/2) grad J", LONG, 2, losses.group, 1 / 2),
        case("group, k=3", "(1 - 1/3) grad J", MIDDLE, 3, losses.group, 2 / 3),
        *(
            Certificate(
                f"{name}, groups of 2 and 1 interleaved",
                f"{factor * 3:.0f}/3 grad J",
                lambda credit=credit: ascent(MIDDLE, 3, policy_loss(credit), groups=mixed),  # type: ignore[misc]
                lambda factor=factor: factor * _grad_j(MIDDLE),  # type: ignore[misc]
            )
            for name, credit, factor in uneven
        ),
    ]


def deviations() -> list[Certificate]:
    """What dividing by a deviation makes of the objective."""
    return [
        Certificate(
            "group with norm_std, k=2",
            "2^(-1/2) grad P(beats its twin) - P(is beaten)",
            lambda: ascent(LONG, 2, policy_loss(lambda batch: losses.group_std(batch, eps=losses.NO_EPS))),
            lambda: exact.win_rate_gradient(LONG) / 2**0.5,
        ),
        Certificate(
            "group with norm_std, k=3, rewards 0 and 1",
            "c(p, 3) grad p, by binomials",
            lambda: ascent(BINARY, 3, policy_loss(lambda batch: losses.group_std(batch, eps=losses.NO_EPS))),
            lambda: exact.standardised_success_factor(float(exact.expected_reward(BINARY)), 3) * _grad_j(BINARY),
        ),
        Certificate(
            "group with norm_std, k=3",
            "by enumeration of (R - mean)/(std + eps)",
            lambda: ascent(MIDDLE, 3, policy_loss(losses.group_std)),
            lambda: _score(MIDDLE, exact.group_weights(MIDDLE, 3, std=True, how="constant")),
        ),
        Certificate(
            "whiten over tokens, B=2",
            "E[(|y'| (R - R')/n) / sqrt(|y||y'|(R - R')^2/(n(n-1))) grad log pi(y)], n = |y| + |y'|",
            lambda: ascent(MIDDLE, 2, policy_loss(losses.whitened)),
            lambda: exact.score_gradient(MIDDLE, exact.whitened_pair_weights(MIDDLE)),
        ),
        Certificate(
            "dynamic sampling, k=3, rewards 0 and 1",
            "(1 - 1/3) grad J / P(not all equal)",
            lambda: ascent(BINARY, 3, policy_loss(losses.group), admitted=losses.varies),
            lambda: 2 / 3 * _grad_j(BINARY) / exact.mixed_rate(float(exact.expected_reward(BINARY)), 3),
        ),
    ]


def aggregations() -> list[Certificate]:
    def centred(world: World) -> Tensor:
        return (world.reward - exact.expected_reward(world)) / world.lengths

    return [
        Certificate(
            "constant aggregation, max_tokens",
            "(1/max_tokens) grad J",
            lambda: ascent(LONG, 2, policy_loss(losses.leave_one_out, divisor=3.0)),
            lambda: _grad_j(LONG) / 3,
        ),
        Certificate(
            "sequence aggregation, no baseline, B=2",
            "E[R/|y| grad log pi(y)]",
            lambda: ascent(LONG, 2, policy_loss(losses.none, how="sequence")),
            lambda: _score(LONG, LONG.reward / LONG.lengths),
        ),
        Certificate(
            "sequence aggregation, leave_one_out, k=3",
            "E[(R - J)/|y| grad log pi(y)]",
            lambda: ascent(MIDDLE, 3, policy_loss(losses.leave_one_out, how="sequence")),
            lambda: _score(MIDDLE, centred(MIDDLE)),
        ),
        Certificate(
            "sequence aggregation, group, k=3",
            "(1 - 1/3) E[(R - J)/|y| grad log pi(y)]",
            lambda: ascent(MIDDLE, 3, policy_loss(losses.group, how="sequence")),
            lambda: 2 / 3 * _score(MIDDLE, centred(MIDDLE)),
        ),
        Certificate(
            "token aggregation, no baseline, B=3",
            "E[w(|y|) R grad log pi(y)], w(l) = 3 E[1/(l + l' + l'')]",
            lambda: ascent(MIDDLE, 3, policy_loss(losses.none, how="token")),
            lambda: _score(MIDDLE, exact.length_mixing(MIDDLE, 3) * MIDDLE.reward),
        ),
        Certificate(
            "token aggregation, group, k=2",
            "E[(R - R')/(|y| + |y'|) grad log pi(y)]",
            lambda: ascent(LONG, 2, policy_loss(losses.group, how="token")),
            lambda: _score(LONG, exact.group_weights(LONG, 2, std=False, how="token")),
        ),
    ]


def surrogate_cases() -> list[Certificate]:
    def unclipped(world: World, low: float, high: float) -> Tensor:
        """R r_t where PPO's clip is not active, 0 where it is [Y, longest]."""
        ratio, reward = exact.ratios(world, world.policy, world.old), world.reward[:, None]
        active = ((reward > 0) & (ratio > 1 + high)) | ((reward < 0) & (ratio < 1 - low))
        return torch.where(active, 0.0, reward * ratio)

    def sampled_by_old(world: World, low: float, high: float) -> Tensor:
        return exact.score_gradient(world, exact.fixed(world, world.old)[:, None] * unclipped(world, low, high))

    return [
        Certificate(
            "ppo_clip at ratio 1",
            "grad J, as reinforce",
            lambda: ascent(LONG, 2, policy_loss(losses.leave_one_out, clip=CLIP)),
            lambda: _grad_j(LONG),
        ),
        Certificate(
            "ppo_clip off policy, clip 0.2 and 0.28",
            "E_old[sum_t 1[not clipped] r_t R grad log pi(y_t)]",
            lambda: ascent(LONG, 1, policy_loss(losses.none, clip=CLIP, off_policy_old=True), sampler=LONG.old),
            lambda: sampled_by_old(LONG, *CLIP),
        ),
        Certificate(
            "ppo_clip off policy, one token, bounds out of reach",
            "grad J",
            lambda: ascent(SHORT, 1, policy_loss(losses.none, clip=WIDE_CLIP, off_policy_old=True), sampler=SHORT.old),
            lambda: _grad_j(SHORT),
        ),
        Certificate(
            "supervised: advantage 1 on another's answers",
            "grad E_mu[log pi(y)]",
            lambda: ascent(LONG, 1, policy_loss(lambda batch: torch.ones_like(batch.reward)), sampler=LONG.behavior),
            lambda: exact.score_gradient(LONG, exact.fixed(LONG, LONG.behavior)),
        ),
        Certificate(
            "truncated weight, one token, no truncation",
            "grad J",
            lambda: ascent(SHORT, 1, policy_loss(losses.none, correction_max=1e9), sampler=SHORT.behavior),
            lambda: _grad_j(SHORT),
        ),
        Certificate(
            f"truncated weight, cap {CAP}",
            "E_mu[sum_t min(pi/mu, cap) R grad log pi(y_t)]",
            lambda: ascent(LONG, 1, policy_loss(losses.none, correction_max=CAP), sampler=LONG.behavior),
            lambda: exact.score_gradient(
                LONG,
                exact.fixed(LONG, LONG.behavior)[:, None]
                * exact.ratios(LONG, LONG.policy, LONG.behavior).clamp(max=CAP)
                * LONG.reward[:, None],
            ),
        ),
        Certificate(
            "truncated weight is pi_old/mu, also once pi has moved",
            "E_mu[sum_t min(pi_old/mu, cap) 1[not clipped] r_t R grad log pi(y_t)]",
            lambda: ascent(
                LONG,
                1,
                policy_loss(losses.none, clip=CLIP, off_policy_old=True, correction_max=CAP),
                sampler=LONG.behavior,
            ),
            lambda: exact.score_gradient(
                LONG,
                exact.fixed(LONG, LONG.behavior)[:, None]
                * exact.ratios(LONG, LONG.old, LONG.behavior).clamp(max=CAP)
                * unclipped(LONG, *CLIP),
            ),
        ),
    ]


def regularizers() -> list[Certificate]:
    def log_ratio() -> Tensor:
        return exact.ratios(LONG, LONG.policy, LONG.reference).log()

    def on_answers(per_token: Tensor) -> Tensor:
        return (per_token * exact.real_tokens(LONG)).sum(1)

    def k3_of(x: Tensor) -> Tensor:
        return x + (-x).exp() - 1

    p = exact.fixed(LONG, LONG.policy)
    return [
        Certificate(
            "k1, value", "KL(pi, ref)", lambda: expectation(LONG, 1, losses.kl_value("k1")), lambda: exact.true_kl(LONG)
        ),
        Certificate(
            "k2, value",
            "E[sum_t x_t^2]/2",
            lambda: expectation(LONG, 1, losses.kl_value("k2")),
            lambda: (p * on_answers(log_ratio() ** 2)).sum() / 2,
        ),
        Certificate(
            "k3, value", "KL(pi, ref)", lambda: expectation(LONG, 1, losses.kl_value("k3")), lambda: exact.true_kl(LONG)
        ),
        Certificate(
            "k1 as loss",
            "0: no signal",
            lambda: ascent(LONG, 1, losses.kl_loss("k1")),
            lambda: torch.zeros_like(_grad_j(LONG)),
        ),
        Certificate(
            "k2 as loss",
            "-sum_s d(s) grad KL(pi(s), ref(s)), visits d fixed",
            lambda: ascent(LONG, 1, losses.kl_loss("k2")),
            lambda: -exact.per_state_gradient(LONG, "reverse_kl"),
        ),
        Certificate(
            "k2 as loss, one token",
            "-grad KL(pi, ref)",
            lambda: ascent(SHORT, 1, losses.kl_loss("k2")),
            lambda: exact.kl_regularised_gradient(SHORT, 1.0) - _grad_j(SHORT),
        ),
        Certificate(
            "k3 as loss",
            "-sum_s d(s) grad KL(ref(s), pi(s)), visits d fixed",
            lambda: ascent(LONG, 1, losses.kl_loss("k3")),
            lambda: -exact.per_state_gradient(LONG, "forward_kl"),
        ),
        Certificate(
            "k1 as advantage",
            "as k2 as loss",
            lambda: ascent(LONG, 1, policy_loss(lambda batch: losses.kl_as_advantage(batch, "k1"))),
            lambda: -exact.per_state_gradient(LONG, "reverse_kl"),
        ),
        Certificate(
            "k1 as reward, beta 0.5",
            "grad (J - 0.5 KL(pi, ref))",
            lambda: ascent(LONG, 1, policy_loss(lambda batch: losses.kl_as_reward(batch, "k1", 0.5))),
            lambda: exact.kl_regularised_gradient(LONG, 0.5),
        ),
        Certificate(
            "k3 as reward, beta 0.5",
            "E[(R - 0.5 sum_t k3_t) grad log pi(y)]",
            lambda: ascent(LONG, 1, policy_loss(lambda batch: losses.kl_as_reward(batch, "k3", 0.5))),
            lambda: _score(LONG, LONG.reward - 0.5 * on_answers(k3_of(log_ratio()))),
        ),
        Certificate(
            "entropy bonus",
            "sum_s d(s) grad H(pi(s)), visits d fixed",
            lambda: ascent(LONG, 1, losses.entropy_loss),
            lambda: exact.per_state_gradient(LONG, "entropy"),
        ),
    ]


def rows() -> list[Certificate]:
    """Every algorithm of the table, k=3, rewards 0 and 1, at its first update."""
    world, k = BINARY, 3

    def enumerated(std: bool, how: str) -> Tensor:
        return _score(world, exact.group_weights(world, k, std=std, how=how))

    def grpo() -> Tensor:
        pull = (1 - 1 / exact.ratios(world, world.policy, world.reference)) / world.lengths[:, None]
        return enumerated(True, "sequence") - 0.04 * _score(world, pull)

    def dapo() -> Tensor:
        return enumerated(True, "token") / exact.mixed_rate(float(exact.expected_reward(world)), k)

    claims: dict[str, tuple[str, Callable[[], Tensor]]] = {
        "reinforce": ("grad J", lambda: _grad_j(world)),
        "rloo": ("grad J", lambda: _grad_j(world)),
        "grpo": ("E[A/|y| grad log pi(y)] - 0.04 E[(1/|y|) sum_t grad KL(ref, pi)]", grpo),
        "dr_grpo": ("(1 - 1/3)/max_tokens grad J", lambda: 2 / 3 / world.longest * _grad_j(world)),
        "dapo": ("E[A/(all tokens) grad log pi(y)] / P(not all equal)", dapo),
        "ppo_clip": ("E[(R - mean)/(all tokens) grad log pi(y)]", lambda: enumerated(False, "token")),
    }
    return [
        Certificate(
            f"algo={name}",
            claims[name][0],
            lambda row=row: ascent(  # type: ignore[misc]
                world,
                k,
                losses.row_loss(row, world.longest),
                admitted=losses.varies if row.dynamic_sampling else None,
            ),
            claims[name][1],
        )
        for name, row in ALGORITHMS.items()
    ]


CERTIFICATES = {
    case.name: case
    for part in (baselines(), deviations(), aggregations(), surrogate_cases(), regularizers(), rows())
    for case in part
}
