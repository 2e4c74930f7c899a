"""Surrogates: per-token losses whose gradient is a policy gradient.

Each takes (logp, old_logp, advantage, mask), all [N] or all [S, T], and returns (loss to be minimised, statistics by
name), each of the same shape. logp carries the gradient; old_logp is of the policy before the rollout's first update,
the advantage is constant. Outside the mask loss and gradient are 0, whatever the values. Sums and denominators are
defined by `aggregate`.

With r_t = pi(token_t) / pi_old(token_t), the gradient of each is A_t grad log pi(token_t) times:

    surrogate    A_t > 0                             A_t < 0
    reinforce    1                                   1
    gpg          alpha                               alpha
    ppo_clip     r_t, 0 above 1 + clip_high          r_t, 0 below 1 - clip_low
    dual_clip    r_t, 0 above 1 + clip_high          r_t, 0 below 1 - clip_low and above clip_dual
    gspo         as ppo_clip with s = (product of its sequence's r_t)^(1/length) for r_t
    cispo        clip(r_t, 1 - clip_low, 1 + clip_high), of either sign
    sapo         r_t / cosh^2(tau_pos (r_t - 1) / 2)  r_t / cosh^2(tau_neg (r_t - 1) / 2)

At r = 1 all but `gpg` have the gradient of `reinforce` (`gspo` if A is constant over a sequence; otherwise each token
gets the sequence's mean A). `make certificates` verifies each row of this table by enumeration.

All report `clip_fraction`: True for tokens whose gradient is removed or limited by the bounds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from novarl.algos import aggregate

_SATURATED = 8.0
"""sigmoid(exp(8) - 1) is 1 with slope 0, even in float64."""


def reinforce(logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-A_t log pi(token_t): REINFORCE (Williams, 1992, https://doi.org/10.1007/BF00992696).

    Exact if the policy itself sampled the tokens; `old_logp` is not used. With A = 1 it is supervised fine-tuning.
    Nothing is clipped, so `clip_fraction` is always False.
    """
    loss = -torch.where(mask, advantage, 0.0) * torch.where(mask, logp, 0.0)
    return loss, {"clip_fraction": torch.zeros_like(mask)}


