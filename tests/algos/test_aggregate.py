"""Golden weights, and that they are of the whole minibatch: slices add up, order and names do not matter."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st

from novarl.algos.aggregate import per_sequence, weights as _weights

weights = partial(_weights, dtype=torch.float64)

# Trajectory 5 has two sequences (positions 0..2 and 6..7), -1 has one, 9 is a greedy baseline that is never trained on.
MASK = torch.tensor([False, True, True, False, True, True, False, True, False, False])
OWNER = torch.tensor([5, 5, 5, -1, -1, -1, 5, 5, 9, 9])
TOKENS = st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=1, max_size=20)
HOW = pytest.mark.parametrize("how", ["token", "sequence", "constant"])


def test_token_golden() -> None:
    """Five masked tokens."""
    assert weights(MASK, OWNER, how="token", trajectories=2).tolist() == pytest.approx((MASK.double() / 5).tolist())


def test_sequence_golden() -> None:
    """Trajectory 5 has three masked tokens in two sequences, -1 has two: 1/(2 * 3) and 1/(2 * 2)."""
    expected = [0, 1 / 6, 1 / 6, 0, 1 / 4, 1 / 4, 0, 1 / 6, 0, 0]
    assert weights(MASK, OWNER, how="sequence", trajectories=2).tolist() == pytest.approx(expected)


def test_constant_golden() -> None:
    """Two trajectories: 1/2 with constant 1, the sum over tokens; 1/20 with max_tokens 10."""
    assert weights(MASK, OWNER, how="constant", trajectories=2).tolist() == (MASK.double() / 2).tolist()
    by_ten = weights(MASK, OWNER, how="constant", constant=10.0, trajectories=2)
    assert by_ten.tolist() == pytest.approx((MASK.double() / 20).tolist())


@HOW
@given(tokens=TOKENS, data=st.data())
def test_order_and_names_do_not_matter(how: str, tokens: list[tuple[bool, int]], data: st.DataObject) -> None:
    mask, owner = (torch.tensor(values) for values in zip(*tokens, strict=True))
    order = torch.tensor(data.draw(st.permutations(range(len(tokens)))))
    weight = weights(mask, owner, how=how, trajectories=4, constant=3.0)
    moved = weights(mask[order], owner[order] * 1_000_003 - 17, how=how, trajectories=4, constant=3.0)
    assert torch.equal(moved, weight[order])
    assert weight[~mask].eq(0).all() and (weight[mask] > 0).all()


@given(TOKENS)
def test_token_and_sequence_weights_are_means(tokens: list[tuple[bool, int]]) -> None:
    """They add up to 1 over tokens, and to 1/R over each of R trajectories that have any."""
    mask, owner = (torch.tensor(values) for values in zip(*tokens, strict=True))
    alive = owner[mask].unique()
    if len(alive) == 0:
        assert weights(mask, owner, how="token", trajectories=1).eq(0).all()
        return
    assert weights(mask, owner, how="token", trajectories=len(alive)).sum().item() == pytest.approx(1.0)
    by_sequence = weights(mask, owner, how="sequence", trajectories=len(alive))
    assert [by_sequence[owner == name].sum().item() for name in alive] == pytest.approx([1 / len(alive)] * len(alive))


@HOW
def test_nothing_to_weigh(how: str) -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    assert weights(nothing, torch.arange(3), how=how, trajectories=0).tolist() == [0.0, 0.0, 0.0]


@HOW
def test_dtype(how: str) -> None:
    assert _weights(MASK, OWNER, how=how, trajectories=2).dtype == torch.float32
    assert weights(MASK, OWNER, how=how, trajectories=2).dtype == torch.float64


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown aggregation 'mean'"):
        weights(MASK, OWNER, how="mean", trajectories=2)
    with pytest.raises(ValueError, match="must be positive, got 0"):
        weights(MASK, OWNER, how="constant", constant=0.0, trajectories=2)


def test_per_sequence_golden() -> None:
    """Sums in the order of the ids; 9 has no masked token and is still there."""
    values = torch.arange(10, dtype=torch.float64)
    sums, index = per_sequence(values, MASK, OWNER)
    assert sums.tolist() == [4 + 5, 1 + 2 + 7, 0]
    assert index.tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 2, 2]


def test_per_sequence_of_rows() -> None:
    values, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[True, True], [False, True]])
    sums, index = per_sequence(values, mask)
    assert sums.tolist() == [3.0, 4.0] and index.tolist() == [[0, 0], [1, 1]]
    with_ids, _ = per_sequence(values, mask, torch.tensor([[4, 2], [4, 4]]))
    assert with_ids.tolist() == [2.0, 5.0]


@given(TOKENS, st.sampled_from([math.inf, -math.inf, math.nan]))
def test_per_sequence_sees_nothing_outside_the_mask(tokens: list[tuple[bool, int]], junk: float) -> None:
    mask, owner = (torch.tensor(values) for values in zip(*tokens, strict=True))
    values = torch.where(mask, torch.arange(len(tokens), dtype=torch.float64), junk).requires_grad_()
    sums, index = per_sequence(values, mask, owner)
    expected = [sum(t for t, (on, name) in enumerate(tokens) if on and name == i) for i in owner.unique().tolist()]
    assert sums.tolist() == expected
    assert torch.equal(owner.unique()[index], owner)
    (slope,) = torch.autograd.grad(sums.sum(), values)
    assert torch.equal(slope, mask.double())


def test_per_sequence_needs_to_know_the_sequences() -> None:
    with pytest.raises(ValueError, match=r"pass `sequence` ids for values of shape \[3\]"):
        per_sequence(torch.zeros(3), torch.ones(3, dtype=torch.bool))
