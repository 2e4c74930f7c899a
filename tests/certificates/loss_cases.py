"""Certificates of surrogates, corrections and regularizers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.certificates import exact, losses
from tests.certificates.certificate import (
    CAP,
    CLIP,
    COLD,
    LONG,
    SHORT,
    WIDE_CLIP,
    Certificate,
    certify,
    grad_j,
    scored,
    times,
)
from tests.certificates.expected import Loss, expectation, likeliest_logp, pack
from tests.certificates.losses import policy_loss
from tests.certificates.world import Policy, World


def by(sampler: Policy, weight: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """E[sum_t weight(y, t) grad log pi(y_t)] over another policy's answers."""
    return lambda: exact.score_gradient(LONG, times(exact.fixed(LONG, sampler), weight()))


def unclipped() -> Tensor:
    """R r_t where PPO's clip is not active, 0 where it is [Y, longest]."""
    ratio, reward = exact.ratios(LONG, LONG.policy, LONG.old), LONG.reward[:, None]
    active = ((reward > 0) & (ratio > 1 + CLIP[1])) | ((reward < 0) & (ratio < 1 - CLIP[0]))
    return torch.where(active, 0.0, reward * ratio)


def capped(over: Policy) -> Tensor:
    return exact.ratios(LONG, over, LONG.behavior).clamp(max=CAP)


def surrogates() -> list[Certificate]:
    return [
        certify(
            "ppo_clip at ratio 1",
            "grad J, as reinforce",
            LONG,
            2,
            policy_loss(losses.leave_one_out, clip=CLIP),
            grad_j(LONG),
        ),
        certify(
            "ppo_clip off policy",
            "E_old[sum_t 1[not clipped at 0.8 or 1.28] r_t R grad log pi(y_t)]",
            LONG,
            1,
            policy_loss(losses.none, clip=CLIP, off_policy_old=True),
            by(LONG.old, unclipped),
            sampler=LONG.old,
        ),
        certify(
            "ppo_clip off policy, one token, bounds out of reach",
            "grad J",
            SHORT,
            1,
            policy_loss(losses.none, clip=WIDE_CLIP, off_policy_old=True),
            grad_j(SHORT),
            sampler=SHORT.old,
        ),
        certify(
            "supervised: advantage 1 on another's answers",
            "grad E_mu[log pi(y)]",
            LONG,
            1,
            policy_loss(lambda batch: torch.ones_like(batch.reward)),
            by(LONG.behavior, lambda: torch.ones_like(LONG.reward)),
            sampler=LONG.behavior,
        ),
    ]


def corrections() -> list[Certificate]:
    return [
        certify(
            "truncated weight, one token, no cap",
            "grad J",
            SHORT,
            1,
            policy_loss(losses.none, correction_max=1e9),
            grad_j(SHORT),
            sampler=SHORT.behavior,
        ),
        certify(
            "truncated weight",
            "E_mu[sum_t min(pi/mu, 1.1) R grad log pi(y_t)]",
            LONG,
            1,
            policy_loss(losses.none, correction_max=CAP),
            by(LONG.behavior, lambda: capped(LONG.policy) * LONG.reward[:, None]),
            sampler=LONG.behavior,
        ),
        certify(
            "truncated weight, and ppo_clip on top",
            "E_mu[sum_t min(pi_old/mu, 1.1) 1[not clipped] r_t R grad log pi(y_t)]",
            LONG,
            1,
            policy_loss(losses.none, clip=CLIP, off_policy_old=True, correction_max=CAP),
            by(LONG.behavior, lambda: capped(LONG.old) * unclipped()),
            sampler=LONG.behavior,
        ),
    ]


def regularizers() -> list[Certificate]:
    def log_ratio() -> Tensor:
        return exact.ratios(LONG, LONG.policy, LONG.reference).log()

    def on_answers(per_token: Tensor) -> Tensor:
        return (per_token * exact.real_tokens(LONG)).sum(1)

    def half_square() -> Tensor:
        return (exact.fixed(LONG, LONG.policy) * on_answers(log_ratio() ** 2)).sum() / 2

    def k3_as_reward() -> Tensor:
        x = log_ratio()
        return LONG.reward - 0.5 * on_answers(x + (-x).exp() - 1)

    def value(estimator: str, claim: str, right: Callable[[], Tensor]) -> Certificate:
        return Certificate(
            f"{estimator}, value", claim, lambda: expectation(LONG, 1, losses.kl_value(estimator)), right
        )

    def gradient(name: str, claim: str, loss: Loss, right: Callable[[], Tensor], world: World = LONG) -> Certificate:
        return certify(name, claim, world, 1, loss, right)

    return [
        value("k1", "KL(pi, ref)", lambda: exact.true_kl(LONG)),
        value("k2", "E[sum_t x_t^2]/2", half_square),
        value("k3", "KL(pi, ref)", lambda: exact.true_kl(LONG)),
        gradient("k1 as loss", "0: no signal", losses.kl_loss("k1"), grad_j(LONG, 0.0)),
        gradient(
            "k2 as loss",
            "-sum_s d(s) grad KL(pi(s), ref(s)), visits d fixed",
            losses.kl_loss("k2"),
            lambda: -exact.per_state_gradient(LONG, "reverse_kl"),
        ),
        gradient(
            "k2 as loss, one token",
            "-grad KL(pi, ref)",
            losses.kl_loss("k2"),
            lambda: exact.kl_regularised_gradient(SHORT, 1.0) - exact.kl_regularised_gradient(SHORT, 0.0),
            SHORT,
        ),
        gradient(
            "k3 as loss",
            "-sum_s d(s) grad KL(ref(s), pi(s)), visits d fixed",
            losses.kl_loss("k3"),
            lambda: -exact.per_state_gradient(LONG, "forward_kl"),
        ),
        gradient(
            "k1 as advantage",
            "as k2 as loss",
            policy_loss(lambda batch: losses.kl_as_advantage(batch, "k1")),
            lambda: -exact.per_state_gradient(LONG, "reverse_kl"),
        ),
        gradient(
            "k1 as reward, beta 0.5",
            "grad (J - 0.5 KL(pi, ref))",
            policy_loss(lambda batch: losses.kl_as_reward(batch, "k1", 0.5)),
            lambda: exact.kl_regularised_gradient(LONG, 0.5),
        ),
        gradient(
            "k3 as reward, beta 0.5",
            "E[(R - 0.5 sum_t k3_t) grad log pi(y)]",
            policy_loss(lambda batch: losses.kl_as_reward(batch, "k3", 0.5)),
            scored(LONG, k3_as_reward),
        ),
        gradient(
            "entropy bonus",
            "sum_s d(s) grad H(pi(s)), visits d fixed",
            losses.entropy_loss,
            lambda: exact.per_state_gradient(LONG, "entropy"),
        ),
    ]


def likeliest() -> list[Certificate]:
    """What tells a greedy choice from another."""

    def ours() -> Tensor:
        packed = pack(COLD)
        table = likeliest_logp(packed, COLD.policy)
        own = [(table * packed.mask)[torch.tensor(span)].sum() for span in packed.spans]
        return (exact.fixed(COLD, COLD.policy) * torch.stack(own)).sum()

    def right() -> Tensor:
        best = {state: exact.state_distribution(COLD, COLD.policy, state).detach().max().log() for state in COLD.states}
        return torch.stack([visits * best[state] for state, visits in exact.reach(COLD).items()]).sum()

    return [
        Certificate("log-probability of the likeliest token", "E[sum_t max_j log pi(j)], temperature 0.7", ours, right)
    ]
