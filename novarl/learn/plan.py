"""Which rank computes which trajectory, in which micro-batch: a function of lengths, so a resumed run repeats it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from novarl.core.types import Batch
from novarl.data.pack import microbatches, partition, select
from novarl.distributed.ranks import Ranks
from novarl.models.prefix import common_beginnings, groups_of


def trajectory_of_tokens(batch: Batch) -> Tensor:
    """The trajectory each token belongs to: [N] int64."""
    return torch.repeat_interleave(batch.traj, batch.cu_seqlens.diff())


def per_trajectory(batch: Batch, per_token: Tensor) -> Tensor:
    """The sum over each trajectory's trained tokens, of all its sequences: [N] -> [R]; 0 where none is trained.

    What stands outside the mask is not read. Differentiable in `per_token`, and of its dtype.
    """
    chosen = torch.where(batch.mask, per_token, 0.0)
    return chosen.new_zeros(batch.reward.numel()).index_add(0, trajectory_of_tokens(batch), chosen)


def plan(batch: Batch, ranks: Ranks, budget: int, *, apart: Tensor | None = None) -> list[list[int]]:
    """This rank's micro-batches, as lists of trajectories of at most `budget` tokens each.

    What counts are the tokens that are computed: neighbours that begin alike stay together, and what they share counts
    once (`models.prefix`), unless together they exceed the budget or one rank's part of the work. Trajectories without
    a trained token (baselines, failed ones) cost nothing and are left out. Those of `apart` [R] bool come last, in
    micro-batches of their own.
    """
    chosen = torch.zeros(batch.reward.numel(), dtype=torch.bool)
    chosen[trajectory_of_tokens(batch)[batch.mask]] = True
    if apart is None:
        return _plan(batch, chosen, ranks, budget)
    return _plan(batch, chosen & ~apart, ranks, budget) + _plan(batch, chosen & apart, ranks, budget)


def _plan(batch: Batch, chosen: Tensor, ranks: Ranks, budget: int) -> list[list[int]]:
    wanted = chosen.nonzero().flatten().tolist()
    if not wanted:
        return []
    part = batch if len(wanted) == chosen.numel() else select(batch, wanted)[0]
    units = _units(part, ranks.size, budget)
    sizes = [size for _, size in units]
    mine = partition(sizes, ranks.size)[ranks.rank]
    return [
        sorted(wanted[trajectory] for unit in micro for trajectory in units[mine[unit]][0])
        for micro in microbatches([sizes[unit] for unit in mine], budget)
    ]


def _units(batch: Batch, ranks: int, budget: int) -> list[tuple[list[int], int]]:
    """What stays together: runs of trajectories, and how many tokens each computes."""
    lengths: list[int] = batch.cu_seqlens.diff().tolist()
    common = common_beginnings(batch.tokens, batch.position_ids, lengths)
    ranges = groups_of(common, lengths)
    group = [number for number, members in enumerate(ranges) for _ in members]
    shared = [min(common[members[0] : members[-1]], default=0) for members in ranges]
    sequences: dict[int, list[int]] = {}
    for sequence, trajectory in enumerate(batch.traj.tolist()):
        sequences.setdefault(trajectory, []).append(sequence)
    total = sum(lengths) - sum((len(members) - 1) * size for members, size in zip(ranges, shared, strict=True))
    most = min(budget, -(-total // ranks))
    units: list[tuple[list[int], int]] = []
    open_groups: set[int] = set()
    for trajectory, mine in sequences.items():
        begun = group[mine[0]] in open_groups
        more = _cost(mine, lengths, group, shared, set(open_groups) if begun else set())
        if begun and units[-1][1] + more <= most:
            units[-1] = ([*units[-1][0], trajectory], units[-1][1] + more)
            open_groups.update(group[sequence] for sequence in mine)
        else:
            units.append(([trajectory], _cost(mine, lengths, group, shared, set())))
            open_groups = {group[sequence] for sequence in mine}
    return units


def _cost(mine: list[int], lengths: list[int], group: list[int], shared: list[int], known: set[int]) -> int:
    """The tokens that sequences compute beside what is `known`, the beginnings of groups; adds theirs to it."""
    cost = 0
    for sequence in mine:
        cost += lengths[sequence] - (shared[group[sequence]] if group[sequence] in known else 0)
        known.add(group[sequence])
    return cost


def piece(batch: Batch, trajectories: list[int], device: torch.device) -> tuple[Batch, Tensor]:
    """The sub-batch of `trajectories` on `device`, and the flat positions of its tokens in the whole batch."""
    part, index = select(batch, trajectories)
    columns = {field.name: getattr(part, field.name) for field in fields(part)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in columns.items() if isinstance(value, Tensor)}
    return replace(part, **moved), index
