"""Products with weight matrices, with the faster of PyTorch's two CPU libraries (MKL and oneDNN).

On non-Intel processors MKL does not use AVX-512, and oneDNN is faster; the bits of a row do not depend on the other
rows. oneDNN compiles and caches a kernel for every number of rows, so callers should round them up (`full_rows`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from novarl.core.processor import exact_products, halves_avx512
from novarl.kernels.accumulation import Total, total_of


@cache
def has_fast_products() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, which ignores some CPUs' AVX-512."""
    return _has_operators() and not mkl_has_avx512() and onednn_keeps_bits()


@cache
def onednn_keeps_bits() -> bool:
    """Whether the bits of a row are independent of the other rows: not in PyTorch 2.11."""
    return torch.__version__ >= "2.12"  # compared as versions, not as strings


@cache
def mkl_has_avx512() -> bool:
    """Whether MKL uses this CPU's AVX-512."""
    return exact_products().startswith("AVX512")


@cache
def mkl_keeps_up() -> bool:
    """Whether MKL is only slightly slower than oneDNN; for weight gradients it is then faster, since it needs no
    copies."""
    return halves_avx512()


@cache
def _has_operators() -> bool:
    """Whether this CPU has AVX-512 and this PyTorch build the oneDNN operators."""
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    there = built and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    return there and torch.backends.cpu.get_cpu_capability() == "AVX512"


_PACKED_FOR = 64
"""The row count used to choose a layout; other counts give the same layout."""

_given_up: list[bool] = []


def give_up_programs() -> None:
    """Stop using oneDNN, to save the memory of its compiled kernels."""
    _given_up.append(True)


FULL = 64
"""Training uses multiples of this many rows."""


def full_rows(count: int, least: int = FULL) -> int:
    """The padded row count for `count` rows: a multiple of `least`, and from 16 `least` on one of eight values per
    factor of two. Each row count has its own kernels of some hundred kilobytes, which take a millisecond to compile."""
    step = max(least, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // step) * step


def is_fast(*tensors: Tensor) -> bool:
    """Whether products of these tensors use oneDNN: float32, not empty, not sharded, on a CPU where it is faster."""
    full = all(x.dtype == torch.float32 and x.numel() for x in tensors)
    return full and _may_take(*tensors) and has_fast_products()


_only_pytorch: ContextVar[bool] = ContextVar("only_pytorch", default=False)


@contextmanager
def only_pytorch() -> Iterator[None]:
    """A context without oneDNN, for callers with varying row counts that need bit-identical rows."""
    before = _only_pytorch.set(True)
    try:
        yield
    finally:
        _only_pytorch.reset(before)


def _may_take(*tensors: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or _only_pytorch.get():
        return False
    plain = all(type(x) in (Tensor, Parameter) and x.device.type == "cpu" for x in tensors)
    return plain and not _given_up


def can_pack(weight: Tensor) -> bool:
    """Whether `pack` supports this weight and speeds up products: as `is_fast`, and for bfloat16."""
    if weight.dtype == torch.bfloat16:
        return _may_take(weight) and _has_operators() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return is_fast(weight)


def pack(weight: Tensor) -> Tensor:
    """A copy of a weight [N, K] in oneDNN's internal layout, an opaque tensor, for frequent use."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR)
    return packed


def times(x: Tensor, weight: Tensor, room: Tensor | None = None) -> Tensor:
    """x @ weight.T, without a gradient: x [..., K], weight [N, K] (a transposed view, too) -> [..., N]. It may be
    written to `room`, a contiguous tensor of that shape that is likely to be in the cache."""
    if is_fast(x, weight):
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, _whole(weight), None, "none", [], "")
        return found
    if room is None or room.dtype != x.dtype:
        return F.linear(x, weight)
    torch.mm(x.flatten(0, -2), weight.t(), out=room.view(-1, len(weight)))
    return room


def _whole(weight: Tensor) -> Tensor:
    """The weight without gaps between rows or columns, with which oneDNN is slower by orders of magnitude."""
    lies_well = weight.is_mkldnn or weight.is_contiguous() or weight.t().is_contiguous()
    return weight if lies_well else weight.contiguous()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, differentiable (once): x [..., K], weight [N, K] -> [..., N]."""
    total = adds_to(x, weight)
    if total is None and not is_fast(x, weight):
        return F.linear(x, weight)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Product.apply(x, weight, total)  # type: ignore[no-any-return, no-untyped-call]
    return times(x, weight)


def adds_to(x: Tensor, weight: Tensor) -> Total | None:
    """The accumulator to which the product of x and a weight adds the weight's gradient: within
    `accumulation.fused_accumulation`, on a CPU, if MKL can multiply and add at once. None: autograd handles it."""
    if weight.device.type != "cpu" or x.dtype != weight.dtype:
        return None
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return None
    return None if is_fast(x, weight) and not mkl_keeps_up() else total_of(weight)


MANY = 1 << 20
"""Operand size from which a weight gradient uses oneDNN's own operator."""


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, total: Total | None = None) -> Tensor | None:
    """sum over rows of grad_i x_i^T, the gradient of `product` in its weight [N, K]: grad [..., N], x [..., K]. With a
    `total` it is added there and None is returned.

    MKL reads both operands in place. oneDNN needs a transposed copy of one; its own weight-gradient operator copies
    both, which for small operands costs more than transposing the narrower one.
    """
    grad, x = grad.flatten(0, -2), x.flatten(0, -2)
    if total is not None:
        total.add(grad, x)
        return None
    if mkl_keeps_up() or not is_fast(grad, x):
        return torch.mm(grad.t(), x)
    found: Tensor
    if grad.numel() + x.numel() >= MANY:
        found, _ = torch.ops.aten.mkldnn_linear_backward_weights(grad.to_mkldnn(), x.to_mkldnn(), weight, False)
        return found
    return times(grad.t(), x.t()) if grad.shape[1] <= x.shape[1] else times(x.t(), grad.t()).t().contiguous()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: Total | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return times(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad[:2]
        dx = times(grad, weight.t()) if want_x else None
        return dx, weight_gradient(grad, x, weight, ctx.total) if want_weight else None, None
