"""Causal attention over a cache, over a padded batch, and over sequences packed on one axis.

Everything goes through PyTorch's scaled dot-product attention; what is packed may go through flash-attn's kernel for
ragged sequences instead, or through a plain softmax. One rule matters to whoever wants equal bits: with a mask, always
the masked kernel runs, whatever the mask says; only without one the causal kernel does.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.nn.functional as F

from novarl.core.errors import NovaError
from novarl.models.prefix import Group

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


PACKING_ATTENTION = "novarl_sdpa"
"""The name under which transformers models find the attention of this module."""

Kernel = Literal["sdpa", "flash", "eager"]
"""What computes packed attention: PyTorch's, flash-attn's for ragged sequences, or a softmax anyone can read."""

CALL = 4096
"""What one more call of attention costs, in pairs of a query and a key (measured on the CPU: 0.15 ms, 40 ns a pair)."""

SHORT = 64
"""Neighbouring sequences of at most so many tokens are attended to in one call, each with what it shares with others:
computing that again is cheaper than a call for each group."""

UNREAD = 64
"""So many queries that nobody reads are worth leaving out of the last layer's attention."""

CUT = 256
"""Queries that go through PyTorch's CPU kernel together. It computes what a mask hides, and under its causal rule whole
blocks of 512 keys; with fewer queries at a time, each piece over the keys up to its end, less of it is hidden."""


def choose_kernel(attn: str, device: torch.device, compute_dtype: torch.dtype) -> Kernel:
    """The kernel that `attn` ("auto" or a kernel's name) stands for on `device`. "auto" is flash-attn's where it is
    installed and can run, otherwise PyTorch's. NovaError: flash-attn is asked for where it cannot run."""
    missing = None
    if device.type != "cuda" or compute_dtype not in (torch.bfloat16, torch.float16):
        missing = f"runs on CUDA in bfloat16, not on {device.type} in {str(compute_dtype).removeprefix('torch.')}"
    elif importlib.util.find_spec("flash_attn") is None:
        missing = "is not installed"
    if attn == "auto":
        return "flash" if missing is None else "sdpa"
    if attn == "flash" and missing is not None:
        raise NovaError(f"flash-attn {missing}", where="attn=flash", fix="attn=auto takes it wherever it can run")
    if attn not in ("sdpa", "flash", "eager"):
        raise NovaError(f"unknown attention '{attn}'", where="attn", fix="one of auto, sdpa, flash, eager")
    return attn  # type: ignore[return-value]


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Attention under a mask: query [B, H, L, D], key and value [B, Hkv, K, D], mask [B, 1, L, K] -> [B, H, L, D].

    With one query a row (decoding) the H / Hkv heads that share a key head are laid along the query axis, which reads
    the cache once instead of H / Hkv times.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.size(1)
    if groups > 1 and length == 1:
        folded = query.reshape(batch, heads // groups, groups, size)
        return F.scaled_dot_product_attention(folded, key, value, mask, scale=scale).reshape(query.shape)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups > 1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """Plain causal attention, no mask: query [B, H, L, D], key and value [B, Hkv, L, D] -> [B, H, L, D].

    Raises ValueError where there are more keys than queries: which of them are in the past, only a mask can say.
    """
    if key.size(2) != query.size(2):
        raise ValueError(f"{query.size(2)} queries over {key.size(2)} keys need an attention_mask")
    grouped = key.size(1) != query.size(1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float | None = None
) -> Tensor:
    """softmax(q k^T scale) v as it is written, causal where there is no mask; shapes as in `masked_attention`."""
    groups, size = query.size(1) // key.size(1), query.size(3)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if mask is None:
        mask = _past(query.size(2), key.size(2), query.device)
    scores = query @ key.transpose(2, 3) * (size**-0.5 if scale is None else scale)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype) @ value


