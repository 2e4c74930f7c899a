"""The exact side of the surrogates, corrections and of corrected KL: what multiplies R grad log pi(y_t) [Y, longest].

Written from probabilities, like `exact`, and like it without importing the library.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.certificates import exact
from tests.certificates.world import Policy, World


def outside(value: Tensor, low: float, high: float) -> Tensor:
    return (value < low) | (value > high)


def dual_clip(world: World, low: float, high: float, dual: float) -> Tensor:
    """r, and 0 where a good token is above `high` or a bad one not between `low` and `dual`."""
    ratio, reward = exact.ratios(world, world.policy, world.old), world.reward[:, None]
    gone = torch.where(reward > 0, ratio > high, outside(ratio, low, dual))
    return torch.where(gone, 0.0, ratio)


def gspo(world: World, low: float, high: float) -> Tensor:
    """s / L, s = (pi(y) / pi_old(y))^(1/L) from probabilities of answers, and 0 where the answer is clipped [Y]."""
    s = rooted(world, answer_ratio(world, world.policy, world.old))
    gone = torch.where(world.reward > 0, s > high, s < low)
    return torch.where(gone, 0.0, s) / world.lengths


def cispo(world: World, low: float, high: float) -> Tensor:
    """r within its bounds."""
    ratio = exact.ratios(world, world.policy, world.old)
    return torch.where(ratio < low, low, torch.where(ratio > high, high, ratio))


def sapo(world: World, tau_pos: float, tau_neg: float) -> Tensor:
    """r / cosh^2(tau (r - 1) / 2)."""
    ratio = exact.ratios(world, world.policy, world.old)
    tau = torch.where(world.reward > 0, tau_pos, tau_neg).double()[:, None]
    return ratio / (tau * (ratio - 1) / 2).cosh() ** 2


def answer_ratio(world: World, over: Policy, under: Policy) -> Tensor:
    """over(y) / under(y) of whole answers [Y]."""
    return exact.fixed(world, over) / exact.fixed(world, under)


def rooted(world: World, ratio: Tensor) -> Tensor:
    """The L-th root [Y]."""
    return ratio ** (1 / world.lengths)


def off_policy(world: World, sampler: Policy, weight: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """E_sampler[sum_t weight(y, t) R grad log pi(y_t)]; weight [Y] or [Y, longest]."""

    def gradient() -> Tensor:
        of_answer = exact.fixed(world, sampler) * world.reward
        value = weight()
        return exact.score_gradient(world, of_answer * value if value.ndim == 1 else of_answer[:, None] * value)

    return gradient


def visited_kl_gradient(world: World, sampler: Policy) -> Tensor:
    """sum_s d(s) grad KL(pi(s) || ref(s)), d(s) the visits of `sampler`."""
    total = world.policy.embed.new_zeros(())
    for answer, chance in zip(world.answers, exact.fixed(world, sampler).tolist(), strict=True):
        for t in range(len(answer)):
            p = exact.state_distribution(world, world.policy, answer[:t])
            q = exact.state_distribution(world, world.reference, answer[:t]).detach()
            total = total + chance * (p * (p / q).log()).sum()
    return torch.cat([part.flatten() for part in torch.autograd.grad(total, world.policy.parameters)])


def flat_rate(world: World) -> float:
    """The probability that two draws have the same reward."""
    p = exact.fixed(world, world.policy)
    return float((p[:, None] * p * (world.reward[:, None] == world.reward)).sum())


def squared_log_ratio(world: World) -> Tensor:
    """E[(log pi(y)/ref(y))^2]: of the KL's terms per answer, and not of their tokens."""
    return (exact.fixed(world, world.policy) * answer_ratio(world, world.policy, world.reference).log() ** 2).sum()
