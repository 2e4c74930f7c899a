"""Advantages of whole trajectories from their rewards: how much better than a baseline each one did.

All functions are per trajectory, [R] -> [R], in the dtype of the rewards. `group` holds arbitrary int64 ids, one per
trajectory: equal ids are samples of one prompt, groups may differ in size and be interleaved. Greedy rollouts that only
serve as a baseline are no samples: leave them out first.

Rewards are shifted by the smallest of their group before they are averaged, so that equal rewards give exactly 0,
whatever their value, and no rounding error is ever divided by a small deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def constant_baseline(rewards: Tensor, value: float = 0.0) -> Tensor:
    """A = R - value. Unbiased for any value fixed before the rewards are seen; 0 is plain REINFORCE."""
    return rewards - value


def ema_baseline(rewards: Tensor, ema: float | None, *, beta: float = 0.9) -> tuple[Tensor, float | None]:
    """A = R - ema, with the moving average of *earlier* batches; returns (A, the average for the next batch).

        ema' = beta ema + (1 - beta) mean(R)

    None is an average of nothing: the first batch has no baseline and its mean becomes the average. Updating before
    use, as is often done, would put the sample's own reward into its baseline and scale the gradient by
    1 - (1 - beta)/R. The average is a plain number because it is saved in the checkpoint; an empty batch leaves it be.
    """
    advantage = rewards if ema is None else rewards - ema
    if rewards.numel() == 0:
        return advantage, ema
    mean = float(rewards.mean())
    return advantage, mean if ema is None else beta * ema + (1.0 - beta) * mean


def scst(rewards: Tensor, greedy: Tensor) -> Tensor:
    """A = R - R_greedy: self-critical sequence training (https://arxiv.org/abs/1612.00563).

    greedy [R]: for each trajectory the reward of the greedy rollout of the same prompt. Unbiased: the greedy answer
    does not depend on the sample. ReMax (https://arxiv.org/abs/2310.10505) found the same rule again for language
    models, one sample and one greedy answer per prompt: `remax` is this function.
    """
    return rewards - greedy


remax = scst


def batch(rewards: Tensor, group: Tensor, *, norm_std: bool = False, eps: float = 1e-6) -> Tensor:
    """A = R - mean(R) over the batch of B trajectories, their own included, whatever their groups; divided by
    (std(R) + eps) if `norm_std`.

    The expected gradient points the right way but is (1 - 1/B) times the true one; a batch of one learns nothing. With
    the deviation it is plain REINFORCE++ (see `reinforce_pp`), the fallback where every prompt is sampled once.
    """
    return _standardised(rewards, torch.zeros_like(group), norm_std=norm_std, eps=eps)


def group(rewards: Tensor, group: Tensor, *, norm_std: bool = False, eps: float = 1e-6) -> Tensor:
    """A = R - mean_group(R), divided by (std_group(R) + eps) if `norm_std`.

    Without the deviation: Dr. GRPO (https://arxiv.org/abs/2503.20783), (1 - 1/k) times the true gradient in
    expectation, k the group's size. With it: GRPO (https://arxiv.org/abs/2402.03300); the deviation is the sample one,
    sqrt(sum (R - mean)^2 / (k - 1)), as in TRL. A group of one, or of equal rewards, gets exactly 0.
    """
    return _standardised(rewards, group, norm_std=norm_std, eps=eps)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = R_i - (1/(k-1)) sum_{j != i} R_j = k/(k-1) (R_i - mean): RLOO (https://arxiv.org/abs/2402.14740).

    Unbiased. A group of one has nobody to be compared with and gets 0.
    """
    centred, index, size = _centred(rewards, group)
    return centred * (size / (size - 1).clamp(min=1))[index]


def reinforce_pp(rewards: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A = (R - mean_group(R)) / (std + eps), the deviation over the whole batch: REINFORCE++-baseline
    (https://arxiv.org/abs/2501.03262).

    The group's mean takes away how hard the prompt is, the batch's deviation only the scale: a group that hardly varies
    keeps its small advantages, which GRPO's own deviation would blow up. Centred groups need no second centring, so
    that a group of equal rewards, or of one, stays at exactly 0. The deviation, the sample one, knows the sample: the
    expected gradient is (1 - 1/k) grad J over a constant only as the batch grows.

    Every trajectory counts once in the deviation. To count every token once, as implementations that whiten per token
    do, call `group` and then `whiten`. Plain REINFORCE++, for one sample per prompt, has no groups: R less the KL
    penalty, whitened over the batch: `batch(..., norm_std=True)`.
    """
    centred = _centred(rewards, group)[0]
    return centred / (_deviation(centred) + eps)


def opo(rewards: Tensor, group: Tensor, *, lengths: Tensor) -> Tensor:
    """A_i = R_i - sum_j l_j R_j / sum_j l_j over the group, l the numbers of tokens [R]: OPO
    (https://arxiv.org/abs/2505.23585).

    Among all constant baselines E[|grad log pi|^2 R] / E[|grad log pi|^2] gives the smallest variance; where an
    answer's squared gradient is proportional to its length, that is the length-weighted mean. The baseline holds the
    sample's own reward, with a weight that depends on its length: the expected gradient is

        E[(1/L) sum_{j != i} l_j (R_i - R_j) grad log pi(y_i)],   L = sum_j l_j,

    (1 - 1/k) grad J for equal lengths (then it is `group`) and biased otherwise. A group of one, or of equal rewards,
    gets exactly 0.
    """
    return _centred(rewards, group, lengths.to(rewards.dtype))[0]


def whiten(advantage: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(A - mean) / (std + eps) over the masked entries, 0 elsewhere; any shape, the mask of the same shape.

    Over all of them at once, never per trajectory, which would erase what distinguishes good trajectories from bad
    ones. The deviation is the sample one; equal entries, a single one among them, give exactly 0.
    """
    chosen = _centred(advantage[mask], advantage.new_zeros(int(mask.sum()), dtype=torch.int64))[0]
    return torch.zeros_like(advantage).masked_scatter(mask, chosen / (_deviation(chosen) + eps))


def zero_variance_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """How many groups have equal rewards throughout, and so no gradient: int64, 0-d. A group of one is such a group."""
    ids, index = torch.unique(group, return_inverse=True)
    low, high = (_extreme_by(rewards, index, len(ids), how) for how in ("amin", "amax"))
    return (low == high).sum()


def _standardised(rewards: Tensor, group: Tensor, *, norm_std: bool, eps: float) -> Tensor:
    centred, index, size = _centred(rewards, group)
    if not norm_std:
        return centred
    # Squares in 64 bits: those of rewards beyond 1e19 would be infinite in 32, and every advantage 0.
    std = (_sum_by(centred.double().square(), index, len(size)) / (size - 1).clamp(min=1)).sqrt().to(centred)
    return centred / (std[index] + eps)


def _deviation(centred: Tensor) -> Tensor:
    """The sample deviation of values whose mean is 0, 0-d; squares in 64 bits, as above."""
    return (centred.double().square().sum() / max(centred.numel() - 1, 1)).sqrt().to(centred)


def _centred(rewards: Tensor, group: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(R less its group's weighted mean, each trajectory's group as an index 0..G-1, the weight of each group [G]).

    Without weights everyone counts 1. A group that weighs nothing has a mean of its smallest reward.
    """
    ids, index = torch.unique(group, return_inverse=True)
    weight = torch.ones_like(rewards) if weight is None else weight
    total = _sum_by(weight, index, len(ids))
    shifted = rewards - _extreme_by(rewards, index, len(ids), "amin")[index]
    mean = _sum_by(weight * shifted, index, len(ids)) / torch.where(total > 0, total, 1.0)
    return shifted - mean[index], index, total


def _sum_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, index, values)


def _extreme_by(values: Tensor, index: Tensor, count: int, how: str) -> Tensor:
    return values.new_zeros(count).scatter_reduce(0, index, values, how, include_self=False)
