"""Norm, rotation and gate with a backward pass of their own: autograd's numbers, and the plain form's bits forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from novarl.models import fused

EPS = 1e-6


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


ANGLE = draw(1, 1, 5, 3)
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
    "gate": (fused.swiglu, lambda gate, up: F.silu(gate) * up, [draw(2, 5, 9), draw(2, 5, 9) + 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_autograds_and_forward_bits_the_plain_forms(name: str) -> None:
    ours, plain, inputs = CASES[name]
    leaves = [value.clone().requires_grad_() for value in inputs]
    found, wanted = ours(*leaves), plain(*leaves)
    assert torch.equal(found, wanted) and type(found.grad_fn) is not type(wanted.grad_fn)
    towards = draw(*found.shape)
    for mine, theirs in zip(
        torch.autograd.grad(found, leaves, towards), torch.autograd.grad(wanted, leaves, towards), strict=True
    ):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_where_no_gradient_is_wanted_the_plain_form_runs(name: str) -> None:
    ours, plain, inputs = CASES[name]
    assert torch.equal(ours(*inputs), plain(*inputs)) and not ours(*inputs).requires_grad
