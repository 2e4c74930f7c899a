"""The family of surrogates: golden losses and slopes, what holds for every one of them, and derivatives by differences.

What their gradients are in expectation: tests/certificates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from novarl.algos import aggregate, surrogates
from novarl.algos.axes import SURROGATES, keywords
from novarl.algos.surrogates import gpg, gpg_alpha, reinforce

Surrogate = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def by_table(name: str) -> Surrogate:
    """A surrogate with the bounds that the table gives it."""
    row = SURROGATES[name]
    return partial(getattr(surrogates, row.function), **keywords(row.reads, row.reads))


cispo, dual_clip, gspo, ppo_clip, sapo = map(by_table, ("cispo", "dual_clip", "gspo", "ppo_clip", "sapo"))
TOKEN_WISE: dict[str, Surrogate] = {
    "reinforce": reinforce,
    "ppo_clip": partial(ppo_clip, clip_low=0.2, clip_high=0.28),
    "dual_clip": partial(dual_clip, clip_low=0.2, clip_high=0.28, clip_dual=1.6),
    "cispo": partial(cispo, clip_low=0.2, clip_high=0.28),
    "gpg": partial(gpg, alpha=1.0),
    "sapo": partial(sapo, tau_pos=1.0, tau_neg=1.5),
}
ALONE = {"gspo": lambda *columns, **options: gspo(*columns, sequence=torch.arange(len(columns[0])), **options)}
EVERY = pytest.mark.parametrize("surrogate", [*TOKEN_WISE.values(), gspo], ids=[*TOKEN_WISE, "gspo"])
BOUNDED = pytest.mark.parametrize("surrogate", [ppo_clip, dual_clip, gspo, cispo, sapo])
ROW = st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3), st.booleans())
TABLES = st.integers(1, 5).flatmap(
    lambda width: st.lists(st.lists(ROW, min_size=width, max_size=width), min_size=1, max_size=4)
)


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def everything(like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.bool)


def one_token(surrogate: Surrogate, ratio: float, advantage: float, **options: Any) -> tuple[float, float, bool]:
    """(loss, d loss / d log pi, clipped) where log pi = -1."""
    logp = column(-1.0).requires_grad_()
    loss, stats = surrogate(logp, column(-1.0 - math.log(ratio)), column(advantage), torch.tensor([True]), **options)
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    return loss.item(), slope.item(), bool(stats["clip_fraction"])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.5, 2.0, -2.56, 0.0, True),
        (9.0, 2.0, -2.56, 0.0, True),  # the third bound is not for good tokens
        (0.5, -2.0, 1.6, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False),  # too likely and bad: pulled back at full strength
        (2.9, -2.0, 5.8, 5.8, False),
        (4.0, -2.0, 6.0, 0.0, True),  # ... up to here
        (4.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_dual_clip_golden(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    """Bounds 0.8, 1.28 and 3."""
    found = one_token(dual_clip, ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert found == (pytest.approx(loss), pytest.approx(slope), clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.0, 2.0, 1.0, False),
        (1.2, -2.0, 1.2, False),
        (1.5, 2.0, 1.28, True),
        (1.5, -2.0, 1.28, True),
        (0.5, 2.0, 0.8, True),
        (0.5, 0.0, 0.8, False),
    ],
)
def test_cispo_golden(ratio: float, advantage: float, weight: float, clipped: bool) -> None:
    """-weight * A * log pi, log pi = -1: no gradient is ever taken away."""
    found = one_token(cispo, ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert found == (pytest.approx(weight * advantage), pytest.approx(-weight * advantage), clipped)


def test_cispo_has_no_lower_bound_by_default_and_5_above() -> None:
    assert one_token(cispo, 1e-3, 1.0)[1] == pytest.approx(-1e-3)
    assert one_token(cispo, 7.0, 1.0)[1] == pytest.approx(-5.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 3.0, -6.0, -3.0, False),  # 4/1 * 1/2 * 3
        (1.0, -3.0, 3.0, 3.0, False),  # 4/2 * 1/2 * 3
        (1 + math.log(3), 1.0, -3.0, -(1 + math.log(3)) * 0.75, False),  # sigmoid 3/4, slope 4 * 3/16
        (1 + math.log(9) / 2, -1.0, 1.8, (1 + math.log(9) / 2) * 0.36, True),  # sigmoid 0.9, slope 4 * 0.09 < 1/2
    ],
)
def test_sapo_golden(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    """Temperatures 1 and 2."""
    found = one_token(sapo, ratio, advantage, tau_pos=1.0, tau_neg=2.0)
    assert found == (pytest.approx(loss), pytest.approx(slope), clipped)


def test_sapo_defaults_are_those_of_the_paper() -> None:
    assert one_token(sapo, 1.0, 1.0)[0] == pytest.approx(-2.0)
    assert one_token(sapo, 1.0, -1.0)[0] == pytest.approx(2.0 / 1.05)


def test_gspo_golden() -> None:
    """Ratios 2 and 1/2 of one sequence: s = 1. Ratios 1.21 and 1 of another: s = 1.1. A sequence of one, 0.5: clipped.

    The slope at each token is -s A / length, once for each token that bears the loss, so -s A.
    """
    sequence = torch.tensor([7, 7, -2, 7, -2, 4])
    mask = torch.tensor([True, True, True, False, True, True])
    ratio = column(2.0, 0.5, 1.21, 99.0, 1.0, 0.5)
    logp = (column(-3, -3, -3, -3, -3, -3) + ratio.log()).requires_grad_()
    advantage = column(2.0, 2.0, 1.0, 5.0, 1.0, -1.0)
    loss, stats = gspo(
        logp, column(-3, -3, -3, -3, -3, -3), advantage, mask, sequence=sequence, clip_low=0.2, clip_high=0.2
    )
    assert loss.tolist() == pytest.approx([-2.0, -2.0, -1.1, 0.0, -1.1, 0.8])
    assert stats["clip_fraction"].tolist() == [False, False, False, False, False, True]
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    assert slope.tolist() == pytest.approx([-2.0, -2.0, -1.1, 0.0, -1.1, 0.0])


def test_gspo_defaults_are_those_of_the_paper() -> None:
    one = partial(one_token, ALONE["gspo"])
    assert [one(1.00039, 1.0)[2], one(1.00041, 1.0)[2]] == [False, True]
    assert [one(0.99971, -1.0)[2], one(0.99969, -1.0)[2]] == [False, True]


def test_gspo_under_sequence_aggregation_is_the_objective_of_the_paper() -> None:
    """(1/S) sum_i -min(s_i A_i, clip(s_i) A_i), for rows of 3, 1 and 2 tokens."""
    generator = torch.Generator().manual_seed(0)
    logp, old = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64).mul(0.3).sub(2)
    mask = torch.tensor([[1, 1, 1], [0, 1, 0], [1, 0, 1]]).bool()
    reward = column(1.0, -2.0, 0.5)
    loss, _ = gspo(logp, old, reward[:, None].expand(3, 3), mask, clip_low=0.1, clip_high=0.05)
    rows = torch.arange(3)[:, None].expand(3, 3)
    weight = aggregate.weights(mask.flatten(), rows.flatten(), how="sequence", trajectories=3, dtype=torch.float64)
    expected = 0.0
    for i in range(3):
        s = math.exp(sum(float(logp[i, t] - old[i, t]) for t in range(3) if mask[i, t]) / int(mask[i].sum()))
        a = float(reward[i])
        expected -= min(s * a, min(max(s, 0.9), 1.05) * a) / 3
    assert (loss.flatten() * weight).sum().item() == pytest.approx(expected, rel=1e-12)


def test_gpg_is_reinforce_times_alpha() -> None:
    logp, advantage, mask = column(-1.0, -2.0), column(2.0, -0.5), torch.tensor([True, True])
    assert gpg(logp, logp, advantage, mask, alpha=column(1.5)[0])[0].tolist() == [3.0, -1.5]
    assert torch.equal(gpg(logp, logp, advantage, mask)[0], reinforce(logp, logp, advantage, mask)[0])


def test_gpg_alpha_golden() -> None:
    """Three groups of which one is flat: 3/2; all flat: 1, for there is nothing to make up for."""
    group = torch.tensor([5, -1, 5, -1, 9, 9])
    assert gpg_alpha(column(1, 1, 1, 0, 0, 1), group).item() == 1.5
    assert gpg_alpha(column(1, 0, 1, 0, 2, 2), group).item() == 1.0
    assert gpg_alpha(column(1, 1, 0, 0, 2, 3), group).item() == 1.0
    assert gpg_alpha(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).item() == 1.0
    assert gpg_alpha(column(1, 2, 1), torch.tensor([0, 1, 0])).dtype == torch.float64


@EVERY
@pytest.mark.parametrize("junk", [0.0, 1e4, -1e4, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", ["logp", "old", "advantage", "all"])
def test_what_is_outside_the_mask_has_no_effect(surrogate: Surrogate, junk: float, where: str) -> None:
    mask = torch.tensor([[True, False, True], [False, True, False]])
    clean = {
        "logp": torch.tensor([[-1.0, -1.0, -2.0], [-1.0, -0.5, -1.0]], dtype=torch.float64),
        "old": torch.tensor([[-1.05, -1.0, -1.97], [-1.0, -0.6, -1.0]], dtype=torch.float64),
        "advantage": torch.tensor([[1.0, 0.0, 1.0], [0.0, -1.0, 0.0]], dtype=torch.float64),
    }
    dirty = {
        name: torch.where(mask, values, junk) if where in (name, "all") else values.clone()
        for name, values in clean.items()
    }
    results = []
    for inputs in (clean, dirty):
        logp = inputs["logp"].requires_grad_()
        loss, stats = surrogate(logp, inputs["old"], inputs["advantage"], mask)
        (slope,) = torch.autograd.grad(loss.sum(), logp)
        assert loss[~mask].eq(0).all() and slope[~mask].eq(0).all() and not stats["clip_fraction"][~mask].any()
        results.append((loss.detach(), slope, stats["clip_fraction"]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@EVERY
@given(table=TABLES)
def test_at_ratio_1_the_gradient_is_that_of_reinforce(
    surrogate: Surrogate, table: list[list[tuple[float, float, float, bool]]]
) -> None:
    """With one advantage for each row, as gspo needs it."""
    values = torch.tensor(table, dtype=torch.float64)
    logp, mask = values[..., 0].clone().requires_grad_(), values[..., 3].bool()
    advantage = values[:, :1, 2].expand_as(logp)
    found, expected = (
        torch.autograd.grad(each(logp, logp.detach(), advantage, mask)[0].sum(), logp)[0]
        for each in (surrogate, reinforce)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@EVERY
@given(table=TABLES)
def test_rows_and_packed_tokens_are_the_same(
    surrogate: Surrogate, table: list[list[tuple[float, float, float, bool]]]
) -> None:
    values = torch.tensor(table, dtype=torch.float64)
    columns = [values[..., 0], values[..., 1], values[..., 2], values[..., 3].bool()]
    ids = {"sequence": torch.arange(len(table), 0, -1)[:, None].expand_as(columns[0]) * 17}
    rows, _ = surrogate(*columns)
    order = torch.randperm(values[..., 0].numel(), generator=torch.Generator().manual_seed(len(table)))
    options = {"sequence": ids["sequence"].flatten()[order]} if surrogate is gspo else {}
    packed, _ = surrogate(*(each.flatten()[order] for each in columns), **options)
    torch.testing.assert_close(packed, rows.flatten()[order], rtol=1e-10, atol=1e-12)


@given(table=TABLES)
def test_dual_clip_is_ppo_but_for_what_is_bad_and_far(table: list[list[tuple[float, float, float, bool]]]) -> None:
    values = torch.tensor(table, dtype=torch.float64)
    columns = (values[..., 0], values[..., 1], values[..., 2], values[..., 3].bool())
    dual, plain = dual_clip(*columns, clip_dual=2.0)[0], ppo_clip(*columns)[0]
    assert torch.equal(dual, torch.minimum(plain, torch.where(columns[2] < 0, -2.0 * columns[2], math.inf)))


@pytest.mark.parametrize("surrogate", [ppo_clip, dual_clip, ALONE["gspo"], sapo, reinforce, gpg])
def test_derivatives_by_finite_differences(surrogate: Surrogate) -> None:
    """Away from the bounds' kinks, on both sides of them."""
    old = column(-1.0, -2.0, -0.7, -1.5, -1.2, -2.2)
    logp = (old + column(0.1, -0.1, 0.5, -0.5, 1.5, 0.0003)).requires_grad_()
    for sign in (1.0, -1.0):
        advantage = sign * column(1.0, 2.0, 0.5, 1.0, 0.7, 1.3)
        mask = torch.tensor([True, True, True, True, True, False])
        assert torch.autograd.gradcheck(lambda x, a=advantage, m=mask: surrogate(x, old, a, m)[0], logp, eps=1e-7)


