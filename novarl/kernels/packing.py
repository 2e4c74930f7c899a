"""The attention plan of packed sequences, made once per forward pass and used by every layer.

Shared prefixes are computed once (`prefix.Group`), and similar sequences are computed in one call. `packing_of` weighs
the cost of padding against the cost of more calls.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from itertools import accumulate, chain, compress, groupby, islice, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from novarl.kernels.prefix import SHORT, Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Kernel = Literal["sdpa", "flash", "eager"]
"""The packed attention kernel: PyTorch's scaled dot-product, variable-length flash attention, or a plain softmax."""

CALL = 4096
"""The cost of an extra attention call, in query-key pairs."""

CUT = 256
"""Queries per call of PyTorch's CPU kernel, which computes masked entries too: smaller chunks waste less."""


Placed = tuple[range, list[int]]
"""A sequence of a call: the places of the preceding tokens, and of its own, some of which may be shared."""


class _Kind(Enum):
    ALONE = auto()
    SHARED = auto()
    SHORT = auto()


@dataclass(frozen=True, slots=True)
class Alone:
    """Neighbouring sequences without sharing: their lengths, and how many leading tokens of each are not read."""

    lengths: tuple[int, ...]
    unread: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


class Call(NamedTuple):
    """One call of attention: sequences [G] padded on the right to the longest, each with L queries at the end of its K
    keys; the first `unread` queries of each are not read."""

    sequences: int
    queries: int
    keys: int
    unread: int = 0


class HeadRows(NamedTuple):
    """A step's calls on rows of one head of one token: row (token, head) of [tokens H]. Each call has one block per
    sequence and key head: `shapes` are (blocks, queries, keys). `queries` and `keys` are row indices, block by block;
    `order` [tokens H] is the position of each row among the queries; `idle` are the padding queries."""

    shapes: tuple[tuple[int, int, int], ...]
    queries: Tensor
    keys: Tensor
    order: Tensor
    idle: Tensor

    def of_queries(self, rows: Tensor) -> list[Tensor]:
        """Rows gathered by `queries`, [blocks, queries, D] for each call."""
        return _blocks(rows, [(blocks, queries) for blocks, queries, _ in self.shapes])

    def of_keys(self, rows: Tensor) -> list[Tensor]:
        """Rows gathered by `keys`, [blocks, keys, D] for each call."""
        return _blocks(rows, [(blocks, keys) for blocks, _, keys in self.shapes])


