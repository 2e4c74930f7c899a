"""The same of other families: absolute positions (GPT-2), where pad is eos, and a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from novarl.core.types import Batch
from novarl.distributed.ranks import Ranks
from novarl.models.forward import packs
from tests.distributed.fork import run
from tests.invariance.families import family_policy
from tests.invariance.gradients import LIMITS, Case, Gradients, distance, gradient, make_case
from tests.invariance.sharp import record

FAMILIES = pytest.mark.parametrize("family", ["gpt2", "moe"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def case_of(family: str, dtype: torch.dtype) -> Case:
    """Of the model's own rollouts."""
    scored = record(family_policy(family))
    return make_case(family_policy(family, dtype).model, scored, dtype)


@DTYPES
@FAMILIES
def test_neither_budget_nor_layout_matters(family: str, dtype: torch.dtype) -> None:
    case = case_of(family, dtype)
    assert packs(case.model)
    whole = gradient(case, layout="padded")
    for layout in ("packed", "padded"):
        for budget in (1, 100, 250):
            found = distance(gradient(case, layout=layout, budget=budget), whole)
            assert found.within(LIMITS[dtype]), (layout, budget, found)


def on_a_rank(ranks: Ranks, family: str) -> Gradients:
    return gradient(case_of(family, torch.float32), ranks=ranks)


@FAMILIES
def test_number_of_ranks_does_not_matter(family: str) -> None:
    """An expert to which one rank has sent no token has no gradient there: it counts as zero."""
    alone = gradient(case_of(family, torch.float32))
    for found in run(on_a_rank, family):
        assert distance(found, alone).within(LIMITS[torch.float32]), distance(found, alone)


def running_positions(batch: Batch) -> Batch:
    """Position ids that go on from one packed sequence to the next instead of starting again."""
    return replace(batch, position_ids=torch.arange(batch.tokens.numel()))


@DTYPES
def test_positions_that_are_not_reset_are_caught(dtype: torch.dtype) -> None:
    """GPT-2 shows it; rotary positions are relative, and would hide it."""
    case = case_of("gpt2", dtype)
    found = distance(gradient(case, spoil=running_positions), gradient(case))
    assert found.whole > 0.1, found
