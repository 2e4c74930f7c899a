"""Surrogates: per-token losses whose gradient is a policy gradient.

Each takes (logp, old_logp, advantage, mask), all [N] or all [S, T], and returns (loss to be minimised, statistics by
name), each of the same shape. logp carries the gradient; old_logp is of the policy before the rollout's first update,
the advantage is data. What lies outside the mask gives loss 0 and gradient 0, whatever it holds. What the loss is
summed over and divided by is the business of `aggregate`.

With r_t = pi(token_t) / pi_old(token_t), each is known by what multiplies A_t grad log pi(token_t) in its gradient:

    surrogate    A_t > 0                             A_t < 0
    reinforce    1                                   1
    gpg          alpha                               alpha
    ppo_clip     r_t, 0 above 1 + clip_high          r_t, 0 below 1 - clip_low
    dual_clip    r_t, 0 above 1 + clip_high          r_t, 0 below 1 - clip_low and above clip_dual
    gspo         as ppo_clip with s = (product of its sequence's r_t)^(1/length) for r_t
    cispo        clip(r_t, 1 - clip_low, 1 + clip_high), of either sign
    sapo         r_t / cosh^2(tau_pos (r_t - 1) / 2)  r_t / cosh^2(tau_neg (r_t - 1) / 2)

Where r = 1 all but `gpg` have the gradient of `reinforce` (`gspo` where A is the same throughout a sequence; otherwise
each token gets the sequence's mean A). `make certificates` shows each row of this table by enumeration.

Every one reports `clip_fraction`: True for the tokens whose gradient its bounds take away or limit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from novarl.algos import aggregate

_SATURATED = 8.0
"""sigmoid(exp(8) - 1) is 1 and its slope 0, in float64 too."""


def reinforce(logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-A_t log pi(token_t): REINFORCE (Williams, 1992, https://doi.org/10.1007/BF00992696).

    Exact where the policy itself sampled the tokens; it does not look at `old_logp`. With A = 1 it is supervised
    fine-tuning. Nothing is ever clipped, so `clip_fraction` is False throughout.
    """
    loss = -torch.where(mask, advantage, 0.0) * torch.where(mask, logp, 0.0)
    return loss, {"clip_fraction": torch.zeros_like(mask)}


