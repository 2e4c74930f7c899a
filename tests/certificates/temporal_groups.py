"""Certificates of credit by groups that weigh lengths, batches or single tokens: OPO, REINFORCE++, ReMax, PRIME."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from novarl.algos import advantages
from tests.certificates import exact, losses, temporal_group_exact as right
from tests.certificates.certificate import LONG, MIDDLE, SHORT, Certificate, certify, grad_j, scored
from tests.certificates.expected import Minibatch
from tests.certificates.losses import policy_loss

MIXED = [5, -(2**40), 5]
"""A group of two with another trajectory in between."""


def lengths(batch: Minibatch) -> Tensor:
    return losses.answer_sum(batch, torch.ones_like(batch.logp))


def opo(batch: Minibatch) -> Tensor:
    return advantages.opo(batch.reward, batch.group, lengths=lengths(batch))


def reinforce_pp(batch: Minibatch) -> Tensor:
    return advantages.reinforce_pp(batch.reward, batch.group, eps=losses.NO_EPS)


def remax(batch: Minibatch) -> Tensor:
    return advantages.remax(batch.reward, batch.greedy)


def prime(gamma: float, coef: float) -> Callable[[Minibatch], Tensor]:
    """Process rewards log pi_old/pi_ref; every answer a row, its prompt in masked columns of junk."""

    def credit(batch: Minibatch) -> Tensor:
        rows = [batch.traj == row for row in range(len(batch.reward))]
        mask = pad_sequence([batch.mask[row] for row in rows], batch_first=True)
        process = torch.where(batch.mask, batch.old_logp - batch.ref_logp, 99.0)
        token_rewards = pad_sequence([process[row] for row in rows], batch_first=True)
        advantage = advantages.prime(token_rewards, mask, batch.reward, batch.group, gamma=gamma, process_coef=coef)
        return torch.cat([advantage[y, : int(row.sum())] for y, row in enumerate(rows)])

    return credit


def best_baseline() -> Certificate:
    """A group in which every answer comes as often as a uniform policy says it: 3 ** -length."""
    size = 3**MIDDLE.longest
    drawn = torch.tensor([y for y, answer in enumerate(MIDDLE.answers) for _ in range(size // 3 ** len(answer))])

    def ours() -> Tensor:
        reward = MIDDLE.reward[drawn]
        advantage = advantages.opo(reward, torch.zeros_like(drawn), lengths=MIDDLE.lengths[drawn])
        return (reward - advantage)[0]

    claim = "argmin_b Var[(R - b) grad log pi(y)], a uniform policy with a table of logits"
    return Certificate("opo, its baseline", claim, ours, lambda: right.best_baseline(MIDDLE))


def groups() -> list[Certificate]:
    return [
        certify("remax", "grad J", LONG, 1, policy_loss(remax), grad_j(LONG)),
        best_baseline(),
        certify(
            "opo, k=2",
            "E[L'/(L + L') (R - R') grad log pi(y)]",
            LONG,
            2,
            policy_loss(opo),
            scored(LONG, lambda: right.length_weighted(LONG, 2)),
        ),
        certify(
            "opo, k=3",
            "E[(R - (L R + L' R' + L'' R'')/(L + L' + L'')) grad log pi(y)]",
            MIDDLE,
            3,
            policy_loss(opo),
            scored(MIDDLE, lambda: right.length_weighted(MIDDLE, 3)),
        ),
        certify("opo, equal lengths, k=3", "(1 - 1/3) grad J", SHORT, 3, policy_loss(opo), grad_j(SHORT, 2 / 3)),
        certify(
            "reinforce_pp, groups of 2 and 1 interleaved",
            "(2/3) grad (P(beats a frozen twin) - P(is beaten))",
            MIDDLE,
            3,
            policy_loss(reinforce_pp),
            lambda: exact.win_rate_gradient(MIDDLE) * 2 / 3,
            groups=MIXED,
        ),
        certify(
            "reinforce_pp, two groups of 2",
            "E[(d/2) / sqrt((d^2 + e^2)/6) grad log pi(y)], d = R - R', e another pair's",
            SHORT,
            4,
            policy_loss(reinforce_pp),
            scored(SHORT, lambda: right.batch_deviation(SHORT)),
            groups=[3, -1, 3, -1],
        ),
        certify(
            "prime, k=2",
            "grad (E[R] + E[sum_t r_t] - E[m] E[L]), E[m] fixed",
            LONG,
            2,
            policy_loss(prime(1.0, 1.0)),
            lambda: exact.objective_gradient(LONG, right.prime_objective(LONG, 1.0)),
        ),
        certify(
            "prime, k=3, gamma 0.9, process_coef 0.5",
            "E[sum_t (R - J + 0.5 sum_{s>=t} 0.9^(s-t) (r_s - E[m])) grad log pi(y_t)]",
            MIDDLE,
            3,
            policy_loss(prime(0.9, 0.5)),
            scored(MIDDLE, lambda: right.prime_advantage(MIDDLE, 0.9, 0.5)),
        ),
        certify(
            "prime, groups of 2 and 1 interleaved",
            "(2/3) grad (E[R] + E[sum_t r_t] - E[m] E[L]): the single one learns nothing",
            MIDDLE,
            3,
            policy_loss(prime(1.0, 1.0)),
            lambda: exact.objective_gradient(MIDDLE, right.prime_objective(MIDDLE, 1.0)) * 2 / 3,
            groups=MIXED,
        ),
    ]
