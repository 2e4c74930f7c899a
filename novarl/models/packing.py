"""How the sequences packed on one axis are attended to: a plan made once for a forward pass, used by every layer.

What neighbours share is attended to once (`prefix.Group`), what is alike in one call, and where a call costs more than
what it saves, several go together: `packing_of` weighs the two.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from novarl.models.prefix import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Kernel = Literal["sdpa", "flash", "eager"]
"""What computes packed attention: PyTorch's, flash-attn's for ragged sequences, or a softmax anyone can read."""

CALL = 4096
"""What one more call of attention costs, in pairs of a query and a key (measured on the CPU: 0.15 ms, 40 ns a pair)."""

SHORT = 64
"""Neighbouring sequences of at most so many tokens are attended to in one call, each with what it shares with others:
computing that again is cheaper than a call for each group."""

CUT = 256
"""Queries that go through PyTorch's CPU kernel together. It computes what a mask hides, and under its causal rule whole
blocks of 512 keys; with fewer queries at a time, each piece over the keys up to its end, less of it is hidden."""


@dataclass(frozen=True, slots=True)
class Alone:
    """Neighbours that share nothing: their lengths, and how many tokens at the start of each nobody reads."""

    lengths: tuple[int, ...]
    unread: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Shared:
    """How a group is computed: `prefix` tokens causally, of which nobody reads the first `unread`, then the calls.

    A call attends to rests that are padded on the right to the longest of them: [G, L] says where their tokens lie
    among the group's `rests` tokens (anywhere, for padding). `order` [rests] puts what all calls give in order again.
    """

    prefix: int
    rests: int
    calls: tuple[Tensor, ...]
    order: Tensor
    unread: int

    @property
    def tokens(self) -> int:
        return self.prefix + self.rests


@dataclass(frozen=True, slots=True)
class Brief:
    """Neighbouring groups of short sequences: `rows` [S, L] is where the tokens of each sequence lie among the step's
    `tokens` (anywhere, for padding on its right); `order` [tokens] finds each of those among the S x L computed, a
    shared one in the first sequence that has it."""

    tokens: int
    rows: Tensor
    order: Tensor


class Ragged(NamedTuple):
    """The same for a kernel that takes ragged sequences: queries as they lie, keys gathered by `keys`, and where each
    piece begins and ends, int32 [pieces + 1]; queries stand at the end of their keys."""

    keys: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences packed on one axis of `tokens` tokens; groups of them share a prefix, which is there once.

    `steps` are, in order: neighbours that share nothing, a group that shares, or groups of short sequences. Made once
    for a forward pass (`packing_of`), used by every layer.
    """

    steps: tuple[Alone | Shared | Brief, ...]
    sizes: tuple[int, ...]
    kernel: Kernel = "sdpa"
    ragged: Ragged | None = None

    @property
    def tokens(self) -> int:
        return sum(self.sizes)


def packing_of(
    groups: Sequence[Group], device: torch.device, kernel: Kernel = "sdpa", *, read: Tensor | None = None
) -> Packing:
    """The attention of `groups` on their axis of unique tokens: for each its prefix, then its rests. `read` (int64,
    rising) are the places on it whose last hidden states anyone looks at; None: all of them."""
    if kernel == "flash":
        return Packing((), tuple(group.tokens for group in groups), kernel, _ragged(groups, device))
    steps: list[Alone | Shared | Brief] = []
    unread = iter(_unread(groups, read))
    for kind, run in groupby(groups, key=_kind):
        members = list(run)
        skipped = tuple(islice(unread, len(members)))
        lengths = tuple(group.prefix for group in members)
        alone = not any(group.rests for group in members)
        if kind is Brief and len(members) > 1 and not (alone and len(set(lengths)) == 1):
            steps.append(_brief(members, device))
        elif alone:
            steps.append(Alone(lengths, skipped))
        else:
            steps += [_shared(group, skip, device) for group, skip in zip(members, skipped, strict=True)]
    return Packing(tuple(steps), tuple(step.tokens for step in steps), kernel)


