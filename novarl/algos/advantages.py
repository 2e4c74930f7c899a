"""Advantages of whole trajectories from their rewards: how much better than a baseline each one did.

All functions are per trajectory, [R] -> [R], in the dtype of the rewards. `group` holds arbitrary int64 ids, one per
trajectory: equal ids are samples of one prompt, groups may differ in size and be interleaved. Greedy rollouts that only
serve as a baseline are no samples: leave them out first.

What a baseline does to the expected policy gradient grad J = E[R grad log pi] (proved by `make certificates`):

    none, constant, ema_baseline, scst     unbiased: the baseline does not know the sample
    leave_one_out                          unbiased
    group, batch_mean                      (1 - 1/k) grad J: the mean of k samples holds the sample's own reward
    group with norm_std                    another objective: with k = 2, the probability to beat one's own twin

Rewards are shifted by the smallest of their group before they are averaged, so that equal rewards give exactly 0,
whatever their value, and no rounding error is ever divided by a small deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor


def constant_baseline(rewards: Tensor, value: float) -> Tensor:
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
    does not depend on the sample.
    """
    return rewards - greedy


def batch_mean(rewards: Tensor) -> Tensor:
    """A = R - mean(R) over the batch of B trajectories, the trajectory's own reward included.

    The expected gradient points the right way but is (1 - 1/B) times the true one; a batch of one learns nothing.
    """
    return _centred(rewards, torch.zeros_like(rewards, dtype=torch.int64))[0]


def group(rewards: Tensor, group: Tensor, *, norm_std: bool = False, eps: float = 1e-6) -> Tensor:
    """A = R - mean_group(R), divided by (std_group(R) + eps) if `norm_std`.

    Without the deviation: Dr. GRPO (https://arxiv.org/abs/2503.20783), (1 - 1/k) times the true gradient in
    expectation, k the group's size. With it: GRPO (https://arxiv.org/abs/2402.03300); the deviation is the sample one,
    sqrt(sum (R - mean)^2 / (k - 1)), as in TRL. A group of one, or of equal rewards, gets exactly 0.
    """
    centred, index, size = _centred(rewards, group)
    if not norm_std:
        return centred
    std = (_sum_by(centred.square(), index, len(size)) / (size - 1).clamp(min=1)).sqrt()
    return centred / (std[index] + eps)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = R_i - (1/(k-1)) sum_{j != i} R_j = k/(k-1) (R_i - mean): RLOO (https://arxiv.org/abs/2402.14740).

    Unbiased. A group of one has nobody to be compared with and gets 0.
    """
    centred, index, size = _centred(rewards, group)
    return centred * (size / (size - 1).clamp(min=1))[index]


def whiten(advantage: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(A - mean) / (std + eps) over the masked entries, 0 elsewhere; any shape, the mask of the same shape.

    Over all of them at once, never per trajectory, which would erase what distinguishes good trajectories from bad
    ones. The deviation is the sample one; equal entries, a single one among them, give exactly 0.
    """
    chosen = _centred(advantage[mask], advantage.new_zeros(int(mask.sum()), dtype=torch.int64))[0]
    std = (chosen.square().sum() / max(chosen.numel() - 1, 1)).sqrt()
    return torch.zeros_like(advantage).masked_scatter(mask, chosen / (std + eps))


def zero_variance_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """How many groups have equal rewards throughout, and so no gradient: int64, 0-d. A group of one is such a group."""
    ids, index = torch.unique(group, return_inverse=True)
    low, high = (_extreme_by(rewards, index, len(ids), how) for how in ("amin", "amax"))
    return (low == high).sum()


def _centred(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(R - mean_group, each trajectory's group as an index 0..G-1, the size of each group [G])."""
    ids, index = torch.unique(group, return_inverse=True)
    size = _sum_by(torch.ones_like(rewards), index, len(ids))
    shifted = rewards - _extreme_by(rewards, index, len(ids), "amin")[index]
    return shifted - (_sum_by(shifted, index, len(ids)) / size)[index], index, size


def _sum_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add(0, index, values)


def _extreme_by(values: Tensor, index: Tensor, count: int, how: str) -> Tensor:
    return values.new_zeros(count).scatter_reduce(0, index, values, how, include_self=False)
