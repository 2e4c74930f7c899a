"""Decoding attention to shared prefixes, which are read once for all rows.

The rows of a batch that continue the same prompt are combined in one product with its keys, instead of reading a copy
per row. The softmax covers prefix and continuation together, as without sharing; no partial results are merged.
(Juravsky et al. 2024, Hydragen, https://arxiv.org/abs/2402.05099, merges them.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from novarl.engines.local.kv_cache import SLAB, KVCache, round_up

QUERIES = 4
"""The number of queries to a prefix is a multiple of this: from 4 on, in steps of 4, a query's bits are the same."""


class SharedPrefixes:
    """The shared prefixes of a batch, and which row continues which.

    The rows of a lane continue the same prefix, whose keys and values are in the row of `cache` with that lane number.
    `lengths` are the prefix lengths; lanes are sorted by the number of slabs, largest first. `rows` int64 [lanes,
    places] is the batch row at each place (unused places repeat some row); `sharing` int64 [S] the rows that are in a
    lane (None: all of B), and `places` int64 [S] their lane * places + place; `before` int64 [B, 1] the number of
    tokens before a row's own. `queries` is the number of query heads per key head.
    """

    def __init__(
        self,
        cache: KVCache,
        lengths: Sequence[int],
        rows: Tensor,
        sharing: Tensor | None,
        places: Tensor,
        before: Tensor,
        *,
        queries: int,
    ) -> None:
        self.before, self.longest = before, max(lengths)
        self._cache = cache
        key_heads = cache.keys[0].shape[2]
        lanes, width = rows.shape
        head = torch.arange(key_heads)
        self._to_lanes = (rows[:, None] * key_heads + head[:, None]).flatten()
        lane, place = places // width, places % width
        self._to_rows = ((lane[:, None] * key_heads + head) * width + place[:, None]).flatten()
        self._of_rows = None if sharing is None else (sharing[:, None] * key_heads + head).flatten()
        self._pairs, self._width = lanes * key_heads, width * queries
        self._slabs = list(self._cut(lengths, key_heads))
        self._read: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def _cut(self, lengths: Sequence[int], key_heads: int) -> Iterator[_Slab]:
        width, ends = self._cache.slab or self._cache.capacity, torch.tensor(lengths)
        for start in range(0, self.longest, width):
            reading = sum(length > start for length in lengths)
            slots = min(width, round_up(self.longest - start, self._cache.step))
            hidden = torch.arange(start, start + slots) >= ends[:reading, None]
            mask = torch.zeros(hidden.shape, dtype=self._cache.dtype).masked_fill_(hidden, -torch.inf)
            room = torch.full((self._pairs, self._width, slots), -torch.inf, dtype=self._cache.dtype)
            pairs = reading * key_heads
            yield _Slab(
                lanes=slice(0, reading),
                slots=slice(0, slots),
                pairs=None if pairs == self._pairs else slice(0, pairs),
                span=slice(start, start + slots),
                mask=mask.repeat_interleave(key_heads, 0)[:, None] if hidden.any() else None,
                room=room,
                scores=room[:pairs],
            )

    def _keys_and_values(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """The keys (transposed) and values that the lanes of each slab read."""
        if layer not in self._read:
            keys, values = self._cache.keys[layer], self._cache.values[layer]
            self._read[layer] = [
                (keys[here].flatten(0, 1).transpose(1, 2), values[here].flatten(0, 1))
                for here in ((index, slab.lanes, slice(None), slab.slots) for index, slab in enumerate(self._slabs))
            ]
        return self._read[layer]

    def attend(self, layer: int, query: Tensor, scores: Tensor, mixed: Tensor) -> Tensor:
        """The softmax over prefix and continuation, of query [B Hkv, H / Hkv, D] whose `scores` [B Hkv, H / Hkv, K]
        with the continuation are given: returns the continuation's weights, shaped as its scores, and writes the
        prefix's part of the output to `mixed`, shaped as the query."""
        asked = query.flatten(1).index_select(0, self._to_lanes).view(self._pairs, self._width, -1)
        own = scores.flatten(1).index_select(0, self._to_lanes).view(self._pairs, self._width, -1)
        parts = list(zip(self._slabs, self._keys_and_values(layer), strict=True))
        for slab, (key, _) in parts:
            query = asked if slab.pairs is None else asked[slab.pairs]
            if slab.mask is None:
                torch.bmm(query, key, out=slab.scores)
            else:
                torch.baddbmm(slab.mask, query, key, out=slab.scores)
        weights = torch.softmax(torch.cat([*(slab.room for slab in self._slabs), own], -1), -1)
        total = torch.zeros_like(asked)
        for slab, (_, value) in parts:
            if slab.pairs is None:
                total.baddbmm_(weights[:, :, slab.span], value)
            else:
                total[slab.pairs].baddbmm_(weights[slab.pairs, :, slab.span], value)
        found = total.view(-1, *mixed.shape[1:]).index_select(0, self._to_rows)
        by_place = weights.view(-1, scores.shape[1], weights.shape[2])
        rest = by_place[:, :, -scores.shape[2] :].index_select(0, self._to_rows)
        if self._of_rows is None:
            mixed.copy_(found)
            return rest
        mixed.zero_().index_copy_(0, self._of_rows, found)
        return torch.softmax(scores, -1).index_copy_(0, self._of_rows, rest)


@dataclass(frozen=True, slots=True)
class _Slab:
    """The lanes that read a slab and its slots; their (lane, key head) pairs (None: all); the position of its slots
    among all; the additive mask, if a prefix ends in it; and a buffer for the scores of all lanes, -inf for those that
    do not read it, with a view of the part that is written."""

    lanes: slice
    slots: slice
    pairs: slice | None
    span: slice
    mask: Tensor | None
    room: Tensor
    scores: Tensor


def places_for(count: int, queries: int) -> int:
    """The smallest number of places for `count` rows with `queries` queries per key head."""
    return round_up(count, QUERIES // math.gcd(QUERIES, queries))


@functools.cache
def stands_alone(size: int, dtype: torch.dtype) -> bool:
    """Whether on this machine the bits of a query's product with a slab are independent of the number of queries, for
    heads of `size`, as sharing requires. Tested at run time, because it depends on the processor."""
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(2, SLAB, size, generator=generator, dtype=dtype) for _ in range(2))
    query = torch.randn(2, 64, size, generator=generator, dtype=dtype)
    weights = torch.softmax(torch.randn(2, 64, SLAB, generator=generator, dtype=dtype), -1)
    scores, mixed = torch.bmm(query, key.transpose(1, 2)), torch.bmm(weights, value)
    for count in range(QUERIES, 64, QUERIES):
        for start in (0, 64 - count):
            here = slice(start, start + count)
            if not torch.equal(torch.bmm(query[:, here].contiguous(), key.transpose(1, 2)), scores[:, here]):
                return False
            if not torch.equal(torch.bmm(weights[:, here], value), mixed[:, here]):
                return False
    return True
