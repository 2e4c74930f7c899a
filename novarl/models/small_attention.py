"""Causal attention over few keys as two batches of small matrix products, with a backward pass of four.

PyTorch's CPU kernel works through blocks made for long sequences. For some dozens of keys its blocks are mostly empty,
and its backward pass computes the probabilities again; here they are kept, which few keys can afford.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FEW = 128
"""The most keys of a call: beyond, keeping the probabilities costs more than computing them again."""

SEVERAL = 16
"""The fewest pairs of a sequence and a key head: a call for less is mostly the cost of its kernels."""


def is_small(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `small_attention` can take these, and is the faster way."""
    exact = query.dtype == key.dtype == value.dtype and query.dtype.itemsize > 2
    here = query.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return exact and here and key.size(2) <= FEW and key.size(0) * key.size(1) >= SEVERAL


def small_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(q k^T scale) v for queries that stand at the end of their keys, each seeing those up to itself: query
    [B, H, L, D], key and value [B, Hkv, K, D] with K >= L -> [B, H, L, D]. `scale` is 1 / sqrt(D) unless given."""
    return _SmallAttention.apply(  # type: ignore[no-any-return, no-untyped-call]
        query, key, value, query.size(3) ** -0.5 if scale is None else scale
    )


class _SmallAttention(torch.autograd.Function):
    """The heads that share a key head stand along the query axis: q [B Hkv, (H / Hkv) L, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        batch, heads, length, size = query.shape
        key_heads, keys = key.shape[1:3]
        hidden = query.new_full((length, keys), -torch.inf).triu_(keys - length + 1).repeat(heads // key_heads, 1)
        q = query.reshape(batch * key_heads, -1, size)
        k, v = key.reshape(-1, keys, size), value.reshape(-1, keys, size)
        p = torch.baddbmm(hidden, q, k.transpose(1, 2), alpha=scale).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.shapes = scale, (query.shape, key.shape)
        return torch.bmm(p, v).view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        grad = grad.reshape(q.shape)
        dv = torch.bmm(p.transpose(1, 2), grad)
        dscores = torch.ops.aten._softmax_backward_data(torch.bmm(grad, v.transpose(1, 2)), p, -1, p.dtype)
        dq = torch.bmm(dscores, k).mul_(ctx.scale)
        dk = torch.bmm(dscores.transpose(1, 2), q).mul_(ctx.scale)
        of_query, of_key = ctx.shapes
        return dq.view(of_query), dk.view(of_key), dv.view(of_key), None
