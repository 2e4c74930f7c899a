"""Causal attention over a cache, over a padded batch, and over sequences packed on one axis.

All attention uses PyTorch's scaled dot-product attention; packed attention may instead use variable-length flash
attention on a GPU, or a plain softmax. For bit-exact results: with a mask the masked kernel always runs, whatever the
mask contains; the causal kernel runs only without a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from novarl.core.errors import NovaError
from novarl.core.memory import first_line
from novarl.kernels.packing import Alone, Gathered, Kernel, Packing, Ragged, cuts, packing_of, past, past_mask
from novarl.kernels.prefix import Group, Rest
from novarl.kernels.small_attention import are_small, gathered_attention, is_small, small_attention

PACKING_ATTENTION = "novarl_sdpa"
"""The name under which this module's attention is registered in transformers."""

UNREAD = 64
"""The minimum number of unread queries worth skipping in the last layer's attention."""

NEAR = 2e-2
"""Tolerated relative error of flash attention's values and gradients against a float32 softmax: bfloat16 has 8 bits."""

COMMON_SIZE = 64
"""The default head size, before the model is known."""


def choose_kernel(
    attn: str, device: torch.device, compute_dtype: torch.dtype, *, head_size: int = COMMON_SIZE
) -> Kernel:
    """The kernel for `attn` ("auto" or a kernel's name) on `device`, for heads of that size. "auto" is flash attention
    if it is available. Raises NovaError if flash attention is requested but not available."""
    missing = None
    if device.type != "cuda" or compute_dtype not in (torch.bfloat16, torch.float16):
        missing = f"requires CUDA and bfloat16, not {device.type} and {str(compute_dtype).removeprefix('torch.')}"
    elif attn in ("auto", "flash") and (fault := _fault_of_flash(device, compute_dtype, head_size)) is not None:
        missing = f"does not work on this GPU: {fault}"
    if attn == "auto":
        return "flash" if missing is None else "sdpa"
    if attn == "flash" and missing is not None:
        raise NovaError(f"flash attention {missing}", where="attn=flash", fix="attn=auto uses it if available")
    if attn not in ("sdpa", "flash", "eager"):
        raise NovaError(f"unknown attention '{attn}'", where="attn", fix="one of auto, sdpa, flash, eager")
    return attn  # type: ignore[return-value]


