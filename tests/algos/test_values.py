"""The critic's loss and its report, by hand and against each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from novarl.algos.values import explained_variance, value_loss

ALL = torch.ones(4, dtype=torch.bool)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradient(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """(loss per token, d sum / d values)."""
    values = values.clone().requires_grad_(True)
    loss, _ = value_loss(values, old, returns, torch.ones_like(old, dtype=torch.bool), clip=clip)
    (found,) = torch.autograd.grad(loss.sum(), values)
    return loss.detach(), found


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    values, returns = column(1.0, -2.0, 0.5, 3.0), column(0.0, 1.0, 0.5, 5.0)
    loss, slope = gradient(values, column(9.0, 9.0, 9.0, 9.0), returns, None)
    assert loss.tolist() == [0.5, 4.5, 0.0, 2.0] and slope.tolist() == [1.0, -3.0, 0.0, -2.0]


def test_the_clip_by_hand() -> None:
    """Moved too far towards the return: no gradient. Too far from it: the full one. Little: the full one."""
    values, old, returns = column(0.5, -0.5, 0.1, 2.0), column(0.0, 0.0, 0.0, 0.0), column(1.0, 1.0, 1.0, 1.0)
    loss, slope = gradient(values, old, returns, 0.2)
    # 0.5: clipped to 0.2, whose error 0.8 is larger; -0.5 and 2.0: their own errors are larger; 0.1: within the clip.
    assert loss.tolist() == pytest.approx([0.32, 1.125, 0.405, 0.5])
    assert slope.tolist() == pytest.approx([0.0, -1.5, -0.9, 1.0])
    _, stats = value_loss(values, old, returns, ALL, clip=0.2)
    assert stats["value_clip_fraction"].tolist() == [True, False, False, False]


def test_outside_the_mask_nothing_counts_whatever_it_holds() -> None:
    nan = float("nan")
    mask = torch.tensor([True, False])
    values = column(1.0, nan).requires_grad_(True)
    for clip in (None, 0.2):
        loss, stats = value_loss(values, column(0.0, nan), column(0.0, nan), mask, clip=clip)
        (slope,) = torch.autograd.grad(loss.sum(), values)
        assert loss[1] == 0 and slope[1] == 0 and slope[0] == 1 and not stats["value_clip_fraction"][1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    values = torch.ones(4, dtype=dtype)
    for clip in (None, 0.2):
        assert value_loss(values, values, values, ALL, clip=clip)[0].dtype == dtype


def test_explained_variance_by_hand() -> None:
    returns = column(1.0, 2.0, 3.0, 100.0)
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(column(7.0, 7.0, 7.0, 0.0), returns, mask).item() == pytest.approx(0.0, abs=1e-12)
    assert explained_variance(column(3.0, 2.0, 1.0, 0.0), returns, mask).item() == pytest.approx(-3.0)
    assert explained_variance(column(0.5, 1.0, 1.5, 0.0), returns, mask).item() == pytest.approx(0.75)
    assert explained_variance(returns, torch.ones_like(returns), mask).item() == 0.0, "nothing varies"
    assert explained_variance(returns, returns, torch.zeros(4, dtype=torch.bool)).item() == 0.0