def gpg(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, alpha: float | Tensor = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """-alpha A_t log pi(token_t): group policy gradient (https://arxiv.org/abs/2504.02546).

    The surrogate is `reinforce` times a constant. The rest of GPG is the group-centred reward as advantage, the mean
    over all tokens as aggregation, and `alpha` from `gpg_alpha`, one number for the whole minibatch on all ranks, which
    compensates for groups without a gradient. The gradient is alpha times that of `reinforce`, also at r_t = 1.
    """
    loss, stats = reinforce(logp, old_logp, advantage, mask)
    return alpha * loss, stats


def gpg_alpha(rewards: Tensor, group: Tensor) -> Tensor:
    """B / (B - M), 0-d: for B groups of which M have equal rewards and so no gradient; 1 if none has a gradient.

    rewards [R], group [R] int64, any ids; equal means bit-identical. In expectation this only partly converts the mean
    over all groups to that over groups with a gradient, as dynamic sampling does: with two groups, each without a
    gradient with probability f, it multiplies the gradient by 1 + f and not by 1 / (1 - f).
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
    (https://arxiv.org/abs/2503.14476). At r_t = 1 its gradient is that of `reinforce`.

    `clip_fraction`: True where the clip is active and the gradient zero: r_t > 1 + clip_high for A_t > 0 and r_t < 1 -
    clip_low for A_t < 0. Ratios beyond the other bound keep their gradient and are not counted.
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
    """`ppo_clip` with the loss bounded by clip_dual |A_t| for A_t < 0: -max(min(r A, clip(r) A), clip_dual A) there.

    Dual-clip PPO (https://arxiv.org/abs/1912.09729). In PPO the gradient of a bad token that has become likely is
    proportional to r_t without bound; beyond `clip_dual` it is zero here. The same as two-sided clipping
    (https://arxiv.org/abs/2505.07291; `delta` in TRL 1.16) wherever clip_dual >= 1 + clip_high.

    `clip_fraction` counts both bounds. Raises ValueError unless clip_dual > 1(or on-policy tokens have no gradient).
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

    Group sequence policy optimization (https://arxiv.org/abs/2507.18071), with the paper's bounds, which are narrow
    because s is a geometric mean. Each token has the loss of its sequence, so "sequence" aggregation gives the paper's
    objective, the mean of -min(s A, clip(s) A) over sequences; so does TRL 1.16 with
    importance_sampling_level="sequence" and loss_type="grpo". A sequence is clipped as a whole.

    `sequence`: arbitrary int64 ids of the shape of logp; a trajectory in several parts has one id. None means that the
    rows of [S, T] are the sequences; raises ValueError for [N] without ids. Pass all tokens of a sequence in one call.
    """
    log_ratio, advantage = _masked(logp - old_logp, mask), _masked(advantage, mask)
    total, index = aggregate.per_sequence(log_ratio, mask, sequence)
    length, _ = aggregate.per_sequence(torch.ones_like(log_ratio), mask, sequence)
    mean = (total / length.clamp(min=1))[index]
    return _pessimistic(mean, advantage, mask, clip_low=clip_low, clip_high=clip_high, clip_dual=math.inf)


def cispo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t log pi(token_t), sg: stop-gradient.

    CISPO (https://arxiv.org/abs/2506.13585): the weight of a token is bounded, but its gradient is never removed. The
    paper has no lower bound (clip_low = 1); the upper bound, 1 + clip_high = 5, is recommended in TRL 1.16 after
    ScaleRL (https://arxiv.org/abs/2510.13786), where it is called epsilon_high; TRL has no lower bound.

    `clip_fraction`: True where the weight is clipped, for either sign of A_t; the gradient there is limited, not zero.
    """
    ratio = _masked(logp - old_logp, mask).detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * _masked(advantage, mask) * _masked(logp, mask)
    return loss, {"clip_fraction": mask & (weight != ratio) & (advantage != 0)}


def sapo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, tau_pos: float, tau_neg: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-(4 / tau) sigmoid(tau (r_t - 1)) A_t, tau = tau_pos if A_t > 0, else tau_neg.

    Soft adaptive policy optimization (https://arxiv.org/abs/2511.20347): a soft gate instead of a clip. The derivative
    of the gate in r_t is 1 / cosh^2(tau (r_t - 1) / 2): 1 on-policy, decaying on both sides, faster for larger tau. The
    paper's aggregation is "sequence". On-policy the loss is -2 A_t / tau and not -A_t: only its gradient is meaningful.

    `clip_fraction`: True where the gate reduces the gradient to less than half (cosh^2 > 2). Raises ValueError unless
    both temperatures are positive.
    """
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"the temperatures must be positive, got tau_pos={tau_pos}, tau_neg={tau_neg}")
    log_ratio, advantage = _masked(logp - old_logp, mask), _masked(advantage, mask)
    tau = torch.where(advantage > 0, torch.full_like(advantage, tau_pos), tau_neg)
    # For large r sigmoid is 1 with slope 0 in any dtype; exp would overflow, and 0 * inf is NaN.
    ratio = log_ratio.clamp(max=_SATURATED - math.log(min(tau_pos, tau_neg, 1.0))).exp()
    gate = torch.sigmoid(tau * (ratio - 1.0))
    loss = torch.where(mask, -(4.0 / tau) * gate * advantage, 0.0)
    left = (4.0 * gate * (1.0 - gate)).detach()
    return loss, {"clip_fraction": mask & (left < 0.5) & (advantage != 0)}


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Set values outside the mask to 0 before any computation: inf * 0 would be NaN in the gradient."""
    return torch.where(mask, values, 0.0)


def _pessimistic(
    log_ratio: Tensor, advantage: Tensor, mask: Tensor, *, clip_low: float, clip_high: float, clip_dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r) A), and for A < 0 at most clip_dual |A|: upper bound for good tokens, lower bound for bad ones.

    Values far beyond a bound are clamped before exp, so that ratios without a gradient do not overflow.
    """
    good = advantage >= 0
    near_high, near_dual = (log_ratio.clamp(max=math.log(bound) + 1.0) for bound in (1.0 + clip_high, clip_dual))
    ratio = torch.where(good, near_high, near_dual).exp()
    bounded = torch.where(good, ratio.clamp(max=1.0 + clip_high), ratio.clamp(1.0 - clip_low, clip_dual))
    loss = torch.where(mask, -bounded * advantage, 0.0)
    return loss, {"clip_fraction": mask & (ratio * advantage != bounded * advantage).detach()}
