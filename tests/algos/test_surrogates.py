"""Golden losses and gradients, and that nothing outside the mask matters, whatever stands there."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from novarl.algos.surrogates import ppo_clip, reinforce

CLIP = partial(ppo_clip, clip_low=0.2, clip_high=0.28)
BOTH = pytest.mark.parametrize("surrogate", [reinforce, CLIP], ids=["reinforce", "ppo_clip"])
TOKENS = st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3)), min_size=1, max_size=10)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def everything(like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool)


def test_reinforce_golden() -> None:
    logp = column(-1.0, -2.0, -3.0).requires_grad_()
    loss, stats = reinforce(logp, column(-9.0, -9.0, -9.0), column(2.0, -0.5, 7.0), torch.tensor([True, True, False]))
    assert loss.tolist() == [2.0, -1.0, 0.0]
    assert torch.autograd.grad(loss.sum(), logp)[0].tolist() == [-2.0, 0.5, 0.0]
    assert stats["clip_fraction"].tolist() == [False, False, False]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.0, -2.0, 2.0, 2.0, False),
        (1.25, 2.0, -2.5, -2.5, False),  # above 1.2, and below DAPO's 1.28
        (1.5, 2.0, -2.56, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False),  # too likely and bad: pulled back at full strength
        (0.5, -2.0, 1.6, 0.0, True),
        (0.5, 2.0, -1.0, -1.0, False),  # too unlikely and good: pulled back
        (0.9, -2.0, 1.8, 1.8, False),
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_ppo_clip_golden(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    """Bounds 0.8 and 1.28; the slope is the derivative in log pi, -ratio * advantage where nothing is clipped."""
    logp = column(math.log(ratio) - 1.0).requires_grad_()
    found, stats = CLIP(logp, column(-1.0), column(advantage), torch.tensor([True]))
    assert found.item() == pytest.approx(loss)
    assert torch.autograd.grad(found.sum(), logp)[0].item() == pytest.approx(slope)
    assert stats["clip_fraction"].tolist() == [clipped]


@BOTH
@pytest.mark.parametrize("junk", [0.0, 1e4, -1e4, math.inf, -math.inf, math.nan])
def test_what_is_outside_the_mask_has_no_effect(
    surrogate: partial[tuple[Tensor, dict[str, Tensor]]], junk: float
) -> None:
    logp = column(-1.0, junk, -2.0).requires_grad_()
    mask = torch.tensor([True, False, True])
    for old, advantage in (
        (column(-1.1, 0.0, -1.5), column(1.0, junk, -1.0)),
        (column(-1.1, -junk, -1.5), column(1, 0, -1)),
    ):
        loss, stats = surrogate(logp, old, advantage, mask)
        (gradient,) = torch.autograd.grad(loss.sum(), logp)
        clean, _ = surrogate(logp.detach()[mask], old[mask], advantage[mask], mask[mask])
        assert loss[1] == 0 and gradient[1] == 0 and not stats["clip_fraction"][1]
        assert torch.equal(loss[mask], clean) and gradient.isfinite().all()


@given(TOKENS)
def test_at_ratio_1_ppo_has_the_gradient_of_reinforce(tokens: list[tuple[float, float, float]]) -> None:
    logp, _, advantage = (column(*values) for values in zip(*tokens, strict=True))
    logp.requires_grad_()
    gradients = [
        torch.autograd.grad(surrogate(logp, logp.detach(), advantage, everything(logp))[0].sum(), logp)[0]
        for surrogate in (reinforce, CLIP)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-15, atol=1e-300)


@given(TOKENS)
def test_ppo_is_a_pessimistic_bound(tokens: list[tuple[float, float, float]]) -> None:
    """The clipped loss is never below the unclipped one, and differs exactly where `clip_fraction` says so."""
    logp, old, advantage = (column(*values) for values in zip(*tokens, strict=True))
    loss, stats = CLIP(logp, old, advantage, everything(logp))
    free = -(logp - old).exp() * advantage
    assert (loss >= free).all()
    assert torch.equal(loss > free, stats["clip_fraction"])


@BOTH
@given(tokens=TOKENS, data=st.data())
def test_tokens_are_independent(
    surrogate: partial[tuple[Tensor, dict[str, Tensor]]], tokens: list[tuple[float, float, float]], data: st.DataObject
) -> None:
    logp, old, advantage = (column(*values) for values in zip(*tokens, strict=True))
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens))))
    order = torch.tensor(data.draw(st.permutations(range(len(tokens)))))
    loss, _ = surrogate(logp, old, advantage, mask)
    moved, _ = surrogate(logp[order], old[order], advantage[order], mask[order])
    # Vectorised and scalar exp may differ in the last bit.
    torch.testing.assert_close(moved, loss[order], rtol=1e-14, atol=1e-300)


@BOTH
def test_dtype_is_kept_and_statistics_carry_no_gradient(surrogate: partial[tuple[Tensor, dict[str, Tensor]]]) -> None:
    for dtype in (torch.float32, torch.float64):
        logp = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
        loss, stats = surrogate(logp, logp.detach(), torch.ones(1, dtype=dtype), torch.tensor([True]))
        assert loss.dtype == dtype
        assert all(not value.requires_grad for value in stats.values())