class Padded(NamedTuple):
    """Rests of a group that are attended to in one call, padded on the right to the longest of them.

    rows [G, L]: where their tokens lie among the group's rests (anywhere, for padding); mask [L, P + L].
    """

    rows: Tensor
    mask: Tensor


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
    """How a group is computed: `prefix` tokens causally, of which nobody reads the first `unread`, then the calls;
    `order` [M] puts their rows in order again."""

    prefix: int
    rests: int
    calls: tuple[Padded, ...]
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
    for a forward pass (`packing`), used by every layer.
    """

    steps: tuple[Alone | Shared | Brief, ...]
    sizes: tuple[int, ...]
    kernel: Kernel = "sdpa"
    ragged: Ragged | None = None

    @property
    def tokens(self) -> int:
        return sum(self.sizes)


def packing(
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


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: Packing, *, scale: float | None = None, last: bool = False
) -> Tensor:
    """Causal attention within each of the sequences packed on one axis: [1, H, N, D] with N == packed.tokens. `last`:
    no layer follows, so that what nobody reads may be anything.

    No mask [N, N], and no work between sequences. The axis is cut by `split`, whose backward is one concatenation (that
    of slicing fills a full-size tensor for every slice).
    """
    if query.size(0) != 1 or packed.tokens != query.size(2):
        raise ValueError(f"lengths sum to {packed.tokens}, the packed axis is {tuple(query.shape)}")
    if packed.ragged is not None:
        return _flash(query, key, value, packed.ragged, scale=scale)
    parts = zip(*(tensor.split(list(packed.sizes), dim=2) for tensor in (query, key, value)), strict=True)
    eager = packed.kernel == "eager"
    mixed = []
    for (q, k, v), step in zip(parts, packed.steps, strict=True):
        if isinstance(step, Brief):
            mixed.append(_brief_attention(q, k, v, step, scale=scale, eager=eager))
        elif isinstance(step, Shared):
            mixed.append(_group_attention(q, k, v, step, scale=scale, eager=eager, last=last))
        else:
            mixed.append(_alone(q, k, v, step, scale=scale, eager=eager, last=last))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, scale: float | None, eager: bool
) -> Tensor:
    """Causal attention of queries at the end of their keys, in pieces of queries that each read the keys up to their
    end; `mask` may be given, and says just that."""
    before = key.size(2) - query.size(2)
    pieces = list(pairwise([0, query.size(2)] if eager else _cuts(query.size(2), query.device, causal=before == 0)))
    found = []
    for part, (start, end) in zip(query.split([b - a for a, b in pieces], dim=2), pieces, strict=True):
        seen = before + end
        keys, values = (x if seen == x.size(2) else x[:, :, :seen] for x in (key, value))
        if mask is not None:
            here: Tensor | None = mask[start:end, :seen]
        else:
            here = _past(end - start, seen, query.device) if before + start else None
        if eager:
            found.append(plain_attention(part, keys, values, here, scale=scale))
        elif here is None:
            found.append(causal_attention(part, keys, values, scale=scale))
        else:
            found.append(masked_attention(part, keys, values, here, scale=scale))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _past(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool [queries, keys]: what queries at the end of their keys may see."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def _late(query: Tensor, key: Tensor, value: Tensor, unread: int, *, scale: float | None, eager: bool) -> Tensor:
    """Causal attention of a sequence to itself, with 0 for its first `unread` queries where that is worth it."""
    if unread < UNREAD:
        return _attend(query, key, value, scale=scale, eager=eager)
    mixed = query[:, :, unread:]
    if mixed.size(2):
        mixed = _attend(mixed, key, value, scale=scale, eager=eager)
    return F.pad(mixed, (0, 0, unread, 0))


def _cuts(length: int, device: torch.device, *, causal: bool) -> list[int]:
    """Where to cut `length` queries, from 0 to `length`: not where it does not pay, as for long causal ones, of which
    the kernel leaves out much by itself."""
    if device.type != "cpu" or (causal and length > 3 * CUT):
        return [0, length]
    return [*range(0, length - CUT // 3, CUT), length] if length > CUT else [0, length]


def _alone(
    query: Tensor, key: Tensor, value: Tensor, step: Alone, *, scale: float | None, eager: bool, last: bool
) -> Tensor:
    """One causal call a sequence; one for all, where they are equally long."""
    unread = step.unread if last else (0,) * len(step.lengths)
    if len(set(step.lengths)) == 1 and max(unread) < UNREAD:
        rows = (tensor[0].unflatten(1, (len(unread), -1)).transpose(0, 1) for tensor in (query, key, value))
        return _attend(*rows, scale=scale, eager=eager).transpose(0, 1).flatten(1, 2)[None]
    parts = zip(*(tensor.split(list(step.lengths), dim=2) for tensor in (query, key, value)), unread, strict=True)
    return torch.cat([_late(q, k, v, skip, scale=scale, eager=eager) for q, k, v, skip in parts], dim=2)


def _group_attention(
    query: Tensor, key: Tensor, value: Tensor, group: Shared, *, scale: float | None, eager: bool, last: bool
) -> Tensor:
    """The prefix sees itself; each rest sees the prefix and itself."""
    parts = (tensor.split([group.prefix, group.rests], dim=2) for tensor in (query, key, value))
    (first, queries), (first_key, keys), (first_value, values) = parts
    begun = _late(first, first_key, first_value, group.unread if last else 0, scale=scale, eager=eager)
    if not group.calls:  # sequences that are all alike to their end
        return begun
    found = [
        _attend(
            _rows(queries, call.rows),
            _behind(first_key, keys, call.rows),
            _behind(first_value, values, call.rows),
            call.mask,
            scale=scale,
            eager=eager,
        )
        for call in group.calls
    ]
    rows = torch.cat([mixed.transpose(1, 2).flatten(0, 1) for mixed in found])
    return torch.cat([begun, rows.index_select(0, group.order).transpose(0, 1)[None]], dim=2)


def _brief_attention(
    query: Tensor, key: Tensor, value: Tensor, step: Brief, *, scale: float | None, eager: bool
) -> Tensor:
    """One causal call for all: padding stands on the right, where no token looks."""
    mixed = _attend(*(_rows(tensor, step.rows) for tensor in (query, key, value)), scale=scale, eager=eager)
    return mixed.transpose(1, 2).flatten(0, 1).index_select(0, step.order).transpose(0, 1)[None]


def _flash(query: Tensor, key: Tensor, value: Tensor, ragged: Ragged, *, scale: float | None) -> Tensor:
    """One call for everything; a mask that is causal from the end of the keys is just what a rest needs."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    mixed: Tensor = flash_attn_varlen_func(
        queries.to(values.dtype),
        keys.to(values.dtype).index_select(0, ragged.keys),
        values.index_select(0, ragged.keys),
        ragged.query_bounds,
        ragged.key_bounds,
        ragged.longest_query,
        ragged.longest_key,
        softmax_scale=scale,
        causal=True,
    )
    return mixed.transpose(0, 1)[None]


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


