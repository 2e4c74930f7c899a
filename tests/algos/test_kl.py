"""Golden numbers and properties of the KL estimators; what their gradients are in expectation: tests/certificates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from novarl.algos.kl import corrected, k1, k2, k3

PAIRS = st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0)), min_size=1, max_size=8)


def columns(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_golden() -> None:
    """pi = 1/2, 1/4, 1/3 against ref = 1/4, 1/2, 1/3: x = log 2, -log 2, 0."""
    logp, ref = columns(1 / 2, 1 / 4, 1 / 3).log(), columns(1 / 4, 1 / 2, 1 / 3).log()
    two = math.log(2)
    assert k1(logp, ref).tolist() == pytest.approx([two, -two, 0.0])
    assert k2(logp, ref).tolist() == pytest.approx([two**2 / 2, two**2 / 2, 0.0])
    assert k3(logp, ref).tolist() == pytest.approx([two - 1 / 2, 1 - two, 0.0])


def test_golden_gradients() -> None:
    """1, x and 1 - exp(-x), for x = log 2."""
    for estimator, expected in ((k1, 1.0), (k2, math.log(2)), (k3, 0.5)):
        logp = columns(1 / 2).log().requires_grad_()
        (gradient,) = torch.autograd.grad(estimator(logp, columns(1 / 4).log()).sum(), logp)
        assert gradient.item() == pytest.approx(expected)


def test_k3_keeps_its_digits_near_zero() -> None:
    x = 2.0**-20  # exactly representable in float32, as is its square: exp(-x) - 1 + x would be off by 6 %
    value = k3(torch.tensor([x - 1.0]), torch.tensor([-1.0])).item()
    assert value == pytest.approx(x**2 / 2, rel=0.1)
    assert k3(columns(1e-7), columns(0.0)).item() == pytest.approx(0.5e-14, rel=1e-2)


@given(PAIRS)
def test_k2_and_k3_are_never_negative_and_zero_only_at_equality(pairs: list[tuple[float, float]]) -> None:
    logp, ref = (columns(*column) for column in zip(*pairs, strict=True))
    for estimator in (k2, k3):
        values = estimator(logp, ref)
        apart = (logp - ref).abs()
        assert (values >= -1e-15 * apart).all()  # but for the last bit of expm1
        assert (values[apart > 1e-6] > 0).all()
        assert estimator(logp, logp).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    logp = torch.zeros(2, dtype=dtype)
    assert {estimator(logp, logp).dtype for estimator in (k1, k2, k3)} == {dtype}


def test_corrected_golden() -> None:
    """pi = 1/2, pi_old = 1/4, ref = 1/8: r = 2, x = log 4, k3 = log 4 - 3/4; slopes r x, and r (x + 1) for k1."""
    for estimator, value, slope in ((k3, 2 * math.log(4) - 1.5, 2 * math.log(4)), (k1, 2 * math.log(4), None)):
        logp = columns(1 / 2).log().requires_grad_()
        found = corrected(estimator(logp, columns(1 / 8).log()), logp, columns(1 / 4).log())
        (gradient,) = torch.autograd.grad(found.sum(), logp)
        assert found.item() == pytest.approx(value)
        assert gradient.item() == pytest.approx(2 * (math.log(4) + 1) if slope is None else slope)


@given(PAIRS)
def test_corrected_k3_has_the_gradient_of_k2_where_the_ratio_is_1(pairs: list[tuple[float, float]]) -> None:
    """r k3 has k3's value, and the slope x of k2 at every single token, not only on average."""
    logp, ref = (columns(*column) for column in zip(*pairs, strict=True))
    logp.requires_grad_()
    weighted = corrected(k3(logp, ref), logp, logp.detach())
    assert torch.equal(weighted, k3(logp, ref))
    slopes = [torch.autograd.grad(loss.sum(), logp)[0] for loss in (weighted, k2(logp, ref))]
    scale = (ref - logp).exp().max().item()
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-14 * (1 + scale))


def test_derivatives_by_finite_differences() -> None:
    logp, old, ref = columns(-1.0, -2.0, -0.5).requires_grad_(), columns(-1.2, -1.7, -0.5), columns(-0.7, -2.5, -0.5)
    for estimator in (k1, k2, k3):
        assert torch.autograd.gradcheck(lambda x, each=estimator: each(x, ref), logp)
        assert torch.autograd.gradcheck(lambda x, each=estimator: corrected(each(x, ref), x, old), logp)


def test_a_clamped_k3_is_cut_and_has_no_gradient_beyond() -> None:
    x = torch.tensor([0.5, -2.0, -3.0, -200.0, 30.0], dtype=torch.float64, requires_grad=True)
    found = k3(x, torch.zeros_like(x), most=10.0)
    assert found.tolist() == pytest.approx([0.5 + math.exp(-0.5) - 1, math.exp(2) - 3, 10.0, 10.0, 10.0])
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert gradient.tolist() == pytest.approx([1 - math.exp(-0.5), 1 - math.exp(2), 0.0, 0.0, 0.0])
    assert torch.equal(k3(x, torch.zeros_like(x), most=None)[:3], k3(x, torch.zeros_like(x))[:3])
