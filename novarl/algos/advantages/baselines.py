"""Advantages of whole trajectories: their rewards relative to a baseline.

All functions are per trajectory, [R] -> [R], in the dtype of the rewards. `group` holds arbitrary int64 ids, one per
trajectory: equal ids are samples of one prompt; groups may differ in size and be interleaved. Exclude greedy rollouts
that only serve as a baseline.

Rewards are shifted by the minimum of their group before averaging, so that equal rewards give exactly 0 and no rounding
error is divided by a small deviation.
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

    With None the first batch has no baseline and its mean becomes the average. Updating before use, as is often done,
    would include the sample's own reward in its baseline and scale the gradient by 1 - (1 - beta)/R. The average is a
    plain float because it is saved in checkpoints; an empty batch does not change it.
    """
    advantage = rewards if ema is None else rewards - ema
    if rewards.numel() == 0:
        return advantage, ema
    mean = float(rewards.mean())
    return advantage, mean if ema is None else beta * ema + (1.0 - beta) * mean


def scst(rewards: Tensor, greedy: Tensor) -> Tensor:
    """A = R - R_greedy: self-critical sequence training (https://arxiv.org/abs/1612.00563).

    greedy [R]: for each trajectory the reward of the greedy rollout of the same prompt. Unbiased: the greedy answer
    does not depend on the sample. ReMax (https://arxiv.org/abs/2310.10505) uses the same rule for language models, with
    one sample and one greedy answer per prompt: `remax` is this function.
    """
    return rewards - greedy


remax = scst


def batch(rewards: Tensor, group: Tensor, *, norm_std: bool = False, eps: float = 1e-6) -> Tensor:
    """A = R - mean(R) over the batch of B trajectories, regardless of groups and including the trajectory itself;
    divided by (std(R) + eps) if `norm_std`.

    The expected gradient is (1 - 1/B) times the true one; a batch of one has no gradient. With the deviation it is
    plain REINFORCE++ (see `reinforce_pp`), for one sample per prompt.
    """
    return _standardised(rewards, torch.zeros_like(group), norm_std=norm_std, eps=eps)


def group(rewards: Tensor, group: Tensor, *, norm_std: bool = False, eps: float = 1e-6) -> Tensor:
    """A = R - mean_group(R), divided by (std_group(R) + eps) if `norm_std`.

    Without the deviation: Dr. GRPO (https://arxiv.org/abs/2503.20783), (1 - 1/k) times the true gradient in expectation
    for group size k. With it: GRPO (https://arxiv.org/abs/2402.03300); the deviation is the sample deviation, sqrt(sum
    (R - mean)^2 / (k - 1)), as in TRL. A group of one, or of equal rewards, gets exactly 0.
    """
    return _standardised(rewards, group, norm_std=norm_std, eps=eps)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = R_i - (1/(k-1)) sum_{j != i} R_j = k/(k-1) (R_i - mean): RLOO (https://arxiv.org/abs/2402.14740).

    Unbiased. A group of one gets 0.
    """
    centred, index, size = _centred(rewards, group)
    return centred * (size / (size - 1).clamp(min=1))[index]


def reinforce_pp(rewards: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A = (R - mean_group(R)) / (std + eps), with the deviation of the whole batch: REINFORCE++-baseline
    (https://arxiv.org/abs/2501.03262).

    The group's mean removes the difficulty of the prompt, the batch's deviation only the scale: a group with little
    variation keeps its small advantages, which GRPO's group deviation would amplify. Centred groups are not centred
    again, so a group of one or of equal rewards stays at exactly 0. The (sample) deviation depends on the sample: the
    expected gradient is (1 - 1/k) grad J over a constant only for large batches.

    Every trajectory counts once in the deviation. To count every token once, as implementations that whiten per token
    do, call `group` and then `whiten`. Plain REINFORCE++, for one sample per prompt, has no groups: R minus the KL
    penalty, whitened over the batch: `batch(..., norm_std=True)`.
    """
    centred = _centred(rewards, group)[0]
    return centred / (_deviation(centred) + eps)


def opo(rewards: Tensor, group: Tensor, *, lengths: Tensor) -> Tensor:
    """A_i = R_i - sum_j l_j R_j / sum_j l_j over the group, with l the number of tokens [R]: OPO
    (https://arxiv.org/abs/2505.23585).

    Among all constant baselines, E[|grad log pi|^2 R] / E[|grad log pi|^2] gives the smallest variance; if the squared
    gradient of an answer is proportional to its length, that is the length-weighted mean. The baseline includes the
    sample's own reward, with a weight that depends on its length: the expected gradient is

        E[(1/L) sum_{j != i} l_j (R_i - R_j) grad log pi(y_i)],   L = sum_j l_j,

    which is (1 - 1/k) grad J for equal lengths (as in `group`) and biased otherwise. A group of one, or of equal
    rewards, gets exactly 0.
    """
    return _centred(rewards, group, lengths.to(rewards.dtype))[0]


def whiten(advantage: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(A - mean) / (std + eps) over the masked entries, 0 elsewhere; any shape, equal to that of the mask.

    Computed over all entries at once, not per trajectory, which would remove the difference between good and bad
    trajectories. Uses the sample deviation; equal entries, or a single one, give exactly 0.
    """
    chosen = _centred(advantage[mask], advantage.new_zeros(int(mask.sum()), dtype=torch.int64))[0]
    return torch.zeros_like(advantage).masked_scatter(mask, chosen / (_deviation(chosen) + eps))


def zero_variance_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """The number of groups with all rewards equal, which have no gradient: int64, 0-d. Includes groups of one."""
    ids, index = torch.unique(group, return_inverse=True)
    low, high = (_extreme_by(rewards, index, len(ids), how) for how in ("amin", "amax"))
    return (low == high).sum()


def _standardised(rewards: Tensor, group: Tensor, *, norm_std: bool, eps: float) -> Tensor:
    centred, index, size = _centred(rewards, group)
    if not norm_std:
        return centred
    # Squares in float64: in float32, rewards beyond 1e19 would give infinite squares and advantages of 0.
    std = (_sum_by(centred.double().square(), index, len(size)) / (size - 1).clamp(min=1)).sqrt().to(centred)
    return centred / (std[index] + eps)


def _deviation(centred: Tensor) -> Tensor:
    """The sample deviation of values with mean 0, 0-d; squares in float64, as above."""
    return (centred.double().square().sum() / max(centred.numel() - 1, 1)).sqrt().to(centred)


def _centred(rewards: Tensor, group: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(R minus its group's weighted mean, the group index 0..G-1 of each trajectory, the weight of each group [G]).

    Default weights are 1. The mean of a group with weight 0 is its smallest reward.
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