def _unread(groups: Sequence[Group], read: Tensor | None) -> list[int]:
    """How many tokens at the start of each group's prefix nobody reads."""
    if read is None:
        return [0] * len(groups)
    places: list[int] = read.tolist()
    begins = accumulate((group.tokens for group in groups), initial=0)
    found = []
    for begin, group in zip(begins, groups, strict=False):
        next_read = bisect_left(places, begin)
        until = places[next_read] if next_read < len(places) else begin + group.prefix
        found.append(min(until - begin, group.prefix))
    return found


def cuts(length: int, device: torch.device, *, causal: bool) -> list[int]:
    """Where to cut `length` queries, from 0 to `length`: not where it does not pay, as for long causal ones, of which
    the kernel leaves out much by itself."""
    if device.type != "cpu" or (causal and length > 3 * CUT):
        return [0, length]
    return [*range(0, length - CUT // 3, CUT), length] if length > CUT else [0, length]


def past(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: what queries at the end of their keys may see."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _shared(group: Group, unread: int, device: torch.device) -> Shared:
    """The calls that compute `group`."""
    prefix, rests = group
    begins = torch.tensor([0, *rests]).cumsum(0)
    calls: list[Tensor] = []
    order = torch.empty(sum(rests), dtype=torch.int64)
    done = 0
    for members in _calls(prefix, rests, device):
        length = rests[members[-1]]
        within = torch.arange(length)
        rows = begins[members, None] + within
        real = within < torch.tensor([[rests[member]] for member in members])
        order[rows[real]] = done + real.flatten().nonzero().flatten()
        done += real.numel()
        calls.append(rows.where(real, 0).to(device))
    return Shared(prefix, sum(rests), tuple(calls), order.to(device), unread)


def _kind(group: Group) -> type[Alone | Shared | Brief]:
    if group.prefix + max(group.rests, default=0) <= SHORT:
        return Brief
    return Shared if group.rests else Alone


def _brief(groups: Sequence[Group], device: torch.device) -> Brief:
    """The one call that computes `groups`."""
    rows: list[list[int]] = []
    order: list[tuple[int, int]] = []
    begin = 0
    for prefix, rests in groups:
        order += ((len(rows), place) for place in range(prefix))
        at = begin + prefix
        for rest in rests or (0,):
            order += ((len(rows), prefix + place) for place in range(rest))
            rows.append([*range(begin, begin + prefix), *range(at, at + rest)])
            at += rest
        begin = at
    width = max(map(len, rows))
    padded = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    found = torch.tensor([row * width + place for row, place in order])
    return Brief(begin, padded.to(device), found.to(device))


def _calls(prefix: int, rests: Sequence[int], device: torch.device) -> list[list[int]]:
    """Which rests are computed together, each list from its shortest to its longest: the cut of the sorted rests with
    the least of pairs, padding included, and `CALL` for every call. Empty rests are left out."""
    order = sorted((index for index, rest in enumerate(rests) if rest > 0), key=lambda index: rests[index])
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(order) + 1):
        pieces = cuts(rests[order[end - 1]], device, causal=False)
        pairs = sum((stop - start) * (prefix + stop) for start, stop in pairwise(pieces))
        call = CALL * (len(pieces) - 1)
        best.append(min((best[begin][0] + (end - begin) * pairs + call, begin) for begin in range(end)))
    found: list[list[int]] = []
    end = len(order)
    while end > 0:
        begin = best[end][1]
        found.append(order[begin:end])
        end = begin
    return found[::-1]


def _ragged(groups: Sequence[Group], device: torch.device) -> Ragged:
    """The pieces of `groups`: each prefix over itself, each rest over its prefix and itself."""
    keys: list[int] = []
    queries, seen, begin = [0], [0], 0
    for prefix, rests in groups:
        here = begin
        for rest in (prefix, *rests):
            if rest:
                first = here == begin
                keys += [*(() if first else range(begin, begin + prefix)), *range(here, here + rest)]
                queries.append(queries[-1] + rest)
                seen.append(len(keys))
                here += rest
        begin = here
    query_bounds, key_bounds = (torch.tensor(bounds, dtype=torch.int32) for bounds in (queries, seen))
    longest = [int(bounds.diff().max()) for bounds in (query_bounds, key_bounds)]
    index = torch.tensor(keys, dtype=torch.int64)
    return Ragged(index.to(device), query_bounds.to(device), key_bounds.to(device), longest[0], longest[1])
