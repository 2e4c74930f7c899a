"""What neighbours have in common is computed once, and the gradient is that of the whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from novarl.data.pack import select
from novarl.distributed.ranks import Ranks
from novarl.kernels import attention, packing, small_attention
from novarl.kernels.packing import Gathered, HeadRows
from novarl.kernels.prefix import Group, find_groups, unique_places
from novarl.learn import plan as planning
from novarl.learn.plan import plan
from novarl.learn.scorer import Scorer
from novarl.models import forward
from tests.invariance.families import family_policy
from tests.invariance.gradients import LIMITS, WHOLE, Case, Limits, distance, gradient, make_case, sharp_case
from tests.invariance.sharp import recorded

EXACT = {torch.float32: LIMITS[torch.float32], torch.float64: Limits(1e-10, 1e-10)}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def computed(case: Case) -> int:
    """How many tokens of the case's batch are computed."""
    lengths = case.batch.cu_seqlens.diff().tolist()
    return sum(group.tokens for group in find_groups(case.batch.tokens, case.batch.position_ids, lengths))


@DTYPES
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("short", [0, packing.SHORT])
@pytest.mark.parametrize("few", [0, small_attention.FEW])
def test_sharing_changes_no_gradient(
    dtype: torch.dtype, aggregation: str, short: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of trajectories of one and of two sequences, uncut and cut; in a call a group, and in one for short sequences;
    through PyTorch's kernel, and through small products."""
    case = sharp_case(dtype, aggregation)
    assert computed(case) < 0.7 * len(case.batch.tokens), "hardly anything is shared"
    monkeypatch.setattr(packing, "SHORT", 0)
    monkeypatch.setattr(small_attention, "FEW", 0)
    apart = gradient(case, layout="packed")
    monkeypatch.setattr(packing, "SHORT", short)
    monkeypatch.setattr(small_attention, "FEW", few)
    monkeypatch.setattr(small_attention, "SEVERAL", 1)
    for budget in (WHOLE, 60, 30):
        found = distance(gradient(case, layout="shared", budget=budget), apart)
        assert found.within(EXACT[dtype]), (budget, found)
        assert found.whole > 0.0, "the two layouts ran the same code"


@pytest.mark.parametrize("family", ["gpt2", "moe"])
def test_sharing_changes_no_gradient_of_other_families(family: str) -> None:
    """transformers' norms compute in float32, whatever the weights."""
    case = make_case(family_policy(family, torch.float64).model, recorded(), torch.float64)
    found = distance(gradient(case, layout="shared"), gradient(case, layout="packed"))
    assert found.whole > 0.0 and found.within(LIMITS[torch.float64]), found


def test_a_plan_counts_what_is_computed() -> None:
    batch = sharp_case(torch.float64).batch
    lengths = batch.cu_seqlens.diff().tolist()
    (whole,) = plan(batch, Ranks(), computed(sharp_case(torch.float64)))
    assert whole == list(range(len(batch.reward))), "the budget holds all of it, sharing, and not half of it without"
    assert sum(lengths) > computed(sharp_case(torch.float64))
    cut = plan(batch, Ranks(), 60)
    assert 1 < len(cut) < 8
    for neighbours in ({0, 1, 2}, {6, 7}, {9, 10, 11}, {12, 13}):  # which begin alike
        assert any(neighbours <= set(micro) for micro in cut), neighbours


def test_a_model_that_does_not_share_has_every_token_counted() -> None:
    batch = sharp_case(torch.float64).batch
    budget = 150
    assert len(plan(batch, Ranks(), budget)) == 1
    cut = plan(batch, Ranks(), budget, shares=False)
    assert len(cut) > 2
    widths = [select(batch, micro)[0].cu_seqlens.diff() for micro in cut]
    assert all(len(lengths) * lengths.max() <= budget for lengths in widths), "with what pads them"
    assert len({int(lengths.max()) for lengths in widths}) > 1
    assert sorted(one for micro in cut for one in micro) == [
        one for micro in plan(batch, Ranks(), budget) for one in micro
    ]
    model = sharp_case(torch.float64).model
    assert (
        Scorer(model).shares and not Scorer(model, layout="padded").shares and not Scorer(model, layout="packed").shares
    )


def test_one_template_leaves_the_ranks_even() -> None:
    """Short sequences of one template are one group, which the ranks share nevertheless."""
    batch = sharp_case(torch.float64).batch
    for size in (2, 3):
        costs = []
        for rank in range(size):
            mine = [one for micro in plan(batch, Ranks(rank, size), WHOLE) for one in micro]
            part, _ = select(batch, sorted(mine))
            costs.append(sum(group.tokens for group in planning._groups(part, True, join=False)))
        assert max(costs) < 1.1 * sum(costs) / size, costs


def changed(maker: str, change: Callable[[Gathered], Gathered]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in the steps that a function of `packing` plans."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        made = getattr(packing, maker)
        monkeypatch.setattr(packing, maker, lambda *args: change(made(*args)))

    return plant


def sees_its_neighbours(step: Gathered) -> Gathered:
    """Each sequence has the keys of the one before."""
    return replace(step, keys=rolled(step.keys, [(call.sequences, call.keys) for call in step.calls]))


def takes_its_neighbours(step: Gathered) -> Gathered:
    """What is found for a sequence is that of the one before."""
    return replace(step, queries=rolled(step.queries, [(call.sequences, call.queries) for call in step.calls]))


def rolled(places: Tensor, shapes: list[tuple[int, int]]) -> Tensor:
    parts = places.split([rows * width for rows, width in shapes])
    return torch.cat([part.view(shape).roll(1, 0).flatten() for part, shape in zip(parts, shapes, strict=True)])


def sees_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "past_mask", lambda queries, keys, like: like.new_zeros(queries, keys))


def sees_the_future_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small products."""

    def mix(q: Tensor, k: Tensor, v: Tensor, length: int, out: Tensor) -> Tensor:
        p = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
        torch.bmm(p, v, out=out)
        return p

    monkeypatch.setattr(small_attention, "_mix", mix)


def of_heads(change: Callable[[HeadRows], HeadRows]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in where single heads stand."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        made = Gathered._head_rows
        monkeypatch.setattr(Gathered, "_head_rows", lambda *given: change(made(*given)))

    return plant


def counts_copies(rows: HeadRows) -> HeadRows:
    """Queries that are there twice, and those that only pad, have gradients too."""
    return rows._replace(idle=rows.idle[:0])


def sees_another_head(rows: HeadRows) -> HeadRows:
    return rows._replace(keys=rows.keys.roll(1))


def on_the_row(change: Callable[[Tensor, list[Group]], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault in the positions of the unique tokens."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        row = forward._row
        monkeypatch.setattr(
            forward,
            "_row",
            lambda model, tokens, at, groups, places: row(model, tokens, change(at, groups), groups, places),
        )

    return plant


def later(at: Tensor, groups: list[Group]) -> Tensor:
    """The rests begin one position too late."""
    shifts = [shift for group in groups for shift in (*(0,) * group.prefix, *(1,) * (group.tokens - group.prefix))]
    return at + torch.tensor(shifts)


def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of what is shared comes from its first owner alone."""

    def sharing(model: nn.Module, tokens: Tensor, at: Tensor, lengths: list[int], places: Tensor) -> Tensor:
        hidden = honest(model, tokens, at, lengths, places)
        _, spread = unique_places(find_groups(tokens, at, lengths), tokens.device)
        seen: set[int] = set()
        first = [place not in seen and not seen.add(place) for place in spread[places].tolist()]  # type: ignore[func-returns-value]
        return torch.where(torch.tensor(first)[:, None], hidden, hidden.detach())

    honest = forward._sharing
    monkeypatch.setattr(forward, "_sharing", sharing)


@pytest.mark.parametrize(
    ("fault", "short", "few"),
    [
        (changed("_shared", sees_its_neighbours), 0, 0),
        (changed("_shared", takes_its_neighbours), 0, small_attention.FEW),
        (sees_the_future, 0, 0),
        (sees_the_future_of_few, 0, small_attention.FEW),
        (of_heads(counts_copies), 0, small_attention.FEW),
        (of_heads(counts_copies), packing.SHORT, small_attention.FEW),
        (of_heads(sees_another_head), 0, small_attention.FEW),
        (changed("_short", sees_its_neighbours), packing.SHORT, 0),
        (changed("_short", takes_its_neighbours), packing.SHORT, small_attention.FEW),
        (on_the_row(later), packing.SHORT, small_attention.FEW),
        (once, packing.SHORT, small_attention.FEW),
    ],
)
def test_faults_are_caught(
    fault: Callable[[pytest.MonkeyPatch], None], short: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = sharp_case(torch.float64)
    apart = gradient(case, layout="packed")
    monkeypatch.setattr(packing, "SHORT", short)
    monkeypatch.setattr(small_attention, "FEW", few)
    monkeypatch.setattr(small_attention, "SEVERAL", 1)
    fault(monkeypatch)
    assert distance(gradient(case, layout="shared"), apart).whole > 1e-6
