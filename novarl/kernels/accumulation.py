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
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Total:
    """Where gradients in a weight are summed: `.grad` of the weight itself. Autograd may hand a copy to the backward
    pass, as it does where activations are recomputed, and what is added to a copy's gradient is lost."""

    weight: Tensor

    def so_far(self) -> Tensor:
        """The sum, to add to; zeros where nothing has arrived yet."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight, memory_format=torch.contiguous_format)
        return self.weight.grad

    def add(self, grad: Tensor, x: Tensor) -> None:
        """Add grad.T @ x: grad [R, N], x [R, K]."""
        if self.weight.grad is None:
            self.weight.grad = torch.mm(grad.t(), x)
        else:
            self.weight.grad.addmm_(grad.t(), x)


def total_of(weight: Tensor) -> Total | None:
    """Where whoever computes gradients in this weight is to add them; None: autograd does. Sums need the precision of
    at least float32, so weights of 16 bits have theirs from autograd."""
    leaf = type(weight) is Parameter and weight.requires_grad and torch.is_grad_enabled()
    return Total(weight) if leaf and _fused.get() and weight.dtype in (torch.float32, torch.float64) else None


def spare_memory(device: torch.device) -> list[Tensor]:
    """Memory that one pass has left for the next, within `fused_accumulation` on a CPU: large blocks otherwise go back
    to the system, which zeroes them anew each time. Elsewhere nobody left any, and other devices keep blocks anyway."""
    spare = _spare.get()
    return spare if spare is not None and device.type == "cpu" else []


def look_up(weight: Tensor, ids: Tensor, padding: int | None = None) -> Tensor:
    """weight[ids], as `torch.nn.functional.embedding`: weight [V, D], ids [...] int64 -> [..., D]. The row `padding`
    has no gradient. Differentiable once where it is fused."""
    total = total_of(weight)
    if total is None:
        return F.embedding(ids, weight, padding)
    return _LookUp.apply(weight, ids, padding, total)  # type: ignore[no-any-return, no-untyped-call]


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, total: Total) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.padding, ctx.total = padding, total
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (ids,), total = ctx.saved_tensors, ctx.total.so_far()
        rows, ids = grad.reshape(-1, grad.shape[-1]).to(total.dtype), ids.flatten()
        if ctx.padding is not None:
            rows = rows.masked_fill((ids == ctx.padding)[:, None], 0.0)
        if total.is_cuda:  # there index_add_ adds in any order
            total.index_put_((ids,), rows, accumulate=True)
        else:
            total.index_add_(0, ids, rows)
        return None, None, None, None
