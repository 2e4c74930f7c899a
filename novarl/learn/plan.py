"""Assign trajectories to ranks and micro-batches, as a function of lengths, so that a resumed run repeats it."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from novarl.core.types import Batch
from novarl.data.pack import microbatches, padded_microbatches, partition, select
from novarl.distributed.ranks import Ranks
from novarl.kernels.prefix import Group, find_groups, unique_places


def trajectory_of_tokens(batch: Batch) -> Tensor:
    """The trajectory each token belongs to: [N] int64."""
    return torch.repeat_interleave(batch.traj, batch.cu_seqlens.diff())


def per_trajectory(batch: Batch, per_token: Tensor) -> Tensor:
    """The sum over each trajectory's trained tokens, over all its sequences: [N] -> [R]; 0 without trained tokens.

    Values outside the mask are not read. Differentiable in `per_token`, with its dtype.
    """
    chosen = torch.where(batch.mask, per_token, 0.0)
    return chosen.new_zeros(batch.reward.numel()).index_add(0, trajectory_of_tokens(batch), chosen)


FEW = 256
"""Below this number of computed tokens, separate micro-batches do not pay off."""

AT_ONCE = 64
"""The number of trajectories counted at once to determine whether there are FEW tokens."""


def plan(
    batch: Batch, ranks: Ranks, budget: int, *, apart: Tensor | None = None, shares: bool = True
) -> list[list[int]]:
    """This rank's micro-batches, as lists of trajectories, each with at most about `budget` tokens.

    The budget counts computed tokens: neighbouring sequences with a shared prefix stay together, and the prefix counts
    once (`kernels.prefix`), unless together they exceed the budget or one rank's part of the work. Trajectories without
    trained tokens are omitted. Those of `apart` [R] bool come last, in separate micro-batches, unless they compute
    fewer than FEW tokens. Without `shares` every token counts, including padding to the longest sequence.
    """
    chosen = torch.zeros(batch.reward.numel(), dtype=torch.bool)
    chosen[trajectory_of_tokens(batch)[batch.mask]] = True
    parts = [chosen]
    if apart is not None and _is_much(batch, chosen & apart, shares):
        parts = [chosen & ~apart, chosen & apart]
    return [micro for part in parts for micro in _plan(batch, part, ranks, budget, shares)]


def _is_much(batch: Batch, chosen: Tensor, shares: bool) -> bool:
    """Whether trajectories compute at least FEW tokens; checked a few at a time, which is usually enough."""
    computed = 0
    for some in chosen.nonzero().flatten().split(AT_ONCE):
        part, _ = select(batch, some.tolist())
        computed += _computed(part, shares)
        if computed >= FEW:
            return True
    return False


def _computed(batch: Batch, shares: bool) -> int:
    """The number of tokens that a forward pass over the batch computes."""
    return sum(group.tokens for group in _groups(batch, shares))


def _groups(batch: Batch, shares: bool, *, join: bool = True) -> list[Group]:
    lengths = batch.cu_seqlens.diff().tolist()
    if not shares:
        return [Group(length) for length in lengths]
    return find_groups(batch.tokens, batch.position_ids, lengths, join=join)


def _plan(batch: Batch, chosen: Tensor, ranks: Ranks, budget: int, shares: bool) -> list[list[int]]:
    wanted = chosen.nonzero().flatten().tolist()
    if not wanted:
        return []
    part = batch if len(wanted) == chosen.numel() else select(batch, wanted)[0]
    if not shares:
        return [[wanted[trajectory] for trajectory in micro] for micro in _padded(part, ranks, budget)]
    if ranks.size == 1 and (part.tokens.numel() <= budget or _computed(part, True) <= budget):
        return [wanted]
    units = _units(part, ranks.size, budget)
    sizes = [size for _, size in units]
    mine = partition(sizes, ranks.size)[ranks.rank]
    return [
        sorted(wanted[trajectory] for unit in micro for trajectory in units[mine[unit]][0])
        for micro in microbatches([sizes[unit] for unit in mine], budget)
    ]


def _padded(batch: Batch, ranks: Ranks, budget: int) -> list[list[int]]:
    """This rank's micro-batches if sequences are padded to the longest."""
    shapes = [(0, 0)] * batch.reward.numel()
    for trajectory, length in zip(batch.traj.tolist(), batch.cu_seqlens.diff().tolist(), strict=True):
        rows, longest = shapes[trajectory]
        shapes[trajectory] = (rows + 1, max(longest, length))
    mine = partition([rows * longest for rows, longest in shapes], ranks.size)[ranks.rank]
    cut = padded_microbatches([shapes[trajectory] for trajectory in mine], budget)
    return [[mine[place] for place in micro] for micro in cut]


def _units(batch: Batch, ranks: int, budget: int) -> list[tuple[list[int], int]]:
    """Units that stay together: ranges of trajectories and their numbers of computed tokens. Groups of one template are
    not kept together, because large units prevent an even split over ranks."""
    groups = _groups(batch, True, join=False)
    group = [number for number, found in enumerate(groups) for _ in range(found.members)]
    kept, spread = (index.tolist() for index in unique_places(groups, torch.device("cpu")))
    places = [spread[begin:end] for begin, end in pairwise(batch.cu_seqlens.tolist())]
    sequences: dict[int, list[int]] = {}
    for sequence, trajectory in enumerate(batch.traj.tolist()):
        sequences.setdefault(trajectory, []).append(sequence)
    most = min(budget, -(-len(kept) // ranks))
    units: list[tuple[list[int], int]] = []
    open_groups: set[int] = set()
    known: set[int] = set()
    for trajectory, mine in sequences.items():
        computed = set[int]().union(*(places[sequence] for sequence in mine))
        begun = group[mine[0]] in open_groups
        more = len(computed - known)
        if begun and units[-1][1] + more <= most:
            units[-1] = ([*units[-1][0], trajectory], units[-1][1] + more)
        else:
            units.append(([trajectory], len(computed)))
            open_groups, known = set(), set()
        open_groups.update(group[sequence] for sequence in mine)
        known |= computed
    return units


def piece(batch: Batch, trajectories: list[int], device: torch.device) -> tuple[Batch, Tensor]:
    """The sub-batch of `trajectories` on `device`, and the flat positions of its tokens in the whole batch."""
    part, index = select(batch, trajectories)
    columns = {field.name: getattr(part, field.name) for field in fields(part)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in columns.items() if isinstance(value, Tensor)}
    return replace(part, **moved), index
