"""Fused gradient accumulation: weight gradients are added directly to `.grad`.

For each use of a weight, autograd allocates a gradient of the weight's size in every backward pass, sums those of one
pass, and adds the result to `.grad`: for an embedding mostly zeros. Within `fused_accumulation`, `look_up` and
`logprobs.chunked_scores` add their gradients to `.grad` themselves and return none to autograd, and so do other
products with weights if one operation can multiply and add (`products.adds_to`).
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
    """A context for loops of `loss.backward()` that read the gradients from `.grad` at the end.

    It does not support `torch.autograd.grad` for these weights (no gradient), or hooks on them (not called).
    """
    fused, spare = _fused.set(True), _spare.set([])
    try:
        yield
    finally:
        _fused.reset(fused)
        _spare.reset(spare)


@dataclass(frozen=True, slots=True)
class Total:
    """The accumulator of a weight's gradient: `.grad` of the weight itself. Autograd may pass a copy of the weight to
    the backward pass (with activation recomputation), whose `.grad` would be lost."""

    weight: Tensor

    def so_far(self) -> Tensor:
        """The sum so far, initially zeros."""
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
    """The accumulator for gradients of this weight, or None if autograd handles them, as for 16-bit weights."""
    leaf = type(weight) is Parameter and weight.requires_grad and torch.is_grad_enabled()
    return Total(weight) if leaf and _fused.get() and weight.dtype in (torch.float32, torch.float64) else None


def spare_memory(device: torch.device) -> list[Tensor]:
    """Buffers kept from one pass for the next, within `fused_accumulation` on a CPU: otherwise large blocks return to
    the system, which zeroes them each time. Other devices have caching allocators."""
    spare = _spare.get()
    return spare if spare is not None and device.type == "cpu" else []


def look_up(weight: Tensor, ids: Tensor, padding: int | None = None) -> Tensor:
    """weight[ids], as `torch.nn.functional.embedding`: weight [V, D], ids [...] int64 -> [..., D]. The row `padding`
    has no gradient. When fused, it is differentiable once."""
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
        if total.is_cuda:  # index_add_ is not deterministic there
            total.index_put_((ids,), rows, accumulate=True)
        else:
            total.index_add_(0, ids, rows)
        return None, None, None, None
