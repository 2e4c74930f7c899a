"""Causal attention over few keys with two batched matrix products forward and four backward.

PyTorch's CPU kernel uses blocks for long sequences, and its backward pass recomputes the probabilities; here they are
kept. Heads that share a key head are placed along the query axis: a block of queries is [B Hkv, (H / Hkv) L, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from novarl.kernels.packing import Call, Gathered, HeadRows

FEW = 128
"""The maximum number of keys; beyond it, recomputing the probabilities is cheaper than keeping them."""

SEVERAL = 16
"""The minimum number of (sequence, key head) pairs; below it, call overhead dominates."""


def is_small(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `small_attention` supports these tensors and is faster."""
    return _can_take(query, key, value) and _is_small([Call(key.size(0), query.size(2), key.size(2))], key.size(1))


def are_small(query: Tensor, key: Tensor, value: Tensor, step: Gathered) -> bool:
    """Whether `gathered_attention` supports this step and is faster."""
    return _can_take(query, key, value) and _is_small(step.calls, key.size(1))


def _can_take(query: Tensor, key: Tensor, value: Tensor) -> bool:
    exact = query.dtype == key.dtype == value.dtype and query.dtype.itemsize > 2
    return exact and query.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _is_small(calls: Sequence[Call], key_heads: int) -> bool:
    pairs = sum(call.sequences for call in calls) * key_heads
    return max(call.keys for call in calls) <= FEW and pairs >= SEVERAL


def small_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(q k^T scale) v for queries at the end of their keys, with causal masking: query [B, H, L, D], key and
    value [B, Hkv, K, D] with K >= L -> [B, H, L, D]. `scale` is 1 / sqrt(D) unless given."""
    return _SmallAttention.apply(query, key, value, _scale(query, scale))  # type: ignore[no-any-return, no-untyped-call]


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, step: Gathered, *, scale: float | None = None
) -> Tensor:
    """`small_attention` in each of a step's calls: query [1, H, N, D] of its `tokens`, key and value [1, Hkv, N, D] ->
    [1, H, N, D]. The heads of all tokens are gathered for the products, and scattered back, in one operation."""
    rows = step.rows(query.size(1), key.size(1))
    return _GatheredAttention.apply(query, key, value, step.calls, rows, _scale(query, scale))  # type: ignore[no-any-return, no-untyped-call]


def _scale(query: Tensor, scale: float | None) -> float:
    return query.size(3) ** -0.5 if scale is None else scale


def _mix(q: Tensor, k: Tensor, v: Tensor, length: int, out: Tensor) -> Tensor:
    """Attention of blocks whose queries are scaled, written to `out`; returns the probabilities."""
    scores = torch.bmm(q, k.transpose(1, 2))
    hidden = q.new_full((length, k.size(1)), -torch.inf).triu_(k.size(1) - length + 1)
    p = scores.add_(hidden.repeat(q.size(1) // length, 1)).softmax(-1)
    torch.bmm(p, v, out=out)
    return p


def _gradients(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, out: tuple[Tensor, Tensor, Tensor]) -> None:
    """The gradients of the scaled queries, the keys and the values, written to `out`."""
    dq, dk, dv = out
    torch.bmm(p.transpose(1, 2), grad, out=dv)
    dscores = torch.ops.aten._softmax_backward_data(torch.bmm(grad, v.transpose(1, 2)), p, -1, p.dtype)
    torch.bmm(dscores, k, out=dq)
    torch.bmm(dscores.transpose(1, 2), q, out=dk)


class _SmallAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        length, size = query.shape[2:]
        batch, key_heads, keys, _ = key.shape
        q = (query * scale).reshape(batch * key_heads, -1, size)
        k, v = key.reshape(-1, keys, size), value.reshape(-1, keys, size)
        mixed = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, _mix(q, k, v, length, mixed))
        ctx.scale, ctx.shapes = scale, (query.shape, key.shape)
        return mixed.view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        of_query, of_key = ctx.shapes
        dq, dk, dv = (torch.empty_like(block) for block in (q, k, v))
        _gradients(grad.reshape(q.shape), q, k, v, p, (dq, dk, dv))
        return dq.mul_(ctx.scale).view(of_query), dk.view(of_key), dv.view(of_key), None


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, calls: tuple[Call, ...], rows: HeadRows, scale: float
    ) -> Tensor:
        q = _by_token(query).index_select(0, rows.queries).mul_(scale)
        k, v = (_by_token(tensor).index_select(0, rows.keys) for tensor in (key, value))
        mixed = torch.empty_like(q)
        blocks = zip(rows.of_queries(q), rows.of_keys(k), rows.of_keys(v), strict=True)
        p = [
            _mix(*block, call.queries, out)
            for call, block, out in zip(calls, blocks, rows.of_queries(mixed), strict=True)
        ]
        ctx.save_for_backward(q, k, v, *p)
        ctx.rows, ctx.scale, ctx.shapes = rows, scale, (query.shape, key.shape)
        return _by_head(mixed.index_select(0, rows.order), query.size(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *p = ctx.saved_tensors
        rows: HeadRows = ctx.rows
        (_, heads, *_), (_, key_heads, keys, _) = ctx.shapes
        grad = _by_token(grad).index_select(0, rows.queries).index_fill_(0, rows.idle, 0.0)
        dq, dk, dv = (torch.empty_like(block) for block in (q, k, v))
        blocks = zip(rows.of_queries(grad), rows.of_queries(q), rows.of_keys(k), rows.of_keys(v), p, strict=True)
        out = zip(rows.of_queries(dq), rows.of_keys(dk), rows.of_keys(dv), strict=True)
        for block, found in zip(blocks, out, strict=True):
            _gradients(*block, found)
        room = keys * key_heads, k.size(1)
        dkey, dvalue = (_by_head(k.new_zeros(room).index_add_(0, rows.keys, x), key_heads) for x in (dk, dv))
        return _by_head(dq.index_select(0, rows.order).mul_(ctx.scale), heads), dkey, dvalue, None, None, None


def _by_token(x: Tensor) -> Tensor:
    """[1, H, N, D] to the rows [N H, D]."""
    return x[0].transpose(0, 1).reshape(-1, x.size(3))


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """The rows [N H, D] to [1, H, N, D]."""
    return rows.unflatten(0, (-1, heads)).transpose(0, 1)[None]
