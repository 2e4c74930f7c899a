"""Aggregation: what the per-token losses are summed over, and by what the sum is divided.

The answer is a weight per token, so that loss = (per_token * weight).sum(). It is computed once, on the whole minibatch
over all ranks, before the first backward pass, and then sliced: no micro-batch has a denominator of its own, so neither
their sizes nor the number of ranks can change the gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]


def weights(
    mask: Tensor,
    traj_of_token: Tensor,
    *,
    how: str,
    trajectories: int,
    constant: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight of each token [N], 0 outside the mask.

        how          divides by                                                used by
        "token"      the masked tokens of the whole minibatch                  DAPO, SFT
        "sequence"   trajectories x the masked tokens of its own trajectory    GRPO
        "constant"   trajectories x constant                                   REINFORCE, RLOO: 1; Dr. GRPO: max_tokens

    "constant" with 1 is the mean over trajectories of the *sum* over their tokens: the gradient of expected reward as
    it is; with max_tokens it is that gradient over max_tokens, and no trajectory's tokens weigh more because it is
    short. "sequence" gives every trajectory the same weight, so the tokens of short ones count more; "token" gives
    every token the same, so its scale follows the batch's mean length. Both are biased where length depends on the
    answer; `make certificates` gives the bias in closed form.

    mask [N] bool; traj_of_token [N] int64, any ids: a trajectory of several sequences is one trajectory;
    `trajectories` counts those that are trained on, also the ones of which no token is masked in. ValueError for an
    unknown `how` or a constant that is not positive.
    """
    if not constant > 0:
        raise ValueError(f"the constant to divide by must be positive, got {constant}")
    chosen = mask.to(dtype)
    if how == "token":
        return chosen / chosen.sum().clamp(min=1)
    if how == "constant":
        return chosen / (max(trajectories, 1) * constant)
    if how == "sequence":
        length, index = per_sequence(chosen, mask, traj_of_token)
        return chosen / (max(trajectories, 1) * length.clamp(min=1))[index]
    raise ValueError(f"unknown aggregation {how!r}; one of token, sequence, constant")


def per_sequence(values: Tensor, mask: Tensor, sequence: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum of the masked values of each sequence [S], the place 0..S-1 of each element's sequence among them).

    values, mask [N] or [S, T]; sequence: int64 ids like values, any ids, sums in ascending order of them, also of those
    of which nothing is masked in; None means that the rows of [S, T] are the sequences. The index has the shape of
    values, so that sums[index] tells each element about its sequence. Differentiable in the masked values; the rest may
    hold anything. ValueError for [N] without ids.
    """
    if sequence is not None:
        ids, index = torch.unique(sequence, return_inverse=True)
        count = len(ids)
    elif values.ndim == 2:
        count = len(values)
        index = torch.arange(count, device=values.device)[:, None].expand(values.shape)
    else:
        raise ValueError(f"which tokens form a sequence? pass `sequence` ids for values of shape {list(values.shape)}")
    chosen = torch.where(mask, values, 0.0)
    return values.new_zeros(count).index_add(0, index.flatten(), chosen.flatten()), index