def _rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """[1, H, M, D] at `rows` [G, L] of the packed axis -> [G, H, L, D]."""
    return tensor[0].transpose(0, 1).index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


def _behind(prefix: Tensor, tensor: Tensor, rows: Tensor) -> Tensor:
    """The prefix [1, H, P, D] before each of `rows` [G, L]: [G, H, P + L, D]."""
    return torch.cat([prefix.expand(len(rows), -1, -1, -1), _rows(tensor, rows)], dim=2)


def _shared(group: Group, unread: int, device: torch.device) -> Shared:
    """The calls that compute `group`."""
    prefix, rests = group
    begins = torch.tensor([0, *rests]).cumsum(0)
    calls: list[Padded] = []
    order = torch.empty(sum(rests), dtype=torch.int64)
    done = 0
    for members in _calls(prefix, rests, device):
        length = rests[members[-1]]
        within = torch.arange(length)
        rows = begins[members, None] + within
        real = within < torch.tensor([[rests[member]] for member in members])
        order[rows[real]] = done + real.flatten().nonzero().flatten()
        done += real.numel()
        calls.append(Padded(rows.where(real, 0).to(device), _past(length, prefix + length, device)))
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
        pieces = _cuts(rests[order[end - 1]], device, causal=False)
        pairs = sum((stop - start) * (prefix + stop) for start, stop in pairwise(pieces))
        call = CALL * (len(pieces) - 1)
        best.append(min((best[begin][0] + (end - begin) * pairs + call, begin) for begin in range(end)))
    cuts: list[list[int]] = []
    end = len(order)
    while end > 0:
        begin = best[end][1]
        cuts.append(order[begin:end])
        end = begin
    return cuts[::-1]
