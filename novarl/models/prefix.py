"""What neighbouring sequences have in common at their beginning, so that it is computed once.

The samples of one prompt, the two answers of a preference pair, the turns of a rewritten conversation: packed in order,
they are neighbours that begin alike. What a causal model computes for a token follows from the tokens and positions up
to it, so the common beginning is computed once, each rest after it, and the hidden states are handed to every sequence
that shares them. The gradient is that of the whole sequences: handing out adds up on the way back.

All of it is a pure function of the tokens, positions and bounds; nobody has to say what is shared.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

TOLL = 8
"""Tokens that sharing must save for each member of a group: its attention then needs a mask and a copy of keys."""

MOST = 64
"""The most sequences of one group: looking further back costs more than it finds."""


class Group(NamedTuple):
    """Neighbouring sequences: the tokens that all of them begin with, and how many more each has.

    A sequence that shares nothing is a group of its own: `prefix` is its length, `rests` is empty.
    """

    prefix: int
    rests: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """How many tokens are computed."""
        return self.prefix + sum(self.rests)


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
            choice = max(choice, (saved, begin), key=lambda one: one[0])
        best.append(choice)
    ranges: list[range] = []
    end = len(lengths)
    while end > 0:
        begin = best[end][1]
        ranges.append(range(begin, end))
        end = begin
    return ranges[::-1]


def find_groups(tokens: Tensor, position_ids: Tensor, lengths: Seq[int]) -> list[Group]:
    """The groups of sequences of these `lengths` (all positive), packed on the flat axis of `tokens` [N]."""
    common = common_beginnings(tokens, position_ids, lengths)
    found: list[Group] = []
    for members in groups_of(common, lengths):
        if len(members) == 1:
            found.append(Group(lengths[members[0]]))
            continue
        prefix = min(common[members[0] : members[-1]])
        found.append(Group(prefix, tuple(lengths[member] - prefix for member in members)))
    return found


def unique_places(groups: Seq[Group], device: torch.device) -> tuple[Tensor, Tensor]:
    """(kept [U], spread [N]): `flat[kept]` holds each group's prefix once and then its rests, and `unique[spread]` is
    the flat axis again."""
    begins = accumulate((group.tokens for group in groups), initial=0)
    kept: list[range] = []
    spread: list[range] = []
    flat = 0
    for begin, (prefix, rests) in zip(begins, groups, strict=False):
        kept.append(range(flat, flat + prefix))
        here = begin + prefix
        for rest in rests or (0,):
            kept.append(range(flat + prefix, flat + prefix + rest))
            spread += [range(begin, begin + prefix), range(here, here + rest)]
            flat, here = flat + prefix + rest, here + rest
    return _index(kept, device), _index(spread, device)


def _index(ranges: Seq[range], device: torch.device) -> Tensor:
    return torch.tensor(list(chain.from_iterable(ranges)), dtype=torch.int64).to(device)
