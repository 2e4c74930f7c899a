"""Aggregation of per-token losses: sums and denominators.

Aggregation is a weight per token, so that loss = (per_token * weight).sum(). The weights are computed once for the
whole minibatch over all ranks, before the first backward pass, and then sliced. Micro-batches have no denominators of
their own, so neither their sizes nor the number of ranks change the gradient.
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

    "constant" with 1 is the mean over trajectories of the *sum* over their tokens: the exact gradient of the expected
    reward. With max_tokens it is that gradient divided by max_tokens; tokens of short trajectories do not weigh more.
    "sequence" gives every trajectory the same weight, so tokens of short ones count more; "token" gives every token the
    same weight, so the scale depends on the mean length of the batch. Both are biased if length depends on the answer;
    `make certificates` gives the bias in closed form.

    mask [N] bool; traj_of_token [N] int64, any ids: a trajectory of several sequences has one id. `trajectories` is the
    number of trained trajectories, including those without masked tokens. Raises ValueError for an unknown `how` or a
    constant that is not positive.
    """
    if not constant > 0:
        raise ValueError(f"constant must be positive, got {constant}")
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
    """(sum of the masked values of each sequence [S], the index 0..S-1 of each element's sequence).

    values, mask [N] or [S, T]; sequence: int64 ids of the shape of values; sums are in ascending order of ids,
    including sequences without masked tokens. None means that the rows of [S, T] are the sequences. The index has the
    shape of values, so sums[index] is the sum of each element's sequence. Differentiable in the masked values; others
    may be arbitrary. Raises ValueError for [N] without ids.
    """
    if sequence is not None:
        ids, index = torch.unique(sequence, return_inverse=True)
        count = len(ids)
    elif values.ndim == 2:
        count = len(values)
        index = torch.arange(count, device=values.device)[:, None].expand(values.shape)
    else:
        raise ValueError(f"pass `sequence` ids for values of shape {list(values.shape)}")
    chosen = torch.where(mask, values, 0.0)
    return values.new_zeros(count).index_add(0, index.flatten(), chosen.flatten()), index
