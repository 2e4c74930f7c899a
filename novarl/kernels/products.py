"""Products with a matrix of weights, by the faster of the two libraries that PyTorch has on a CPU.

PyTorch multiplies float32 matrices with MKL, which leaves AVX-512 unused on processors of other makers than Intel.
oneDNN uses it, which makes it the faster one there, and a row's bits are the same whatever rows are beside it. It
compiles a program for every number of rows and keeps it, so those who multiply ever other numbers of rows should round
them up (`full_rows`). On Intel's processors MKL is the faster one; and for gradients in weights, which oneDNN wants
copied first, also where AVX-512 gains little (`mkl_keeps_up`).
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
    """Whether oneDNN multiplies float32 matrices faster than MKL here, to as exact an end: on a CPU with AVX-512 of
    which MKL makes no use."""
    return _has_operators() and not mkl_has_avx512() and onednn_keeps_bits()


@cache
def onednn_keeps_bits() -> bool:
    """Whether a row has the same bits whatever rows are beside it: not in the oneDNN of PyTorch 2.11, which takes
    another kernel for few rows."""
    return torch.__version__ >= "2.12"  # as versions: it is no plain string


@cache
def mkl_has_avx512() -> bool:
    """Whether MKL makes use of this CPU's AVX-512."""
    return exact_products().startswith("AVX512")


@cache
def mkl_keeps_up() -> bool:
    """Whether MKL is little slower than oneDNN where that has AVX-512 to itself. For gradients in weights it is then
    the faster one: it reads both sides as they lie, and adds."""
    return halves_avx512()


@cache
def _has_operators() -> bool:
    """Whether this CPU has AVX-512 and this PyTorch the operators that take oneDNN to it."""
    built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    there = built and all(hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight"))
    return there and torch.backends.cpu.get_cpu_capability() == "AVX512"


_PACKED_FOR = 64
"""The rows that a layout is asked for; it comes out the same for other numbers."""

_given_up: list[bool] = []


def give_up_programs() -> None:
    """Leave oneDNN from here on: its programs take memory, and there is none to spare."""
    _given_up.append(True)


FULL = 64
"""Learning brings a multiple of this many rows."""


def full_rows(count: int, least: int = FULL) -> int:
    """How many rows to bring to a product for `count` of them: a multiple of `least`, of many rows (from 16 `least` on,
    a power of 2) one of eight numbers to the doubling. Each number of rows has programs of its own, of some hundred
    kilobytes, that take a millisecond to compile."""
    step = max(least, 1 << max(0, (count - 1).bit_length() - 4))
    return -(-count // step) * step


def is_fast(*tensors: Tensor) -> bool:
    """Whether products of these go through oneDNN: float32 and not empty, on a CPU that gains by it, not spread over
    ranks."""
    full = all(x.dtype == torch.float32 and x.numel() for x in tensors)
    return full and _may_take(*tensors) and has_fast_products()


_only_pytorch: ContextVar[bool] = ContextVar("only_pytorch", default=False)


@contextmanager
def only_pytorch() -> Iterator[None]:
    """Within it no product goes through oneDNN: for those who multiply ever other numbers of rows, and want a row to
    have the same bits in each of them."""
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
    """Whether `pack` takes this weight, and products gain by it: as `is_fast`, and in bfloat16, where PyTorch has no
    other products than oneDNN's."""
    if weight.dtype == torch.bfloat16:
        return _may_take(weight) and _has_operators() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return is_fast(weight)


def pack(weight: Tensor) -> Tensor:
    """A weight [N, K] copied into oneDNN's own layout, an opaque tensor, for those who multiply by it often."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _PACKED_FOR)
    return packed


def times(x: Tensor, weight: Tensor, room: Tensor | None = None) -> Tensor:
    """x @ weight.T, without a gradient: x [..., K], weight [N, K] (a transposed view, too) -> [..., N]. It may be
    written to `room`, a tensor without gaps of that shape, which a cache is likely to hold still."""
    if is_fast(x, weight):
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, _whole(weight), None, "none", [], "")
        return found
    if room is None or room.dtype != x.dtype:
        return F.linear(x, weight)
    torch.mm(x.flatten(0, -2), weight.t(), out=room.view(-1, len(weight)))
    return room


def _whole(weight: Tensor) -> Tensor:
    """The weight without gaps between its rows or columns: for those oneDNN has nothing but its reference code, which
    is slower by orders of magnitude."""
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
    """Where the product of x with a weight adds its gradient in the weight by itself: within
    `accumulation.fused_accumulation`, on a CPU, where MKL does both at once. None: autograd does."""
    if weight.device.type != "cpu" or x.dtype != weight.dtype:
        return None
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return None
    return None if is_fast(x, weight) and not mkl_keeps_up() else total_of(weight)


MANY = 1 << 20
"""Numbers of both sides from which on a gradient in a weight is left to oneDNN's own operator."""


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, total: Total | None = None) -> Tensor | None:
    """sum over rows of grad_i x_i^T, the gradient of `product` in its weight [N, K]: grad [..., N], x [..., K].

    With a `total` it is added there, and nothing returned.

    MKL reads both as they lie. oneDNN's left side must lie as it is read, so one of the two would be copied,
    transposed, which takes up to a third of the time. Its own operator takes both as they are, though in copies; for
    few numbers those cost more than to transpose the narrower one.
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
