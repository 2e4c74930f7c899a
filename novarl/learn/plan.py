"""Which rank computes which trajectory, in which micro-batch: a function of lengths, so a resumed run repeats it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from novarl.core.types import Batch
from novarl.data.pack import microbatches, partition, select
from novarl.distributed.ranks import Ranks


def trajectory_of_tokens(batch: Batch) -> Tensor:
    """The trajectory each token belongs to: [N] int64."""
    return torch.repeat_interleave(batch.traj, batch.cu_seqlens.diff())


def plan(batch: Batch, ranks: Ranks, budget: int) -> list[list[int]]:
    """This rank's micro-batches, as lists of trajectories of at most `budget` tokens each.

    Trajectories without a trained token (baselines, failed ones) cost nothing and are left out.
    """
    owner = trajectory_of_tokens(batch)
    count = batch.reward.numel()
    lengths = torch.bincount(owner, minlength=count)
    trained = torch.bincount(owner, weights=batch.mask.double(), minlength=count) > 0
    wanted = trained.nonzero().flatten().tolist()
    sizes = lengths[wanted].tolist()
    mine = partition(sizes, ranks.size)[ranks.rank]
    return [[wanted[mine[i]] for i in micro] for micro in microbatches([sizes[i] for i in mine], budget)]


def piece(batch: Batch, trajectories: list[int], device: torch.device) -> tuple[Batch, Tensor]:
    """The sub-batch of `trajectories` on `device`, and the flat positions of its tokens in the whole batch."""
    part, index = select(batch, trajectories)
    columns = {field.name: getattr(part, field.name) for field in fields(part)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in columns.items() if isinstance(value, Tensor)}
    return replace(part, **moved), index
