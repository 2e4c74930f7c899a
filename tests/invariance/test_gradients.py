"""The gradient of an update does not depend on how its batch was cut, laid out, or shared among ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from novarl.algos import aggregate
from novarl.core.types import Batch
from novarl.data.pack import select
from novarl.distributed.ranks import Ranks
from novarl.kernels import packing
from novarl.learn.plan import plan, trajectory_of_tokens
from novarl.learn.policy import PolicyLearner
from novarl.models import forward
from tests.distributed.fork import run
from tests.invariance.gradients import LIMITS, WHOLE, Case, Gradients, distance, gradient, sharp_case

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
AGGREGATIONS = pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
BUDGETS = (1, 30, 50, 120)
"""From one trajectory at a time to half the batch."""


@DTYPES
@AGGREGATIONS
def test_token_budget_does_not_matter(dtype: torch.dtype, aggregation: str) -> None:
    case = sharp_case(dtype, aggregation)
    whole = gradient(case)
    cuts = {budget: len(plan(case.batch, Ranks(), budget)) for budget in (*BUDGETS, WHOLE)}
    assert cuts[WHOLE] == 1 and cuts[1] == len(case.batch.reward) and len(set(cuts.values())) == len(cuts)
    for budget in BUDGETS:
        found = distance(gradient(case, budget=budget), whole)
        assert found.within(LIMITS[dtype]), (budget, found)


@DTYPES
@AGGREGATIONS
@pytest.mark.parametrize("short", [0, packing.SHORT])
def test_layout_does_not_matter(
    dtype: torch.dtype, aggregation: str, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where short sequences are padded and attended to in one call, which then is what the padded layout does."""
    monkeypatch.setattr(packing, "SHORT", short)
    case = sharp_case(dtype, aggregation)
    for budget in (WHOLE, 50):
        packed, padded = (gradient(case, layout=layout, budget=budget) for layout in ("packed", "padded"))
        found = distance(packed, padded)
        assert found.within(LIMITS[dtype]), (budget, found)
        assert found.whole > 0.0 or short, "the two layouts ran the same code"


def on_a_rank(ranks: Ranks, dtype: torch.dtype, aggregation: str, budget: int) -> tuple[int, Gradients]:
    case = sharp_case(dtype, aggregation)
    mine = sum(len(micro) for micro in plan(case.batch, ranks, budget))
    return mine, gradient(case, ranks=ranks, budget=budget)


@DTYPES
@AGGREGATIONS
def test_number_of_ranks_does_not_matter(dtype: torch.dtype, aggregation: str) -> None:
    case = sharp_case(dtype, aggregation)
    alone = gradient(case)
    (first, mine), (second, theirs) = run(on_a_rank, dtype, aggregation, 100)
    assert first and second and first + second == len(case.batch.reward), "both ranks must have work"
    assert all(torch.equal(mine[name], theirs[name]) for name in alone), "the ranks must step alike, to the bit"
    found = distance(mine, alone)
    assert found.within(LIMITS[dtype]), found


def test_more_ranks_than_work() -> None:
    """Three ranks and two trajectories: one rank has nothing to do, takes part, and gets the same gradient."""
    case = small_case()
    alone = gradient(case)
    parts = run(of_a_small_case, world=3)
    assert sorted(count for count, _ in parts) == [0, 1, 1]
    for _, found in parts:
        assert distance(found, alone).within(LIMITS[torch.float64])


def small_case() -> Case:
    """Two trajectories of one group, with different rewards."""
    case = sharp_case(torch.float64)
    rewards: dict[int, list[int]] = {}
    for index, (group, reward) in enumerate(zip(case.batch.group.tolist(), case.batch.reward.tolist(), strict=True)):
        rewards.setdefault(group, []).append(index)
        first = rewards[group][0]
        if case.batch.reward[first] != reward:
            return replace(case, batch=select(case.batch, [first, index])[0])
    raise AssertionError("no group varies")


def of_a_small_case(ranks: Ranks) -> tuple[int, Gradients]:
    case = small_case()
    return len(plan(case.batch, ranks, 1)), gradient(case, ranks=ranks)


class LocalDenominators(PolicyLearner):
    """The classic mistake: each micro-batch divides by its own count, and the results are averaged."""

    def update(self, batch: Batch, *rest: Any) -> Any:
        self.parts = len(plan(batch, self.ranks, self.budget))
        return super().update(batch, *rest)

    def _backward(self, part: Batch, index: Tensor, *, weight: Tensor, **rest: Any) -> Tensor:
        own = aggregate.weights(
            part.mask,
            trajectory_of_tokens(part),
            how=self.objective.aggregation,
            constant=self.objective.constant,
            trajectories=part.reward.numel(),
            dtype=weight.dtype,
        )
        return super()._backward(part, index, weight=weight.index_copy(0, index, own / self.parts), **rest)


@DTYPES
@AGGREGATIONS
def test_local_denominators_are_caught(dtype: torch.dtype, aggregation: str) -> None:
    case = sharp_case(dtype, aggregation)
    whole = gradient(case)
    assert distance(gradient(case, kind=LocalDenominators), whole).within(LIMITS[dtype]), "uncut, nothing is wrong"
    found = distance(gradient(case, kind=LocalDenominators, budget=50), whole)
    assert found.whole > 1000 * LIMITS[dtype].whole, found


def shifted_prev(batch: Batch) -> Batch:
    """Every token predicted one position too late: by itself."""
    return replace(batch, prev=torch.where(batch.prev < 0, batch.prev, batch.prev + 1))


def wider_mask(batch: Batch) -> Batch:
    """The last token of each prompt is trained on as well."""
    widened = batch.mask.clone()
    widened[:-1] |= batch.mask[1:] & (batch.prev[:-1] >= 0)
    return replace(batch, mask=widened)


@DTYPES
@pytest.mark.parametrize("fault", [shifted_prev, wider_mask])
def test_a_wrong_index_or_mask_is_caught(dtype: torch.dtype, fault: Callable[[Batch], Batch]) -> None:
    case = sharp_case(dtype)
    found = distance(gradient(case, budget=50, spoil=fault), gradient(case))
    assert found.whole > 1000 * LIMITS[dtype].whole, found


@DTYPES
def test_sequences_that_see_each_other_are_caught(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths are lost on the way to the attention, so that packed sequences read their neighbours."""
    case = sharp_case(dtype)
    padded = gradient(case, layout="padded")
    packed = forward._packed
    monkeypatch.setattr(
        forward, "_packed", lambda model, tokens, at, lengths, places: packed(model, tokens, at, [len(tokens)], places)
    )
    found = distance(gradient(case, layout="packed"), padded)
    assert found.whole > 1000 * LIMITS[dtype].whole, found