def test_derivatives_of_gspo_by_finite_differences() -> None:
    old = column(-1.0, -2.0, -0.7, -1.5, -1.2)
    logp = (old + column(0.1, -0.15, 0.02, 0.3, 0.1)).requires_grad_()
    ids, advantage = torch.tensor([3, 1, 3, 1, 3]), column(1.0, -2.0, 0.5, 1.0, -0.7)
    mask = torch.tensor([True, True, True, True, False])
    assert torch.autograd.gradcheck(
        lambda x: gspo(x, old, advantage, mask, sequence=ids, clip_low=0.2, clip_high=0.2)[0], logp
    )


def test_derivatives_of_cispo_by_finite_differences() -> None:
    """Its weight is a number: the derivative is that of -w A log pi with w as it is."""
    old, mask = column(-1.0, -2.0, -1.5), torch.tensor([True, True, False])
    logp, advantage = (old + column(2.0, 2.5, 0.0)).requires_grad_(), column(1.0, -2.0, 3.0)
    assert torch.autograd.gradcheck(lambda x: cispo(x, old, advantage, mask)[0], logp)  # both at the bound, a constant


@BOUNDED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_ratio_overflows_where_the_loss_is_bounded(surrogate: Surrogate, dtype: torch.dtype) -> None:
    """A good token that has become e^1000 times likelier: bounded loss, no gradient, and no NaN from inf * 0."""
    logp = torch.tensor([[-1.0, -1e3]], dtype=dtype, requires_grad=True)
    old = torch.tensor([[-1e3, -1.0]], dtype=dtype)
    good = torch.ones(1, 2, dtype=dtype)
    loss, _ = surrogate(logp, old, good, everything(logp))
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    assert loss.isfinite().all() and slope.isfinite().all()


