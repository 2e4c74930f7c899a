"""Golden numbers of the correction and of the effective sample size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from novarl.algos.off_policy import effective_sample_size, truncated_weight


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_weight_golden() -> None:
    """pi_old = 1/2, 1/2, 1/2 over mu = 1/4, 1/8, 1: 2, 4 cut to 3, 1/2; the last column is masked out."""
    old, behavior = column(1 / 2, 1 / 2, 1 / 2, 1 / 2).log(), column(1 / 4, 1 / 8, 1.0, 1 / 4).log()
    mask = torch.tensor([True, True, True, False])
    assert truncated_weight(old, behavior, mask, maximum=3.0).tolist() == pytest.approx([2.0, 3.0, 0.5, 0.0])


def test_weight_is_data() -> None:
    old = column(-1.0).requires_grad_()
    assert not truncated_weight(old, column(-1.5), torch.tensor([True])).requires_grad


@pytest.mark.parametrize("junk", [-1e4, math.inf, -math.inf, math.nan])
def test_weight_outside_the_mask_is_zero(junk: float) -> None:
    weight = truncated_weight(column(-1.0, 0.0), column(-1.0, junk), torch.tensor([True, False]))
    assert weight.tolist() == [1.0, 0.0]


def test_a_token_that_mu_found_impossible_gets_the_maximum() -> None:
    assert truncated_weight(column(0.0), column(-1e5), torch.tensor([True]), maximum=2.0).tolist() == [2.0]


def test_effective_sample_size_golden() -> None:
    """(1 + 2 + 3)^2 / (3 (1 + 4 + 9)) = 36/42; all equal: 1; one of four: 1/4; none: 0."""
    everything = torch.tensor([True] * 4)
    assert effective_sample_size(column(1, 2, 9, 3), torch.tensor([True, True, False, True])).item() == pytest.approx(
        6 / 7
    )
    assert effective_sample_size(column(2, 2, 2, 2), everything).item() == 1.0
    assert effective_sample_size(column(0, 0, 5, 0), everything).item() == 0.25
    assert effective_sample_size(column(1, 1, 1, 1), ~everything).item() == 0.0
    assert effective_sample_size(column(0, 0, 0, 0), everything).item() == 0.0


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.floats(0.1, 10))
def test_effective_sample_size_lies_between_one_sample_and_all(weights: list[float], scale: float) -> None:
    weight, everything = column(*weights), torch.ones(len(weights), dtype=torch.bool)
    share = effective_sample_size(weight, everything).item()
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9
    assert effective_sample_size(scale * weight, everything).item() == pytest.approx(share)
