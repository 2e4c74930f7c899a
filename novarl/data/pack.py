"""Pack scored rollouts into one flat token axis, and split it into minibatches, ranks and micro-batches.

The splits are pure functions of lengths, group ids and a seed. They do not change the gradient, because denominators
are fixed beforehand over the whole batch.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from novarl.algos.support import Support, support_of
from novarl.core.seeds import derive
from novarl.core.types import Batch, Prompt, Rollout, Scored, Sequence


def pack(scored: Seq[Scored], *, dtype: torch.dtype = torch.float32) -> Batch:
    """Trajectory r of the batch is `scored[r]`, with its sequences in order; `dtype` is that of the float columns. A
    baseline's mask is False everywhere. `rewards`, whose names are in order of appearance, are NaN where a rollout
    lacks one. ValueError for a failed rollout."""
    for one in scored:
        if one.reward is None or one.rollout.status == "failed":
            raise ValueError(f"a failed rollout of prompt {one.rollout.prompt.id} cannot be packed")
    owned = [(owner, sequence) for owner, one in enumerate(scored) for sequence in one.rollout.sequences]
    sequences = [sequence for _, sequence in owned]
    for owner, sequence in owned:
        if not sequence.tokens or sequence.mask[0]:
            problem = "its first token, which nothing predicts, is masked" if sequence.tokens else "it is empty"
            raise ValueError(f"a sequence of trajectory {owner} cannot be packed: {problem}")
    names = tuple(dict.fromkeys(chain.from_iterable(one.rewards for one in scored)))
    rewards = [[one.rewards.get(name, float("nan")) for name in names] for one in scored]
    lengths = torch.tensor([len(sequence.tokens) for sequence in sequences], dtype=torch.int64)
    cu_seqlens = _cumulative(lengths)
    flat = torch.arange(int(cu_seqlens[-1]))
    position_ids = flat - torch.repeat_interleave(cu_seqlens[:-1], lengths)
    traj = torch.tensor([owner for owner, _ in owned], dtype=torch.int64)
    baseline = torch.tensor([one.rollout.role == "baseline" for one in scored], dtype=torch.bool)
    mask = _column([sequence.mask for sequence in sequences], torch.bool)
    mask = mask & ~torch.repeat_interleave(baseline[traj], lengths)
    behavior_logp = _column([sequence.behavior_logp for sequence in sequences], dtype)
    support, cu_support = _supports(sequences)
    return Batch(
        tokens=_column([sequence.tokens for sequence in sequences], torch.int64),
        position_ids=position_ids,
        prev=torch.where(position_ids == 0, -1, flat - 1),
        cu_seqlens=cu_seqlens,
        mask=mask,
        behavior_logp=torch.where(mask, behavior_logp, torch.zeros((), dtype=dtype)),
        version=_column([sequence.versions for sequence in sequences], torch.int64),
        traj=traj,
        group=torch.tensor([one.rollout.group for one in scored], dtype=torch.int64),
        reward=torch.tensor([one.reward for one in scored], dtype=dtype),
        rewards=torch.tensor(rewards, dtype=dtype).reshape(len(scored), len(names)),
        reward_names=names,
        truncated=torch.tensor([one.rollout.status == "truncated" for one in scored], dtype=torch.bool),
        baseline=baseline,
        support=support,
        cu_support=cu_support,
    )


def pack_sequences(sequences: Seq[Sequence], *, dtype: torch.dtype = torch.float32) -> Batch:
    """Pack training sequences (SFT): each is its own trajectory and group, with reward 0."""
    nothing = Prompt("", (), ())
    rollouts = [Rollout(nothing, group, 0, (sequence,), (), "") for group, sequence in enumerate(sequences)]
    return pack([Scored(rollout, {}, 0.0) for rollout in rollouts], dtype=dtype)


def _supports(sequences: Seq[Sequence]) -> tuple[Tensor | None, Tensor | None]:
    """The concatenated supports of all tokens and their offsets; None if no sequence has any."""
    if all(sequence.support is None for sequence in sequences):
        return None, None
    held = [words for one in sequences for words in one.support or (b"",) * len(one.tokens)]
    words = np.frombuffer(b"".join(held), "<i4").astype(np.int32)
    lengths = torch.tensor([len(one) // words.itemsize for one in held], dtype=torch.int64)
    return torch.from_numpy(words), _cumulative(lengths)


def _column(values: Seq[Seq[int] | Seq[float] | Seq[bool]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(chain.from_iterable(values)), dtype=dtype)


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def select(batch: Batch, trajectories: Seq[int]) -> tuple[Batch, Tensor]:
    """The sub-batch of `trajectories`, in that order, and `token_index` [n] int64, where `part.tokens ==
    batch.tokens[token_index]`: it slices any per-token tensor of the batch."""
    device = batch.tokens.device
    wanted = torch.tensor(list(trajectories), dtype=torch.int64, device=device)
    # [r, S]: True where sequence s belongs to the r-th selected trajectory.
    traj, chosen = (wanted[:, None] == batch.traj[None, :]).nonzero(as_tuple=True)
    begin, length = batch.cu_seqlens[:-1][chosen], batch.cu_seqlens.diff()[chosen]
    cu_seqlens = _cumulative(length)
    shift = torch.repeat_interleave(begin - cu_seqlens[:-1], length)
    token_index = torch.arange(shift.numel(), device=device) + shift
    prev = batch.prev[token_index]
    support = cu_support = None
    if batch.support is not None and batch.cu_support is not None:
        support, cu_support = support_of(Support(batch.support, batch.cu_support), token_index)
    of_token = ("tokens", "position_ids", "mask", "behavior_logp", "version")
    of_trajectory = ("group", "reward", "rewards", "truncated", "baseline")
    part = replace(
        batch,
        **{name: getattr(batch, name)[token_index] for name in of_token},
        **{name: getattr(batch, name)[wanted] for name in of_trajectory},
        prev=torch.where(prev < 0, prev, prev - shift),
        cu_seqlens=cu_seqlens,
        traj=traj,
        support=support,
        cu_support=cu_support,
    )
    return part, token_index


def padded(values: Tensor, cu_seqlens: Tensor, fill: float) -> Tensor:
    """A per-token tensor [N, ...] as [S, T, ...], T the longest sequence, right-padded with `fill`. Differentiable."""
    lengths = cu_seqlens.diff()
    count, longest = lengths.numel(), int(lengths.max()) if lengths.numel() else 0
    inside = torch.arange(longest, device=values.device)[None, :] < lengths[:, None]
    view = values.new_full((count, longest, *values.shape[1:]), fill)
    view[inside] = values
    return view


def partition(lengths: Seq[int], parts: int) -> list[list[int]]:
    """Split items over `parts` ranks with a small maximum sum: longest first, each to the lightest part, which is at
    most 4/3 of the optimum (Graham, 1969). Ties go to the lower index; parts are ascending and may be empty. ValueError
    if `parts` is below 1."""
    if parts < 1:
        raise ValueError(f"cannot split over {parts} parts")
    assigned: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        weight, part = lightest[0]
        assigned[part].append(index)
        heapq.heapreplace(lightest, (weight + lengths[index], part))
    return [sorted(part) for part in assigned]


def microbatches(lengths: Seq[int], budget: int) -> list[list[int]]:
    """Split items into few micro-batches of similar size, of at most `budget` tokens (unless one item exceeds it), each
    ascending. The largest comes first, so that its memory is reused and a lack of memory shows at once. ValueError if
    `budget` is below 1."""
    if budget < 1:
        raise ValueError(f"a micro-batch needs a token budget of at least 1, not {budget}")
    alone = [[index] for index, length in enumerate(lengths) if length > budget]
    fitting = [index for index, length in enumerate(lengths) if length <= budget]
    sizes = [lengths[index] for index in fitting]
    # No two items above half the budget can share a micro-batch, and together they must hold all tokens.
    count = max(-(-sum(sizes) // budget), sum(2 * size > budget for size in sizes), 1)
    split = partition(sizes, count)
    while any(sum(sizes[i] for i in part) > budget for part in split):
        count += 1
        split = partition(sizes, count)
    parts = alone + [[fitting[i] for i in part] for part in split if part]
    return sorted(parts, key=lambda part: (-sum(lengths[i] for i in part), part))


def padded_microbatches(shapes: Seq[tuple[int, int]], budget: int) -> list[list[int]]:
    """Split items, each (number of rows, longest row), into micro-batches of at most `budget` tokens after padding to
    the longest row (unless one item exceeds it), largest first, as `microbatches`. Items of similar length are grouped:
    none shares a micro-batch with one of more than twice its length."""
    if budget < 1:
        raise ValueError(f"a micro-batch needs a token budget of at least 1, not {budget}")
    parts: list[list[int]] = []
    sizes: list[tuple[int, int]] = []
    for index in sorted(range(len(shapes)), key=lambda index: (-shapes[index][1], index)):
        rows, longest = shapes[index]
        if parts and (sizes[-1][0] + rows) * sizes[-1][1] <= budget and 2 * longest >= sizes[-1][1]:
            parts[-1].append(index)
            sizes[-1] = (sizes[-1][0] + rows, sizes[-1][1])
        else:
            parts.append([index])
            sizes.append((rows, longest))
    order = sorted(range(len(parts)), key=lambda part: (-sizes[part][0] * sizes[part][1], parts[part]))
    return [sorted(parts[part]) for part in order]


def minibatches(groups: Seq[int], k: int, seed: int) -> list[list[int]]:
    """Split trajectories, given by their group ids, randomly into `k` ascending minibatches of similar size, one per
    update. Groups are split only if there are fewer of them than minibatches; there are fewer than `k` only with fewer
    trajectories. ValueError if `k` is below 1."""
    if k < 1:
        raise ValueError(f"cannot split into {k} minibatches")
    if not groups:
        return []
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    units = list(members.values()) if len(members) >= k else [[index] for index in range(len(groups))]
    random.Random(derive(seed, "minibatches")).shuffle(units)
    split = partition([len(unit) for unit in units], k)
    return [sorted(chain.from_iterable(units[i] for i in part)) for part in split if part]
