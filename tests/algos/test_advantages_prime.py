"""PRIME's advantage: golden numbers by hand, and what must not matter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from novarl.algos import advantages

GROUP = torch.tensor([5, -1, 5, 5])
OUTCOME = torch.tensor([1.0, 9.0, 0.0, 2.0], dtype=torch.float64)
TOKENS = torch.tensor([[1.0, 3.0, 0.0], [1.0, 1.0, 1.0], [4.0, 0.0, 0.0], [0.0, 0.0, 6.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True], [True, False, False], [True, True, True]])
"""Means 2, 4 and 2 in the group of three; the second trajectory is alone."""


def test_golden() -> None:
    """Outcomes less 1, 1.5 and 0.5 in the group; process rewards less (4 + 2)/2, (2 + 2)/2 and (2 + 4)/2, summed."""
    expected = [[-2.0, 0.0, 0.0], [0.0] * 3, [0.5, 0.0, 0.0], [-1.5, 1.5, 4.5]]
    assert advantages.prime(TOKENS, MASK, OUTCOME, GROUP).tolist() == expected


def test_golden_with_discount_and_coefficient() -> None:
    """Last: returns of -3, -3, 3 are -3.75, -1.5, 3; doubled, beside the outcome's 1.5."""
    advantage = advantages.prime(TOKENS, MASK, OUTCOME, GROUP, gamma=0.5, process_coef=2.0)
    assert advantage[3].tolist() == [-6.0, -1.5, 7.5]
    assert advantages.prime(TOKENS, MASK, OUTCOME, GROUP, process_coef=0.0)[3].tolist() == [1.5] * 3


@given(st.lists(st.integers(0, 3), max_size=4), st.sampled_from([1.0, 0.5]))
def test_masked_out_columns_change_nothing(places: list[int], gamma: float) -> None:
    def widened(column: Tensor, fill: float) -> Tensor:
        for place in sorted(places, reverse=True):
            column = torch.cat([column[:, :place], column.new_full((4, 1), fill), column[:, place:]], 1)
        return column

    hidden = torch.where(MASK, TOKENS, math.nan)
    ours = advantages.prime(widened(hidden, math.nan), widened(MASK, False), OUTCOME, GROUP, gamma=gamma)
    assert torch.equal(ours, widened(advantages.prime(TOKENS, MASK, OUTCOME, GROUP, gamma=gamma), 0.0))


def test_without_process_rewards_it_is_leave_one_out() -> None:
    advantage = advantages.prime(torch.zeros_like(TOKENS), MASK, OUTCOME, GROUP)
    assert torch.equal(advantage, advantages.leave_one_out(OUTCOME, GROUP)[:, None] * MASK)


def test_order_of_trajectories_does_not_matter() -> None:
    order = torch.tensor([2, 0, 3, 1])
    ours = advantages.prime(TOKENS[order], MASK[order], OUTCOME[order], GROUP[order])
    assert torch.equal(ours, advantages.prime(TOKENS, MASK, OUTCOME, GROUP)[order])


def test_a_trajectory_without_tokens_has_no_process_mean() -> None:
    """The others are compared with each other only; its outcome still counts."""
    mask = MASK.clone()
    mask[2] = False
    advantage = advantages.prime(TOKENS, mask, OUTCOME, GROUP)
    assert advantage[0].tolist() == [0.0, 1.0, 0.0]
    assert advantage[2].tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    advantage = advantages.prime(TOKENS.to(dtype).requires_grad_(), MASK, OUTCOME.to(dtype), GROUP)
    assert advantage.dtype == dtype and not advantage.requires_grad
    assert torch.equal(advantage.double(), advantages.prime(TOKENS, MASK, OUTCOME, GROUP))
