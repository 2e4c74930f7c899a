"""What neighbouring sequences have in common at their beginning, so that it is computed once.

The samples of one prompt, the two answers of a preference pair, the turns of a rewritten conversation: packed in order,
they are neighbours that begin alike. What a causal model computes for a token follows from the tokens and positions up
to it, so what sequences begin with is computed once: the prefix of a whole group, then what some of its rests begin
with, down to answers that are equal to their end. The hidden states are handed to every sequence that shares them. The
gradient is that of the whole sequences: handing out adds up on the way back.

All of it is a pure function of the tokens, positions and bounds; nobody has to say what is shared.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

TOLL = 8
"""Tokens that sharing must save for each member of a group: its attention then needs a mask and a copy of keys."""

MOST = 64
"""The most sequences of one group: looking further back costs more than it finds."""

SHORT = 64
"""Sequences of at most so many tokens have copies of their keys anyway (`packing`), so that sharing costs them nothing:
neighbouring groups of them are one, as different prompts from one template are."""

SLIGHT = 4
"""The tokens that the last sequence of one such group and the first of the next have in common, or more."""


class Rest(NamedTuple):
    """What a sequence has after its group's prefix: how many tokens, and how many of them the rest before it begins
    with, too. `member`: which of the group's sequences it is, in the order of the flat axis."""

    member: int
    length: int
    shared: int = 0


class Group(NamedTuple):
    """Neighbouring sequences: the tokens that all of them begin with, and what else each has. Rests that begin alike
    follow one another.

    A sequence that shares nothing is a group of its own: `prefix` is its length, `rests` is empty.
    """

    prefix: int
    rests: tuple[Rest, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens are computed."""
        return self.prefix + sum(rest.length - rest.shared for rest in self.rests)

    @property
    def members(self) -> int:
        """How many sequences there are."""
        return max(1, len(self.rests))

    def places(self, begin: int) -> list[list[int]]:
        """Where the tokens of each rest lie, if what is computed lies on an axis from `begin` on: the prefix, then of
        one rest after the other what it does not share."""
        found: list[list[int]] = []
        here, last = begin + self.prefix, list[int]()
        for rest in self.rests:
            own = rest.length - rest.shared
            last = [*last[: rest.shared], *range(here, here + own)]
            found.append(last)
            here += own
        return found

    def whole(self) -> list[bool]:
        """Of each rest whether it is no beginning of the one after it, whose places then are all that it has."""
        return [*(rest.length > after.shared for rest, after in pairwise(self.rests)), *(True for _ in self.rests[-1:])]


def common_beginnings(tokens: Tensor, position_ids: Tensor, lengths: Seq[int]) -> list[int]:
    """With how many tokens, at equal positions, each sequence begins like the next: [S - 1] numbers."""
    if len(lengths) < 2:
        return []
    sizes = torch.tensor(lengths, device=tokens.device)
    begins = sizes.cumsum(0) - sizes
    within = torch.minimum(sizes[:-1], sizes[1:])  # beyond the shorter of the two nothing is equal
    pair = torch.repeat_interleave(torch.arange(len(within), device=tokens.device), within)
    offset = torch.arange(len(pair), device=tokens.device) - (within.cumsum(0) - within)[pair]
    mine, theirs = begins[pair] + offset, begins[pair + 1] + offset
    differs = (tokens[mine] != tokens[theirs]) | (position_ids[mine] != position_ids[theirs])
    first = within.scatter_reduce(0, pair[differs], offset[differs], "amin")
    found: list[int] = first.tolist()
    return found


def groups_of(common: Seq[int], lengths: Seq[int]) -> list[range]:
    """The neighbours that share, as ranges of sequences that cover all of them in order: those that save most tokens,
    where a range of k sequences with a common beginning of m saves (k - 1) m and costs `TOLL` k."""
    # best[i]: the most that the first i sequences save, and where their last range begins.
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
    """The ranges, neighbours of them joined where all their sequences are SHORT and they have some tokens in common."""
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
    """The groups of sequences of these `lengths` (all positive), packed on the flat axis of `tokens` [N]; `join`: short
    ones of one template are one group."""
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
    """With how many numbers two sequences begin together."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def unique_places(groups: Seq[Group], device: torch.device) -> tuple[Tensor, Tensor]:
    """(kept [U], spread [N]): `flat[kept]` holds what is computed of one group after the other, as `Group.places` says,
    and `unique[spread]` is the flat axis again."""
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