def _blocks(rows: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts = rows.split([blocks * long for blocks, long in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass(frozen=True, slots=True)
class Gathered:
    """Neighbouring sequences computed in `calls`, which take their queries and keys consecutively from `queries` [sum G
    L] and `keys` [sum G K]: indices into the step's `tokens` (arbitrary for padding). `order` [tokens] is the position
    of each token among the queries."""

    tokens: int
    calls: tuple[Call, ...]
    queries: Tensor
    keys: Tensor
    order: Tensor
    _rows: dict[tuple[int, int], HeadRows] = field(default_factory=dict, init=False, repr=False, compare=False)

    def rows(self, heads: int, key_heads: int) -> HeadRows:
        """The same for single heads; identical for all layers of a model."""
        if (heads, key_heads) not in self._rows:
            self._rows[heads, key_heads] = self._head_rows(heads, key_heads)
        return self._rows[heads, key_heads]

    def _head_rows(self, heads: int, key_heads: int) -> HeadRows:
        shared = heads // key_heads
        shapes = tuple((call.sequences * key_heads, shared * call.queries, call.keys) for call in self.calls)
        at = 0
        queries: list[Tensor] = []
        keys: list[Tensor] = []
        places: list[Tensor] = []
        of_queries = self.queries.split([call.sequences * call.queries for call in self.calls])
        of_keys = self.keys.split([call.sequences * call.keys for call in self.calls])
        for call, tokens, seen in zip(self.calls, of_queries, of_keys, strict=True):
            queries.append(_headed(tokens.view(call.sequences, 1, -1), heads))
            keys.append(_headed(seen.view(call.sequences, 1, -1), key_heads))
            here = torch.arange(at, at + len(tokens) * heads, device=tokens.device)
            places.append(here.view(call.sequences, heads, -1).transpose(1, 2).reshape(-1, heads))
            at += len(here)
        found = torch.cat(queries)
        order = torch.cat(places).index_select(0, self.order).flatten()
        idle = found.new_ones(len(found), dtype=torch.bool).index_fill_(0, order, False)
        return HeadRows(shapes, found, torch.cat(keys), order, idle.nonzero().flatten())


def _headed(tokens: Tensor, heads: int) -> Tensor:
    """Tokens [S, 1, L] as rows of (token, head), in the order of [S, heads, L]."""
    return (tokens * heads + torch.arange(heads, device=tokens.device)[:, None]).flatten()


class Ragged(NamedTuple):
    """Arguments for a variable-length kernel: queries in place, keys gathered by `keys`, and the boundaries of the
    pieces, int32 [pieces + 1]; queries are at the end of their keys."""

    keys: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences packed on one axis of `tokens` tokens; groups of them share a prefix, which is stored once. `steps`, in
    order, are sequences that are used in place, or that have to be gathered."""

    steps: tuple[Alone | Gathered, ...]
    sizes: tuple[int, ...]
    kernel: Kernel = "sdpa"
    ragged: Ragged | None = None

    @property
    def tokens(self) -> int:
        return sum(self.sizes)


def packing_of(
    groups: Sequence[Group], device: torch.device, kernel: Kernel = "sdpa", *, read: Tensor | None = None
) -> Packing:
    """The attention plan of `groups` on their axis of unique tokens: for each group its prefix, then its suffixes.
    `read` (int64, ascending) are the places whose final hidden states are used; None: all."""
    if kernel == "flash":
        return Packing((), tuple(group.tokens for group in groups), kernel, _ragged(groups, device))
    steps: list[Alone | Gathered] = []
    unread = iter(_unread(groups, read))
    for kind, run in groupby(groups, key=_kind):
        members = list(run)
        skipped = tuple(islice(unread, len(members)))
        lengths = tuple(group.prefix for group in members)
        alone = not any(group.rests for group in members)
        if kind is _Kind.SHORT and not (alone and len(set(lengths)) == 1):
            steps.append(_short(members, device))
        elif alone:
            steps.append(Alone(lengths, skipped))
        else:
            steps.append(_shared(members, skipped, device))
    return Packing(tuple(steps), tuple(step.tokens for step in steps), kernel)


def _unread(groups: Sequence[Group], read: Tensor | None) -> list[int]:
    """The number of unread tokens at the start of each group's prefix."""
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
    """Where to cut `length` queries, from 0 to `length`. Long causal ones are not: the kernel skips masked blocks."""
    if device.type != "cpu" or (causal and length > 3 * CUT):
        return [0, length]
    return [*range(0, length - CUT // 3, CUT), length] if length > CUT else [0, length]


def past(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: the keys that queries at the end of their keys may attend to."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def past_mask(queries: int, keys: int, like: Tensor) -> Tensor:
    """`past` for PyTorch's kernels; on a CPU, whose kernel adds floats, a view of a cached mask of 0 and -inf."""
    if like.device.type != "cpu":
        return past(queries, keys, like.device)
    reach = 1 << (keys - queries).bit_length()
    return _added(reach, CUT + CUT // 3, like.dtype)[:queries, reach - (keys - queries) : reach + queries]


@cache
def _added(before: int, queries: int, dtype: torch.dtype) -> Tensor:
    """For `before` keys before the queries, a power of two: all sizes together take twice the memory of the largest."""
    with torch.inference_mode(False):  # inference tensors cannot be used in training
        return torch.full((queries, before + queries), -torch.inf, dtype=dtype, device="cpu").triu_(before + 1)


def _kind(group: Group) -> _Kind:
    if group.prefix + max((rest.length for rest in group.rests), default=0) <= SHORT:
        return _Kind.SHORT
    return _Kind.SHARED if group.rests else _Kind.ALONE


def _short(groups: Sequence[Group], device: torch.device) -> Gathered:
    """One call for all, with a copy of the shared tokens for each sequence: this is cheaper than a call per group."""
    every: list[Placed] = []
    for prefix, rests in _places(groups):
        every += ((range(0), [*prefix, *rest]) for rest in rests or [[]])
    return _gathered([(every, 0)], groups, device)


def _shared(groups: Sequence[Group], unread: Sequence[int], device: torch.device) -> Gathered:
    """Prefixes attend to themselves, suffixes to their prefix and themselves; suffixes with equal prefix length and
    similar length are batched. Tokens shared between suffixes are copied, which costs less than a call per fork."""
    calls: list[tuple[list[Placed], int]] = []
    behind: dict[int, list[Placed]] = defaultdict(list)
    places = _places(groups)
    for prefix, rests in places:
        behind[len(prefix)] += ((prefix, rest) for rest in rests)
    for members in _calls(0, [len(prefix) for prefix, _ in places], device):
        alike: list[Placed] = [(range(0), list(places[member][0])) for member in members]
        calls.append((alike, min(unread[member] for member in members)))
    for before, every in behind.items():
        for members in _calls(before, [len(rest) for _, rest in every], device):
            calls.append(([every[member] for member in members], 0))
    return _gathered(calls, groups, device)


def _places(groups: Sequence[Group]) -> list[tuple[range, list[list[int]]]]:
    """The places of the prefix and the suffixes of each group, without suffixes contained in another."""
    found, begin = [], 0
    for group in groups:
        rests = compress(group.places(begin), group.whole())
        found.append((range(begin, begin + group.prefix), list(rests)))
        begin += group.tokens
    return found


def _gathered(calls: Sequence[tuple[Sequence[Placed], int]], groups: Sequence[Group], device: torch.device) -> Gathered:
    """The step for calls, each given by its sequences (preceding tokens, equally many in all, and own tokens) and the
    number of unread leading tokens. Results of shared tokens are taken from the last sequence."""
    tokens = sum(group.tokens for group in groups)
    queries: list[Sequence[int]] = []
    keys: list[Sequence[int]] = []
    order, made, at = np.empty(tokens, np.int64), [], 0
    for sequences, unread in calls:
        widest = max(len(own) for _, own in sequences)
        made.append(Call(len(sequences), widest, len(sequences[0][0]) + widest, unread))
        for before, own in sequences:
            order[own] = np.arange(at, at + len(own))
            at += widest
            row = own + [0] * (widest - len(own))
            queries.append(row)
            keys += [before, row]
    index = (np.fromiter(chain.from_iterable(places), np.int64) for places in (queries, keys))
    return Gathered(tokens, tuple(made), *(torch.from_numpy(places).to(device) for places in (*index, order)))


def _calls(before: int, lengths: Sequence[int], device: torch.device) -> list[list[int]]:
    """Batches of sequences after `before` preceding tokens, each sorted by length: the partition of the sorted lengths
    that minimises query-key pairs (with padding) plus `CALL` per call. Empty sequences are omitted."""
    order = sorted((index for index, length in enumerate(lengths) if length > 0), key=lambda index: lengths[index])
    ends = [
        end for end in range(1, len(order) + 1) if end == len(order) or lengths[order[end]] > lengths[order[end - 1]]
    ]
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    for end in ends:
        pieces = cuts(lengths[order[end - 1]], device, causal=False)
        pairs = sum((stop - start) * (before + stop) for start, stop in pairwise(pieces))
        call = CALL * (len(pieces) - 1)
        best[end] = min((cost + (end - begin) * pairs + call, begin) for begin, (cost, _) in best.items())
    found: list[list[int]] = []
    end = len(order)
    while end > 0:
        begin = best[end][1]
        found.append(order[begin:end])
        end = begin
    return found[::-1]


def _ragged(groups: Sequence[Group], device: torch.device) -> Ragged:
    """The pieces of `groups`: each prefix over itself, and each suffix's unshared part over its prefix and itself."""
    keys: list[int] = []
    queries, seen, begin = [0], [0], 0
    for group in groups:
        prefix = range(begin, begin + group.prefix)
        pieces: list[tuple[int, Sequence[int]]] = [(group.prefix, prefix)]
        for rest, places in zip(group.rests, group.places(begin), strict=True):
            pieces.append((rest.length - rest.shared, [*prefix, *places]))
        for own, visible in pieces:
            if own:
                keys += visible
                queries.append(queries[-1] + own)
                seen.append(len(keys))
        begin += group.tokens
    query_bounds, key_bounds = (torch.tensor(bounds, dtype=torch.int32) for bounds in (queries, seen))
    longest = [int(bounds.diff().max()) for bounds in (query_bounds, key_bounds)]
    index = torch.tensor(keys, dtype=torch.int64)
    return Ragged(index.to(device), query_bounds.to(device), key_bounds.to(device), longest[0], longest[1])
