"""Norm, rotary embedding and gate with fewer memory accesses than the plain versions, forward and backward.

On a CPU the forward pass is bit-identical with and without gradients, so that an update's ratios begin at exactly 1.
Other devices have their own fused kernels, and torch.compile generates some; both use the plain versions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from novarl.kernels.accumulation import Total
from novarl.kernels.products import FULL, adds_to, is_fast, product, times, weight_gradient


class Linear(nn.Linear):
    """A linear layer on `kernels.products` that does not initialise its weight, as `Decoder` draws all weights."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool = False) -> None:
        super().__init__(size_in, size_out, bias=bias)

    def reset_parameters(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        found = product(x, self.weight)
        return found if self.bias is None else found + self.bias


class FullLinear(Linear):
    """A linear layer of a transformers model. It uses `kernels.products` for the row counts that occur in training;
    every other row count would need its own compiled kernel."""

    def forward(self, input: Tensor) -> Tensor:
        if not is_fast(input, self.weight) or input.numel() // input.shape[-1] % FULL:
            return F.linear(input, self.weight, self.bias)
        return super().forward(input)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, in the dtype of x and weight."""
    if not _fuses(x):
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pair (x_i, x_{i + half}) of every head by the angle of its position; x [B, H, L, head_dim]."""
    if _fuses(x):
        return _Rotate.apply(x, cos, sin)  # type: ignore[no-any-return, no-untyped-call]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def swiglu(gate: Tensor, up: Tensor, down: nn.Module) -> Tensor:
    """down(silu(gate) * up). If `down` is a plain linear layer (no bias, adapter, hooks or 16-bit products), only gate
    and up are saved for the backward pass; otherwise their product is saved too. Without gradients nothing is saved."""
    if not torch.is_grad_enabled() and _fuses(gate):
        return down(F.silu(gate).mul_(up))  # type: ignore[no-any-return]
    if not _pays(gate, up):
        return down(F.silu(gate) * up)  # type: ignore[no-any-return]
    if _is_bare(down) and not torch.is_autocast_enabled(gate.device.type):
        weight: Tensor = down.weight  # type: ignore[assignment]
        return _GatedProduct.apply(gate, up, weight, adds_to(gate, weight))  # type: ignore[no-any-return, no-untyped-call]
    return down(_SwiGLU.apply(gate, up))  # type: ignore[no-any-return, no-untyped-call]


def _is_bare(layer: nn.Module) -> bool:
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    plain = type(layer).forward in (nn.Linear.forward, Linear.forward)
    return plain and layer._parameters.get("bias") is None and not hooks


def _fuses(x: Tensor) -> bool:
    """Whether the fused versions are used for `x`."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _pays(*tensors: Tensor) -> bool:
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return wanted and _fuses(tensors[0])


class _RMSNorm(torch.autograd.Function):
    """The backward pass is that of layer norm with mean 0, without the term for the mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad[:2]
        size = x.size(-1)
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [size], torch.zeros_like(scale), scale, weight, None, [want_x, want_weight, False]
        )
        if want_x:
            dx.add_(torch.matmul(grad, weight).unsqueeze(-1).mul_(scale).div_(size))
        return dx if want_x else None, dweight if want_weight else None, None


class _Rotate(torch.autograd.Function):
    """The gradient is rotated back into a new tensor, without the four intermediate products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos.to(x.dtype), sin.to(x.dtype), 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos.to(grad.dtype), sin.to(grad.dtype), -1.0), None, None


class _SwiGLU(torch.autograd.Function):
    """The backward pass recomputes silu(gate) instead of reading it from memory."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class _GatedProduct(torch.autograd.Function):
    """The backward pass recomputes the gated activations from silu(gate), which it needs anyway."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, total: Total | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.total = total
        return times(F.silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        gate, up, weight = ctx.saved_tensors
        opened = F.silu(gate)
        dweight = room = None
        if ctx.needs_input_grad[2]:
            room = opened * up
            dweight = weight_gradient(grad, room, weight, ctx.total)
        inner = times(grad, weight.t(), room)
        dup = opened.mul_(inner)
        dgate = torch.ops.aten.silu_backward.grad_input(inner.mul_(up), gate, grad_input=inner)
        return dgate, dup, dweight, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: float) -> Tensor:
    """Rotate by the angles (1.0) or back (-1.0), into a new tensor."""
    found = torch.empty_like(x)
    (first, second), (left, right) = x.chunk(2, dim=-1), found.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-way)
    torch.mul(second, cos, out=right).addcmul_(first, sin, value=way)
    return found
