"""Golden numbers and extremes of the losses of reward models; their gradients and optima: tests/certificates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from novarl.algos import preference_losses as preference
from novarl.algos.reward_modeling import bce, bt, implicit_ce, implicit_dpo, implicit_kto

REWARDS = st.floats(-100, 100)


def column(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def softplus(x: float) -> float:
    return max(0.0, x) + math.log1p(math.exp(-abs(x)))


def test_golden() -> None:
    chosen, rejected = column(2.0, 0.5), column(0.0, 1.0)
    assert bt(chosen, rejected).tolist() == pytest.approx([softplus(-2.0), softplus(0.5)])
    assert bt(chosen, rejected, margin=column(1.0, 0.0)).tolist() == pytest.approx([softplus(-1.0), softplus(0.5)])
    centred = [softplus(-2.0) + 0.01 * 4.0, softplus(0.5) + 0.01 * 2.25]
    assert bt(chosen, rejected, centring=0.01).tolist() == pytest.approx(centred)
    assert bce(column(2.0, 2.0, 2.0), column(1.0, 0.0, 0.25)).tolist() == pytest.approx(
        [softplus(-2.0), softplus(2.0), 0.25 * softplus(-2.0) + 0.75 * softplus(2.0)]
    )


@given(REWARDS, REWARDS, st.floats(0, 3), st.floats(0, 1))
def test_smoothing_is_the_mean_over_exchanged_sides(
    chosen: float, rejected: float, margin: float, wrong: float
) -> None:
    one, other, m = column(chosen), column(rejected), column(margin)
    smooth = bt(one, other, margin=m, label_smoothing=wrong)
    expected = (1 - wrong) * softplus(margin - chosen + rejected) + wrong * softplus(margin - rejected + chosen)
    assert smooth.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(REWARDS, st.floats(0, 1), st.floats(0, 0.5))
def test_bce_is_the_mean_over_labels(reward: float, label: float, wrong: float) -> None:
    good = label * (1 - wrong) + (1 - label) * wrong
    found = bce(column(reward), column(label), label_smoothing=wrong).item()
    assert found == pytest.approx(good * softplus(-reward) + (1 - good) * softplus(reward), rel=1e-9, abs=1e-9)


def test_a_confident_mistake_keeps_its_gradient() -> None:
    """log(sigma(x) + 1e-5), as some write it, has none at -100."""
    chosen = column(-1e4, -100.0, dtype=torch.float32).requires_grad_()
    for loss in (bt(chosen, torch.zeros(2)), bce(chosen, torch.ones(2))):
        (gradient,) = torch.autograd.grad(loss.sum(), chosen)
        assert loss.isfinite().all() and gradient.tolist() == [-1.0, -1.0]


def test_implicit_losses_are_those_of_log_ratios() -> None:
    chosen, rejected, ref = column(-1.0, -2.0), column(-3.0, -1.0), column(-2.0, -2.0)
    ce = implicit_ce(chosen, ref, column(1.0, 0.0), beta=0.5)
    assert ce.tolist() == pytest.approx([softplus(-0.5), softplus(0.0)])
    pairs = implicit_dpo(chosen, rejected, ref, ref, beta=0.5)
    assert pairs.tolist() == pytest.approx([softplus(-1.0), softplus(0.5)])
    torch.testing.assert_close(pairs, preference.sigmoid(chosen, rejected, ref, ref, beta=0.5))
    kto = implicit_kto(chosen, ref, column(1.0, 0.0), 0.0, beta=0.5)
    assert kto.tolist() == pytest.approx([1 / (1 + math.exp(0.5)), 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    x, label = torch.zeros(2, dtype=dtype), torch.ones(2)
    assert bt(x, x, margin=x, centring=0.1, label_smoothing=0.1).dtype == dtype
    assert bce(x, label, label_smoothing=0.1).dtype == dtype
    assert implicit_ce(x, x, label, beta=0.1).dtype == dtype
