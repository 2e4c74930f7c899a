"""Norm, rotation and gate with a backward pass of their own: the plain form's numbers, and the same bits with
gradients and without."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from novarl.kernels import fused

EPS = 1e-6


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Rows(nn.Module):
    """A linear layer of a kind of its own, as one with an adapter is."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def linear(weight: Tensor, *, hooked: bool = False) -> nn.Linear:
    """A layer that multiplies by this very tensor."""
    layer = nn.Linear(1, 1, bias=False)
    del layer.weight
    layer.weight = weight  # type: ignore[assignment]
    if hooked:
        layer.register_forward_hook(lambda *_: None)
    return layer


def gated(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.silu(gate) * up, weight)


ANGLE = draw(1, 1, 5, 3)
GATED = [draw(2, 5, 9), draw(2, 5, 9) + 1, draw(4, 9)]
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
    "norm": (
        lambda x, weight: fused.rms_norm(x, weight, EPS),
        lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
        [draw(2, 5, 8), draw(8)],
    ),
    "rotation": (
        lambda x: fused.rotate(x, ANGLE.cos(), ANGLE.sin()),
        lambda x: turned(x, ANGLE.cos(), ANGLE.sin()),
        [draw(1, 4, 5, 6)],
    ),
    "gate": (lambda gate, up, weight: fused.swiglu(gate, up, linear(weight)), gated, GATED),
    "gate before a hook": (lambda gate, up, weight: fused.swiglu(gate, up, linear(weight, hooked=True)), gated, GATED),
    "gate before another layer": (lambda gate, up, weight: fused.swiglu(gate, up, Rows(weight)), gated, GATED),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_the_plain_forms(name: str) -> None:
    ours, plain, inputs = CASES[name]
    leaves = [value.clone().requires_grad_() for value in inputs]
    found, wanted = ours(*leaves), plain(*leaves)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-15)
    assert torch.equal(found, wanted) or not name.startswith("gate"), "the gate's forward pass is the plain form"
    quiet = ours(*inputs)
    assert torch.equal(quiet, found) and not quiet.requires_grad, "an update's ratios would not begin at 1"
    assert name.startswith("gate before") or type(found.grad_fn) is not type(wanted.grad_fn)
    towards = draw(*found.shape)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves, towards), torch.autograd.grad(wanted, leaves, towards), strict=True
    ):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_the_gated_activations_are_not_kept() -> None:
    def kept(down: nn.Module, gate: Tensor, up: Tensor) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (shapes.append(tuple(x.shape)), x)[1], lambda x: x):
            fused.swiglu(gate, up, down)
        return shapes

    gate, up, weight = (value.clone().requires_grad_() for value in GATED)
    for down, count in ((linear(weight), 2), (linear(weight, hooked=True), 3), (Rows(weight), 3)):
        assert sum(math.prod(shape) == gate.numel() for shape in kept(down, gate, up)) == count


def test_a_hook_of_the_layer_behind_the_gate_is_called() -> None:
    gate, up, weight = (value.clone().requires_grad_() for value in GATED)
    layer, seen = linear(weight), []
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    fused.swiglu(gate, up, layer)
    assert seen == [gate.shape]