def gpg(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, alpha: float | Tensor = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """-alpha A_t log pi(token_t): group policy gradient (https://arxiv.org/abs/2504.02546).

    As a surrogate this is `reinforce` times a number, and with alpha = 1 nothing else. What makes GPG is around it: the
    deviation from the group's mean as advantage, the mean over all tokens as aggregation, and `alpha` from `gpg_alpha`,
    one number for the whole minibatch on all ranks: a mean over groups of which some have no gradient is too small, and
    alpha makes up for them. The gradient is alpha times that of `reinforce`, also where r_t = 1.
    """
    loss, stats = reinforce(logp, old_logp, advantage, mask)
    return alpha * loss, stats


def gpg_alpha(rewards: Tensor, group: Tensor) -> Tensor:
    """B / (B - M), 0-d: B groups of which M have equal rewards throughout, and so no gradient; 1 if all have none.

    rewards [R], group [R] int64, any ids; equal means equal to the bit. In expectation it goes only part of the way
    from the mean over all groups to that over groups with a gradient, which dynamic sampling takes: with two groups,
    each of them flat with probability f, it multiplies the gradient by 1 + f and not by 1 / (1 - f).
    """
    ids, index = torch.unique(group, return_inverse=True)
    low, high = (
        rewards.new_zeros(len(ids)).scatter_reduce(0, index, rewards, end, include_self=False)
        for end in ("amin", "amax")
    )
    alive = (low != high).to(rewards.dtype).sum()
    return torch.where(alive > 0, len(ids) / alive.clamp(min=1), 1.0)


def ppo_clip(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), r_t = pi(token_t) / pi_old(token_t).

    PPO (https://arxiv.org/abs/1707.06347); a larger `clip_high` is DAPO's clip-higher
    (https://arxiv.org/abs/2503.14476). Where r_t = 1 its gradient is that of `reinforce`.

    `clip_fraction`: True where the clip is active and the gradient zero, which is r_t > 1 + clip_high for A_t > 0 and
    r_t < 1 - clip_low for A_t < 0; a ratio beyond a bound that an update may still bring back is not counted.
    """
    log_ratio, advantage = _masked(logp - old_logp, mask), _masked(advantage, mask)
    return _pessimistic(log_ratio, advantage, mask, clip_low=clip_low, clip_high=clip_high, clip_dual=math.inf)


def dual_clip(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo_clip`, and for A_t < 0 no more than clip_dual |A_t|: -max(min(r A, clip(r) A), clip_dual A) there.

    Dual-clip PPO (https://arxiv.org/abs/1912.09729). PPO pulls back at full strength r_t what is bad and has become
    likely, and r_t has no bound; beyond `clip_dual` this one lets go. The same as two-sided clipping
    (https://arxiv.org/abs/2505.07291; `delta` in TRL 1.16) wherever clip_dual >= 1 + clip_high.

    `clip_fraction` counts both bounds. ValueError unless clip_dual > 1: on-policy tokens would have no gradient.
    """
    if not clip_dual > 1:
        raise ValueError(f"clip_dual must be above 1, got {clip_dual}")
    log_ratio, advantage = _masked(logp - old_logp, mask), _masked(advantage, mask)
    return _pessimistic(log_ratio, advantage, mask, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)


def gspo(
    logp: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    sequence: Tensor | None = None,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t), s = exp(mean over the sequence's tokens of log r_t).

    Group sequence policy optimisation (https://arxiv.org/abs/2507.18071), with the paper's bounds, which are narrow
    because s is a geometric mean. Each token bears the loss of its sequence, so that "sequence" aggregation gives the
    paper's objective, the mean of -min(s A, clip(s) A) over sequences; so does TRL 1.16 with
    importance_sampling_level="sequence" and loss_type="grpo". A sequence is clipped as a whole.

    `sequence`: int64 ids like logp, any values; a trajectory of several stretches is one sequence. None means that the
    rows of [S, T] are the sequences; ValueError for [N] without ids. All tokens of a sequence must be in one call.
    """
    log_ratio, advantage = _masked(logp - old_logp, mask), _masked(advantage, mask)
    total, index = aggregate.per_sequence(log_ratio, mask, sequence)
    length, _ = aggregate.per_sequence(torch.ones_like(log_ratio), mask, sequence)
    mean = (total / length.clamp(min=1))[index]
    return _pessimistic(mean, advantage, mask, clip_low=clip_low, clip_high=clip_high, clip_dual=math.inf)


def cispo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(token_t), sg: without a gradient.

    CISPO (https://arxiv.org/abs/2506.13585): the weight of a token is bounded and its gradient never taken away. The
    paper sets no lower bound, which is clip_low = 1; the upper one, 1 + clip_high = 5, is what TRL 1.16 recommends
    after ScaleRL (https://arxiv.org/abs/2510.13786), where it is called epsilon_high; TRL has no lower one.

    `clip_fraction`: True where the weight is bounded, of either sign of A_t; there the gradient is limited, not zero.
    """
    ratio = _masked(logp - old_logp, mask).detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * _masked(advantage, mask) * _masked(logp, mask)
    return loss, {"clip_fraction": mask & (weight != ratio) & (advantage != 0)}


def sapo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, tau_pos: float, tau_neg: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-(4 / tau) sigmoid(tau (r_t - 1)) A_t, tau = tau_pos where A_t > 0 and tau_neg elsewhere.

    Soft adaptive policy optimisation (https://arxiv.org/abs/2511.20347): a gate in place of a clip. The derivative of
    the gate in r_t is 1 / cosh^2(tau (r_t - 1) / 2): 1 on-policy, fading to both sides, the faster the larger tau. The
    paper's aggregation is "sequence". On-policy the loss is -2 A_t / tau and not -A_t: only its gradient has a meaning.

    `clip_fraction`: True where the gate leaves less than half of the gradient, by cosh^2 > 2; nothing is cut off.
    ValueError unless both temperatures are positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"the temperatures must be positive, got tau_pos={tau_pos}, tau_neg={tau_neg}")
    log_ratio, advantage = _masked(logp - old_logp, mask), _masked(advantage, mask)
    tau = torch.where(advantage > 0, torch.full_like(advantage, tau_pos), tau_neg)
    # Where r is so large that sigmoid is 1 and its slope 0 in any dtype; exp would overflow, and 0 * inf is NaN.
    ratio = log_ratio.clamp(max=_SATURATED - math.log(min(tau_pos, tau_neg, 1.0))).exp()
    gate = torch.sigmoid(tau * (ratio - 1.0))
    loss = torch.where(mask, -(4.0 / tau) * gate * advantage, 0.0)
    left = (4.0 * gate * (1.0 - gate)).detach()
    return loss, {"clip_fraction": mask & (left < 0.5) & (advantage != 0)}


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """0 outside the mask, before anything is computed from it: inf * 0 would be NaN in the gradient."""
    return torch.where(mask, values, 0.0)


def _pessimistic(
    log_ratio: Tensor, advantage: Tensor, mask: Tensor, *, clip_low: float, clip_high: float, clip_dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r) A), and for A < 0 at most clip_dual |A|: good tokens have a ceiling, bad ones a floor.

    What lies far beyond a bound is cut off before exp, so that no ratio overflows where none has a gradient.
    """
    good = advantage >= 0
    near_high, near_dual = (log_ratio.clamp(max=math.log(bound) + 1.0) for bound in (1.0 + clip_high, clip_dual))
    ratio = torch.where(good, near_high, near_dual).exp()
    bounded = torch.where(good, ratio.clamp(max=1.0 + clip_high), ratio.clamp(1.0 - clip_low, clip_dual))
    loss = torch.where(mask, -bounded * advantage, 0.0)
    return loss, {"clip_fraction": mask & (ratio * advantage != bounded * advantage).detach()}
