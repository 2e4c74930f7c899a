"""Find the shared prefixes of neighbouring sequences, so that they are computed once.

Samples of one prompt, the two answers of a preference pair, and the turns of a rewritten conversation are packed next
to each other and begin with the same tokens: the prefix of a whole group is computed once, then the common prefixes of
some of its suffixes, down to identical answers. The hidden states are copied to every sequence that shares them, so the
gradient is that of the full sequences. All of this is a pure function of the tokens, positions and boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

TOLL = 8
"""Tokens that sharing must save per member of a group, because its attention needs a mask and a copy of the keys."""

MOST = 64
"""The maximum number of sequences in a group; larger searches do not pay off."""

SHORT = 64
"""Sequences up to this length get copies of their keys anyway (`packing`), so sharing is free: neighbouring groups,
such as different prompts from one template, are merged."""

SLIGHT = 4
"""The minimum common prefix of the last sequence of such a group and the first of the next."""


class Rest(NamedTuple):
    """The suffix of a sequence after its group's prefix: its length, and how many of its leading tokens it shares with
    the previous suffix. `member` is the index of the sequence within the group, in the order of the flat axis."""

    member: int
    length: int
    shared: int = 0


class Group(NamedTuple):
    """Neighbouring sequences: their common prefix, and their suffixes. Suffixes with common beginnings are adjacent. A
    sequence that shares nothing is its own group: `prefix` is its length, `rests` is empty."""

    prefix: int
    rests: tuple[Rest, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens to compute."""
        return self.prefix + sum(rest.length - rest.shared for rest in self.rests)

    @property
    def members(self) -> int:
        """The number of sequences."""
        return max(1, len(self.rests))

    def places(self, begin: int) -> list[list[int]]:
        """The places of each suffix's tokens on an axis of unique tokens from `begin`: the prefix, then the unshared
        parts."""
        found: list[list[int]] = []
        here, last = begin + self.prefix, list[int]()
        for rest in self.rests:
            own = rest.length - rest.shared
            last = [*last[: rest.shared], *range(here, here + own)]
            found.append(last)
            here += own
        return found

    def whole(self) -> list[bool]:
        """For each suffix, False if it is a prefix of the next one."""
        return [*(rest.length > after.shared for rest, after in pairwise(self.rests)), *(True for _ in self.rests[-1:])]


def common_beginnings(tokens: Tensor, position_ids: Tensor, lengths: Seq[int]) -> list[int]:
    """The common prefix length of each sequence and the next, with equal positions: [S - 1] numbers."""
    if len(lengths) < 2:
        return []
    sizes = torch.tensor(lengths, device=tokens.device)
    begins = sizes.cumsum(0) - sizes
    within = torch.minimum(sizes[:-1], sizes[1:])  # at most the length of the shorter one
    pair = torch.repeat_interleave(torch.arange(len(within), device=tokens.device), within)
    offset = torch.arange(len(pair), device=tokens.device) - (within.cumsum(0) - within)[pair]
    mine, theirs = begins[pair] + offset, begins[pair + 1] + offset
    differs = (tokens[mine] != tokens[theirs]) | (position_ids[mine] != position_ids[theirs])
    first = within.scatter_reduce(0, pair[differs], offset[differs], "amin")
    found: list[int] = first.tolist()
    return found


def groups_of(common: Seq[int], lengths: Seq[int]) -> list[range]:
    """A partition of the sequences into ranges that share a prefix, maximising the saved tokens: a range of k sequences
    with a common prefix of m tokens saves (k - 1) m and costs `TOLL` k."""
    # best[i]: the maximum saving of the first i sequences, and the start of their last range.
    best: list[tuple[int, int]] = [(0, 0)]
    for end in range(1, len(lengths) + 1):
        choice, shared = (best[end - 1][0], end - 1), None
        for begin in range(end - 2, max(-1, end - 1 - MOST), -1):
            shared = common[begin] if shared is None else min(shared, common[begin])
            if shared <= TOLL:
                break
            count = end - begin
            saved = best[begin][0] + (count - 1) * shared - TOLL * count
            if saved > choice[0]:
                choice = saved, begin
        best.append(choice)
    ranges: list[range] = []
    end = len(lengths)
    while end > 0:
        begin = best[end][1]
        ranges.append(range(begin, end))
        end = begin
    return ranges[::-1]


def join_short(ranges: Seq[range], common: Seq[int], lengths: Seq[int]) -> list[range]:
    """Merge neighbouring ranges whose sequences are all SHORT and have some tokens in common."""
    joined: list[range] = []
    before = False
    for members in ranges:
        short = max(lengths[members[0] : members[-1] + 1]) <= SHORT
        if short and before and common[members[0] - 1] >= SLIGHT:
            joined[-1] = range(joined[-1][0], members[-1] + 1)
        else:
            joined.append(members)
        before = short
    return joined


def find_groups(tokens: Tensor, position_ids: Tensor, lengths: Seq[int], *, join: bool = True) -> list[Group]:
    """The groups of sequences of these `lengths` (all positive) on the flat axis of `tokens` [N]. `join` merges short
    groups."""
    common = common_beginnings(tokens, position_ids, lengths)
    ranges = groups_of(common, lengths)
    if join:
        ranges = join_short(ranges, common, lengths)
    if len(ranges) == len(lengths):
        return [Group(length) for length in lengths]
    # Equal numbers are equal tokens at equal positions, both of which are below 2^31.
    flat = ((position_ids.long() << 32) + tokens).tolist()
    begins = list(accumulate(lengths, initial=0))
    found: list[Group] = []
    for members in ranges:
        if len(members) == 1:
            found.append(Group(lengths[members[0]]))
            continue
        prefix = min(common[members[0] : members[-1]])
        rests = [flat[begins[member] + prefix : begins[member + 1]] for member in members]
        found.append(Group(prefix, _in_order(rests)))
    return found


def _in_order(rests: Seq[list[int]]) -> tuple[Rest, ...]:
    order = sorted(range(len(rests)), key=rests.__getitem__)
    shared = [0, *(common_length(rests[one], rests[next_]) for one, next_ in pairwise(order))]
    return tuple(Rest(member, len(rests[member]), count) for member, count in zip(order, shared, strict=True))


def common_length(one: Seq[int], other: Seq[int]) -> int:
    """The length of the common prefix of two sequences."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def unique_places(groups: Seq[Group], device: torch.device) -> tuple[Tensor, Tensor]:
    """(kept [U], spread [N]): `flat[kept]` are the unique tokens, `unique[spread]` restores the flat axis."""
    kept: list[Seq[int]] = []
    spread: list[Seq[int]] = []
    begin = flat = 0
    for group in groups:
        prefix = range(begin, begin + group.prefix)
        by_member = sorted(zip(group.rests, group.places(begin), strict=True))
        for _, places in by_member:
            spread += [prefix, places]
        if not by_member:
            spread.append(prefix)
        kept.append(range(flat, flat + group.prefix))
        ends = list(accumulate((group.prefix + rest.length for rest, _ in by_member), initial=flat))
        for rest in group.rests:
            end = ends[rest.member + 1]
            kept.append(range(end - rest.length + rest.shared, end))
        begin, flat = begin + group.tokens, ends[-1] if by_member else flat + group.prefix
    return _index(kept, device), _index(spread, device)


def _index(ranges: Seq[Seq[int]], device: torch.device) -> Tensor:
    return torch.tensor(list(chain.from_iterable(ranges)), dtype=torch.int64).to(device)
