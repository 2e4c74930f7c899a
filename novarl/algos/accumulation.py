"""Gradients of weights, added where they are summed: gradient accumulation, fused.

For each use of a weight autograd makes a tensor of the weight's size in every backward pass, adds those of one pass to
each other and then to `.grad`. Of an embedding that is a table of zeros with a few rows in it; tied to the head it
costs two such tables a micro-batch, 600 MB each for 151,936 tokens by 1,024 in float32. Within `fused_accumulation`
`look_up` and `logprobs.chunked_scores` add their gradients to `.grad` themselves, and autograd is told of none; so do
other products with weights where one operation multiplies and adds (`products.adds_to`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

_fused: ContextVar[bool] = ContextVar("fused_accumulation", default=False)
_spare: ContextVar[list[Tensor] | None] = ContextVar("spare_memory", default=None)


@contextmanager
def fused_accumulation() -> Iterator[None]:
    """For loops of `loss.backward()` whose gradients are read from `.grad` at the end.

    Not for `torch.autograd.grad`, which would find no gradient in these weights, nor for hooks on them, which would not
    be called.
    """
    fused, spare = _fused.set(True), _spare.set([])
    try:
        yield
    finally:
        _fused.reset(fused)
        _spare.reset(spare)


def is_fused(weight: Tensor) -> bool:
    """Whether gradients in this weight are to be added to its `.grad` by whoever computes them. Sums need the precision
    of at least float32, so weights of 16 bits have theirs from autograd."""
    leaf = type(weight) is Parameter and weight.requires_grad and torch.is_grad_enabled()
    return leaf and _fused.get() and weight.dtype in (torch.float32, torch.float64)


def spare_memory() -> list[Tensor]:
    """Memory that one pass has left for the next, within `fused_accumulation`: large blocks otherwise go back to the
    system, which zeroes them anew each time. Elsewhere nobody left any."""
    spare = _spare.get()
    return [] if spare is None else spare


def summed(weight: Tensor) -> Tensor:
    """The sum so far, to add to: `weight.grad`, zeros where nothing has arrived yet."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    return weight.grad


def look_up(weight: Tensor, ids: Tensor, padding: int | None = None) -> Tensor:
    """weight[ids], as `torch.nn.functional.embedding`: weight [V, D], ids [...] int64 -> [..., D]. The row `padding`
    has no gradient. Differentiable once where it is fused."""
    if not is_fused(weight):
        return F.embedding(ids, weight, padding)
    return _LookUp.apply(weight, ids, padding)  # type: ignore[no-any-return, no-untyped-call]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.padding = padding
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        weight, ids = ctx.saved_tensors
        rows, ids = grad.reshape(-1, grad.shape[-1]).to(weight.dtype), ids.flatten()
        if ctx.padding is not None:
            rows = rows.masked_fill((ids == ctx.padding)[:, None], 0.0)
        if weight.is_cuda:  # there index_add_ adds in any order
            summed(weight).index_put_((ids,), rows, accumulate=True)
        else:
            summed(weight).index_add_(0, ids, rows)
        return None, None, None