@cache
def _fault_of_flash(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """Why flash attention cannot be used on `device` for heads of that size, or None if forward and backward match a
    softmax for a prompt and two answers. Support depends on the PyTorch version and the GPU, so it is tested."""
    groups, generator = [Group(5), Group(9, (Rest(0, 4), Rest(1, 70)))], torch.Generator().manual_seed(0)
    tokens = sum(group.tokens for group in groups)
    drawn = [torch.randn(1, heads, tokens, head_size, generator=generator).to(device, dtype) for heads in (4, 2, 2, 4)]

    def through(kernel: Kernel, dtype: torch.dtype) -> list[Tensor]:
        query, key, value, upstream = (tensor.to(dtype) for tensor in drawn)
        states = [state.requires_grad_() for state in (query, key, value)]
        mixed = packed_attention(query, key, value, packing_of(groups, device, kernel))
        return [found.detach().float() for found in (mixed, *torch.autograd.grad(mixed, states, upstream))]

    try:
        with torch.enable_grad():
            pairs = list(zip(through("flash", dtype), through("eager", torch.float32), strict=True))
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        return first_line(error)
    worst = max(float((found - true).norm() / true.norm()) for found, true in pairs)
    return None if worst <= NEAR else f"its relative error is {worst:.1e}"


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Attention under a mask: query [B, H, L, D], key and value [B, Hkv, K, D], mask [B, 1, L, K] -> [B, H, L, D]. With
    one query per row, the H / Hkv heads that share a key head are placed along the query axis: the cache is read once.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.size(1)
    if groups > 1 and length == 1:
        folded = query.reshape(batch, heads // groups, groups, size)
        return F.scaled_dot_product_attention(folded, key, value, mask, scale=scale).reshape(query.shape)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups > 1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """Plain causal attention, no mask: query [B, H, L, D], key and value [B, Hkv, L, D] -> [B, H, L, D].

    Raises ValueError if there are more keys than queries, which requires a mask.
    """
    if key.size(2) != query.size(2):
        raise ValueError(f"{query.size(2)} queries with {key.size(2)} keys require an attention_mask")
    grouped = key.size(1) != query.size(1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(q k^T scale) v, computed literally; shapes as in `masked_attention`."""
    groups, size = query.size(1) // key.size(1), query.size(3)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * (size**-0.5 if scale is None else scale)
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(value.dtype) @ value


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: Packing, *, scale: float | None = None, last: bool = False
) -> Tensor:
    """Causal attention within each of the sequences packed on one axis: [1, H, N, D] with N >= packed.tokens; the rest
    is padding and gets 0. `last`: no layer follows, so outputs that are not read may be arbitrary.

    The axis is cut with `split`, whose backward is one concatenation (slicing would fill a full-size tensor per slice).
    On a CPU 16-bit states are converted to float32: PyTorch's 16-bit kernel is no faster there.
    """
    if query.size(0) != 1 or packed.tokens > query.size(2):
        raise ValueError(f"lengths sum to {packed.tokens}, but the packed axis is {tuple(query.shape)}")
    if packed.ragged is not None:
        return _flash(query, key, value, packed, packed.ragged, scale=scale)
    if query.device.type == "cpu" and value.dtype.itemsize == 2:
        with torch.autocast("cpu", enabled=False):
            wide = packed_attention(query.float(), key.float(), value.float(), packed, scale=scale, last=last)
            return wide.to(value.dtype)
    padding = query.size(2) - packed.tokens
    parts = zip(*(tensor.split([*packed.sizes, padding], dim=2) for tensor in (query, key, value)), strict=True)
    eager = packed.kernel == "eager"
    mixed = []
    for (q, k, v), step in zip(parts, packed.steps, strict=False):
        if isinstance(step, Gathered):
            mixed.append(_gathered(q, k, v, step, scale=scale, eager=eager, last=last))
        else:
            mixed.append(_alone(q, k, v, step, scale=scale, eager=eager, last=last))
    if padding:
        mixed.append(mixed[0].new_zeros(*query.shape[:2], padding, value.size(3)))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, eager: bool) -> Tensor:
    """Causal attention of queries at the end of their keys. Many are split, each part over the keys up to its end."""
    if not eager and is_small(query, key, value):
        return small_attention(query, key, value, scale=scale)
    before = key.size(2) - query.size(2)
    pieces = list(pairwise([0, query.size(2)] if eager else cuts(query.size(2), query.device, causal=before == 0)))
    found = []
    for part, (start, end) in zip(query.split([b - a for a, b in pieces], dim=2), pieces, strict=True):
        seen = before + end
        keys, values = (x if seen == x.size(2) else x[:, :, :seen] for x in (key, value))
        if eager:
            found.append(plain_attention(part, keys, values, past(end - start, seen, query.device), scale=scale))
        elif before + start == 0:
            found.append(causal_attention(part, keys, values, scale=scale))
        else:
            found.append(masked_attention(part, keys, values, past_mask(end - start, seen, part), scale=scale))
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _late(query: Tensor, key: Tensor, value: Tensor, unread: int, *, scale: float | None, eager: bool) -> Tensor:
    """Causal self-attention of a sequence, with 0 for its first `unread` queries if skipping them is worthwhile."""
    if unread < UNREAD:
        return _attend(query, key, value, scale=scale, eager=eager)
    mixed = query[:, :, unread:]
    if mixed.size(2):
        mixed = _attend(mixed, key, value, scale=scale, eager=eager)
    return F.pad(mixed, (0, 0, unread, 0))


def _alone(
    query: Tensor, key: Tensor, value: Tensor, step: Alone, *, scale: float | None, eager: bool, last: bool
) -> Tensor:
    """One causal call per sequence, or one for all if they have equal lengths."""
    unread = step.unread if last else (0,) * len(step.lengths)
    if len(set(step.lengths)) == 1 and max(unread) < UNREAD:
        rows = (tensor[0].unflatten(1, (len(unread), -1)).transpose(0, 1) for tensor in (query, key, value))
        return _attend(*rows, scale=scale, eager=eager).transpose(0, 1).flatten(1, 2)[None]
    parts = zip(*(tensor.split(list(step.lengths), dim=2) for tensor in (query, key, value)), unread, strict=True)
    return torch.cat([_late(q, k, v, skip, scale=scale, eager=eager) for q, k, v, skip in parts], dim=2)


def _gathered(
    query: Tensor, key: Tensor, value: Tensor, step: Gathered, *, scale: float | None, eager: bool, last: bool
) -> Tensor:
    """The calls of a step. Queries and keys are gathered for all calls at once, token by token."""
    calls = step.calls
    trimmed = last and any(call.unread >= UNREAD for call in calls)
    if not eager and not trimmed and are_small(query, key, value, step):
        return gathered_attention(query, key, value, step, scale=scale)
    sizes = [call.sequences * call.queries for call in calls], [call.sequences * call.keys for call in calls]
    queries = query[0].transpose(0, 1).index_select(0, step.queries).split(sizes[0])
    keys, values = (tensor[0].transpose(0, 1).index_select(0, step.keys).split(sizes[1]) for tensor in (key, value))
    mixed = []
    for call, *tokens in zip(calls, queries, keys, values, strict=True):
        q, k, v = (part.unflatten(0, (call.sequences, -1)).transpose(1, 2) for part in tokens)
        found = _late(q, k, v, call.unread if last else 0, scale=scale, eager=eager)
        mixed.append(found.transpose(1, 2).flatten(0, 1))
    rows = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    return rows.index_select(0, step.order).transpose(0, 1)[None]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packed: Packing, ragged: Ragged, *, scale: float | None
) -> Tensor:
    """A single call; a causal mask aligned to the end of the keys is exactly what suffixes need."""
    from torch.nn.attention.varlen import varlen_attn

    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    attend: Callable[..., Any] = varlen_attn
    if "enable_gqa" in signature(varlen_attn).parameters:
        attend = partial(attend, enable_gqa=True)
    else:  # PyTorch 2.11's
        groups = queries.size(1) // keys.size(1)
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    mixed: Tensor = attend(
        queries[: packed.tokens].to(values.dtype),
        keys.to(values.dtype).index_select(0, ragged.keys),
        values.index_select(0, ragged.keys),
        ragged.query_bounds,
        ragged.key_bounds,
        ragged.longest_query,
        ragged.longest_key,
        scale=scale,
        window_size=(-1, 0),
    )
    mixed = F.pad(mixed, (0, 0, 0, 0, 0, len(queries) - packed.tokens))
    return mixed.transpose(0, 1)[None]