def test_dual_clip_and_sapo_bound_bad_tokens_too() -> None:
    for surrogate in (dual_clip, sapo, cispo):
        logp = column(-1.0).requires_grad_()
        loss, _ = surrogate(logp, column(-1e3), column(-1.0), torch.tensor([True]))
        (slope,) = torch.autograd.grad(loss.sum(), logp)
        assert loss.isfinite() and slope.item() == (5.0 if surrogate is cispo else 0.0)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_statistics_carry_no_gradient(surrogate: Surrogate, dtype: torch.dtype) -> None:
    logp = torch.tensor([[-1.0, -2.0]], dtype=dtype, requires_grad=True)
    loss, stats = surrogate(logp, logp.detach() - 0.1, torch.ones_like(logp), everything(logp))
    assert loss.dtype == dtype and stats["clip_fraction"].dtype == torch.bool
    assert all(not value.requires_grad and value.shape == logp.shape for value in stats.values())


@EVERY
def test_nothing_to_learn_from(surrogate: Surrogate) -> None:
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    loss, _ = surrogate(logp, logp.detach(), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    assert loss.eq(0).all() and slope.eq(0).all()


def test_what_makes_no_sense_is_refused() -> None:
    logp, mask = column(-1.0), torch.tensor([True])
    with pytest.raises(ValueError, match="pass `sequence` ids"):
        gspo(logp, logp, logp, mask)
    with pytest.raises(ValueError, match="clip_dual must be above 1, got 1"):
        dual_clip(logp, logp, logp, mask, clip_dual=1.0)
    with pytest.raises(ValueError, match="temperatures must be positive"):
        sapo(logp, logp, logp, mask, tau_neg=0.0)
