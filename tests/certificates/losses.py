"""Losses of a minibatch, put together from the library's functions as a learner does it.

The functions are looked up in their modules at every call, so that a fault planted there is seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from novarl.algos import advantages, aggregate, kl, off_policy, surrogates
from tests.certificates.expected import Loss, Minibatch

EMA = 0.3
"""The moving average that `ema` has seen so far."""
NO_EPS = 1e-13
"""Small enough to vanish beside every deviation here, and still enough for 0/eps to be 0."""
Credit = Callable[[Minibatch], Tensor]
"""An advantage per answer [k], or per token [N]."""


def none(batch: Minibatch) -> Tensor:
    return advantages.constant_baseline(batch.reward, 0.0)


def constant(batch: Minibatch) -> Tensor:
    return advantages.constant_baseline(batch.reward, 0.7)


def mean(batch: Minibatch) -> Tensor:
    return advantages.batch(batch.reward, batch.group)


def ema(batch: Minibatch) -> Tensor:
    return advantages.ema_baseline(batch.reward, EMA, beta=0.9)[0]


def ema_first(batch: Minibatch) -> Tensor:
    return advantages.ema_baseline(batch.reward, None, beta=0.9)[0]


def scst(batch: Minibatch) -> Tensor:
    return advantages.scst(batch.reward, batch.greedy)


def group(batch: Minibatch) -> Tensor:
    return advantages.group(batch.reward, batch.group)


def group_std(batch: Minibatch, eps: float = 1e-6) -> Tensor:
    return advantages.group(batch.reward, batch.group, norm_std=True, eps=eps)


def leave_one_out(batch: Minibatch) -> Tensor:
    return advantages.leave_one_out(batch.reward, batch.group)


def whitened(batch: Minibatch) -> Tensor:
    return advantages.whiten(none(batch)[batch.traj] * batch.mask, batch.mask, eps=NO_EPS)


def answer_sum(batch: Minibatch, per_token: Tensor) -> Tensor:
    """Per answer [k]: the sum of a per-token column over its mask."""
    return torch.zeros_like(batch.reward).index_add(0, batch.traj, per_token * batch.mask)


def kl_as_reward(batch: Minibatch, estimator: str, beta: float) -> Tensor:
    """R - beta sum_t KL_t, and no baseline."""
    return none(batch) - beta * answer_sum(batch, getattr(kl, estimator)(batch.logp.detach(), batch.ref_logp))


def kl_as_advantage(batch: Minibatch, estimator: str) -> Tensor:
    """-KL_t for each token, and no reward."""
    return -getattr(kl, estimator)(batch.logp.detach(), batch.ref_logp)


def weights(batch: Minibatch, how: str, divisor: float) -> Tensor:
    count = len(batch.reward)
    return aggregate.weights(batch.mask, batch.traj, how=how, constant=divisor, trajectories=count, dtype=torch.float64)


def policy_loss(
    credit: Credit,
    *,
    clip: tuple[float, float] | None = None,
    off_policy_old: bool = False,
    correction_max: float | None = None,
    how: str = "constant",
    divisor: float = 1.0,
) -> Loss:
    """Surrogate (`clip`: PPO's), aggregated. The old policy is the current one unless `off_policy_old`, and the sampler
    is the world's `behavior` where there is a correction."""

    def loss(batch: Minibatch) -> Tensor:
        advantage = credit(batch)
        if len(advantage) != len(batch.mask):
            advantage = advantage[batch.traj] * batch.mask
        old = batch.old_logp if off_policy_old else batch.logp.detach()
        surrogate = surrogates.reinforce
        if clip is not None:
            surrogate = partial(surrogates.ppo_clip, clip_low=clip[0], clip_high=clip[1])
        per_token, _ = surrogate(batch.logp, old, advantage, batch.mask)
        if correction_max is not None:
            per_token = per_token * off_policy.truncated_weight(
                old, batch.behavior_logp, batch.mask, maximum=correction_max
            )
        return (per_token * weights(batch, how, divisor)).sum()

    return loss


def kl_loss(estimator: str, *, how: str = "constant", divisor: float = 1.0) -> Loss:
    """The KL estimator as a loss."""

    def loss(batch: Minibatch) -> Tensor:
        per_token = getattr(kl, estimator)(batch.logp, batch.ref_logp)
        return (per_token * weights(batch, how, divisor)).sum()

    return loss


def kl_value(estimator: str) -> Loss:
    """The estimator's value, summed over the answer."""
    return lambda batch: answer_sum(batch, getattr(kl, estimator)(batch.logp, batch.ref_logp)).sum()


def entropy_loss(batch: Minibatch) -> Tensor:
    """The entropy bonus: minus the entropy."""
    return -(batch.entropy * weights(batch, "constant", 1.0)).sum()


def varies(batch: Minibatch) -> bool:
    """What dynamic sampling admits."""
    return int(advantages.zero_variance_groups(batch.reward, batch.group)) == 0
