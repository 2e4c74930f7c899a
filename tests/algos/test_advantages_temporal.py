"""Advantages over time: golden numbers by hand, the identities among the estimators, gaps, dtypes and mistakes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from novarl.algos import advantages
from novarl.core.errors import NovaError

Columns = dict[str, Tensor]
Estimator = Callable[..., tuple[Tensor, Tensor]]

REWARDS, VALUES, BOOTSTRAP = [1.0, 0.0, 2.0], [0.5, 1.0, 0.25], 0.5
RATIOS = [2.0, 0.5, 0.25]
"""With gamma = 1/2 the errors are delta = 1 + 1/2 - 1/2, 1/8 - 1, 2 + 1/4 - 1/4 = 1, -0.875, 2."""

ON_POLICY: dict[str, Estimator] = {
    "gae": advantages.gae,
    "monte_carlo": advantages.monte_carlo,
    "td_lambda": advantages.td_lambda,
    "n_step": partial(advantages.n_step, n=2),
}
OFF_POLICY: dict[str, Estimator] = {
    "vtrace": advantages.vtrace,
    "retrace": advantages.retrace,
    "clipped_is": advantages.clipped_is,
    "clipped_is, trajectory": partial(advantages.clipped_is, level="trajectory"),
}
SEGMENT: dict[str, Estimator] = {"segment_gae": advantages.segment_gae}
EVERY = pytest.mark.parametrize("name", [*ON_POLICY, *OFF_POLICY, *SEGMENT])


def estimate(name: str, columns: Columns, **options: Any) -> tuple[Tensor, Tensor]:
    """An estimator on those of the columns that it takes."""
    extra = {"logp", "behavior_logp"} if name in OFF_POLICY else {"segment"} if name in SEGMENT else set()
    taken = {
        key: column for key, column in columns.items() if key in {"rewards", "values", "mask", "bootstrap"} | extra
    }
    return (ON_POLICY | OFF_POLICY | SEGMENT)[name](**taken, **options)


def example() -> Columns:
    dtype = torch.float64
    return {
        "rewards": torch.tensor([REWARDS], dtype=dtype),
        "values": torch.tensor([VALUES], dtype=dtype),
        "mask": torch.ones(1, 3, dtype=torch.bool),
        "bootstrap": torch.tensor([BOOTSTRAP], dtype=dtype),
        "logp": torch.tensor([[math.log(ratio) for ratio in RATIOS]], dtype=dtype) - 1,
        "behavior_logp": torch.full((1, 3), -1.0, dtype=dtype),
        "segment": torch.tensor([[4, 4, 7]]),
    }


GOLDEN: dict[str, tuple[str, dict[str, Any], list[float], list[float]]] = {
    # A_1 = -0.875 + 2/4, A_0 = 1 - 0.375/4
    "gae": ("gae", {"lam": 0.5}, [0.90625, -0.375, 2.0], [1.40625, 0.625, 2.25]),
    "td_lambda": ("td_lambda", {"lam": 0.5}, [0.90625, -0.375, 2.0], [1.40625, 0.625, 2.25]),
    # G = 1 + 1.125/2, 2.25/2, 2 + 0.5/2
    "monte_carlo": ("monte_carlo", {}, [1.0625, 0.125, 2.0], [1.5625, 1.125, 2.25]),
    # G_0 = 1 + 0/2 + 0.25/4; the other two reach the bootstrap
    "n_step": ("n_step", {}, [0.5625, 0.125, 2.0], [1.0625, 1.125, 2.25]),
    # e_2 = 2/4, e_1 = -0.875/2 + e_2/8, e_0 = 1 + e_1/4; A_1 = (-0.875 + e_2/4)/2
    "vtrace": ("vtrace", {"lam": 0.5}, [0.90625, -0.375, 0.5], [1.40625, 0.625, 0.75]),
    # e_0 = 1.5 + 0.75 e_1/4, A_0 = 2 (1 + e_1/4)
    "vtrace, three bounds": (
        "vtrace",
        {"lam": 0.5, "rho_max": 1.5, "c_max": 0.75, "pg_rho_max": 3.0},
        [1.8125, -0.375, 0.5],
        [1.9296875, 0.625, 0.75],
    ),
    # A_1 = -0.875 + (1/4)(1/4) 2, A_0 = 1 + (1/4)(1/2) A_1
    "retrace": ("retrace", {"lam": 0.5}, [0.90625, -0.75, 2.0], [1.40625, 0.25, 2.25]),
    # G_2 = 2.25/4, G_1 = G_2/4, G_0 = 1 + G_1/2; A_1 = (G_2/2 - 1)/2
    "clipped_is": ("clipped_is", {}, [0.5703125, -0.359375, 0.5], [1.0703125, 0.140625, 0.5625]),
    # 2 (1/2) (1/4) = 1/4 of Monte Carlo's
    "clipped_is, trajectory": (
        "clipped_is, trajectory",
        {},
        [0.265625, 0.03125, 0.5],
        [0.765625, 1.03125, 0.75],
    ),
    "clipped_is, from below": (
        "clipped_is, trajectory",
        {"rho_min": 0.5},
        [0.53125, 0.0625, 1.0],
        [1.03125, 1.0625, 1.25],
    ),
    # delta = 1 + 0 + 0.25/2 - 0.5, 2; A_0 = 0.625 + 2/4
    "segment_gae": ("segment_gae", {"lam": 0.5}, [1.125, 1.125, 2.0], [1.625, 1.625, 2.25]),
    "segment_gae, VinePPO": ("segment_gae", {"gamma": 1.0, "lam": 0.0}, [0.75, 0.75, 2.25], [1.25, 1.25, 2.5]),
}


@pytest.mark.parametrize(("name", "options", "advantage", "returns"), GOLDEN.values(), ids=GOLDEN)
def test_golden(name: str, options: dict[str, Any], advantage: list[float], returns: list[float]) -> None:
    got = estimate(name, example(), **{"gamma": 0.5, **options})
    assert got[0][0].tolist() == pytest.approx(advantage, abs=1e-14)
    assert got[1][0].tolist() == pytest.approx(returns, abs=1e-14)


@st.composite
def batches(draw: st.DrawFn) -> Columns:
    """Up to four rows of up to nine columns; any mask, rewards outside it too, and nothing but NaN beside."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.tensor(
        draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def hidden(column: Tensor) -> Tensor:
        return torch.where(mask, column, math.nan)

    return {
        "rewards": normal(rows, width),
        "values": hidden(normal(rows, width)),
        "mask": mask,
        "bootstrap": normal(rows)
        * torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=rows, max_size=rows))),
        "logp": hidden(normal(rows, width) - 2),
        "behavior_logp": hidden(normal(rows, width) - 2),
        "segment": torch.where(mask, (normal(rows, width) > 0).cumsum(1), -99),
    }


def assert_close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=1e-10)


@given(batches(), st.sampled_from([0.0, 0.5, 0.95, 1.0]), st.sampled_from([1.0, 0.9]))
def test_on_policy_they_are_one(columns: Columns, lam: float, gamma: float) -> None:
    """V-trace's errors and advantages = Retrace = TD(lambda) = GAE."""
    on_policy = {**columns, "behavior_logp": columns["logp"]}
    advantage, returns = estimate("gae", columns, lam=lam, gamma=gamma)
    for name in ("td_lambda", "vtrace", "retrace"):
        ours, target = estimate(name, on_policy, lam=lam, gamma=gamma)
        assert_close(ours, advantage)
        assert_close(target, returns)
    errors = estimate("vtrace", on_policy, lam=lam, gamma=gamma)[1] - columns["values"].nan_to_num()
    assert_close(errors, advantage)


@given(batches(), st.sampled_from([1.0, 0.9]))
def test_the_ends_of_lambda_and_n(columns: Columns, gamma: float) -> None:
    """GAE(1) = MC - V = n-step with n >= T = importance sampling on policy; GAE(0) = delta = n-step with n = 1."""
    whole, single = estimate("gae", columns, lam=1.0, gamma=gamma), estimate("gae", columns, lam=0.0, gamma=gamma)
    on_policy = {**columns, "behavior_logp": columns["logp"]}
    width = columns["mask"].shape[1]
    for name, options in (("monte_carlo", {}), ("clipped_is", {}), ("clipped_is, trajectory", {})):
        for ours, expected in zip(estimate(name, on_policy, gamma=gamma, **options), whole, strict=True):
            assert_close(ours, expected)
    taken = {key: columns[key] for key in ("rewards", "values", "mask", "bootstrap")}
    for n, expected in ((1, single), (width, whole), (width + 5, whole)):
        assert_close(advantages.n_step(**taken, n=n, gamma=gamma)[0], expected[0])
        assert_close(advantages.n_step(**taken, n=n, gamma=gamma)[1], expected[1])
    assert_close(whole[1] - columns["values"].nan_to_num(), whole[0])


@given(batches(), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([1.0, 0.9]))
def test_segments_of_one_token_are_gae(columns: Columns, lam: float, gamma: float) -> None:
    single = {**columns, "segment": torch.arange(columns["mask"].shape[1]).expand_as(columns["mask"])}
    for ours, expected in zip(
        estimate("segment_gae", single, lam=lam, gamma=gamma),
        estimate("gae", columns, lam=lam, gamma=gamma),
        strict=True,
    ):
        assert_close(ours, expected)


@given(batches())
def test_segments_in_plain_python(columns: Columns) -> None:
    """A_i = r_i + V(s_{i+1}) - V(s_i), step by step."""
    advantage, _ = estimate("segment_gae", columns, lam=0.0)
    for row in range(len(advantage)):
        chosen = columns["mask"][row].nonzero().flatten().tolist()
        reward = dict.fromkeys(chosen, 0.0)
        for column, amount in enumerate(columns["rewards"][row].tolist()):
            if chosen:
                reward[max([c for c in chosen if c <= column], default=chosen[0])] += amount
        ids = columns["segment"][row].tolist()
        steps = [[c for c in chosen if ids[c] == name] for name in sorted({ids[c] for c in chosen})]
        values = [float(columns["values"][row, step[0]]) for step in steps] + [float(columns["bootstrap"][row])]
        for i, step in enumerate(steps):
            expected = sum(reward[c] for c in step) + values[i + 1] - values[i]
            assert advantage[row, step].tolist() == pytest.approx([expected] * len(step), abs=1e-10)


@EVERY
@given(columns=batches(), data=st.data())
@settings(max_examples=40)
def test_masked_out_columns_change_nothing(name: str, columns: Columns, data: st.DataObject) -> None:
    """Columns that the policy did not choose, inserted anywhere, with no reward in them."""
    rows, width = columns["mask"].shape
    places = sorted(data.draw(st.lists(st.integers(0, width), max_size=4)))

    def widened(key: str, column: Tensor) -> Tensor:
        if column.ndim == 1:
            return column
        fill = {"rewards": 0.0, "mask": False, "segment": 10**9}.get(key, math.nan)
        for place in reversed(places):
            column = torch.cat(
                [column[:, :place], torch.full((rows, 1), fill, dtype=column.dtype), column[:, place:]], 1
            )
        return column

    wide = {key: widened(key, column) for key, column in columns.items()}
    for ours, expected in zip(estimate(name, wide), estimate(name, columns), strict=True):
        assert torch.equal(ours, widened("rewards", expected))


@EVERY
def test_rewards_of_gaps_belong_to_the_step_before_them(name: str) -> None:
    mask = torch.tensor([[False, True, False, False, True, True, False]])
    scattered, gathered = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]]), torch.zeros(1, 7)
    gathered[0, [1, 4, 5]] = torch.tensor([1.0 + 2 + 4 + 8, 16, 32 + 64])
    columns = {
        "values": torch.randn(1, 7, generator=torch.Generator().manual_seed(0)),
        "mask": mask,
        "bootstrap": torch.tensor([3.0]),
        "logp": torch.full((1, 7), -1.0),
        "behavior_logp": torch.full((1, 7), -1.25),
        "segment": torch.tensor([[0, 0, 0, 0, 1, 1, 1]]),
    }
    ours = estimate(name, {**columns, "rewards": scattered}, gamma=0.5)
    expected = estimate(name, {**columns, "rewards": gathered}, gamma=0.5)
    assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])


@given(batches())
def test_no_reward_is_lost(columns: Columns) -> None:
    """The first return is everything in the row, wherever it lay; only a row without a step has none."""
    _, returns = estimate("monte_carlo", columns)
    some = columns["mask"].any(1)
    first = returns.gather(1, columns["mask"].int().argmax(1, keepdim=True))[:, 0]
    assert_close(first, torch.where(some, columns["rewards"].sum(1) + columns["bootstrap"], 0.0))


@EVERY
@given(columns=batches())
@settings(max_examples=20)
def test_zero_outside_the_mask_and_no_gradient(name: str, columns: Columns) -> None:
    live = {k: c.clone().requires_grad_() if c.is_floating_point() else c for k, c in columns.items()}
    before = {key: column.detach().clone() for key, column in live.items()}
    for result in estimate(name, live):
        assert result.shape == columns["mask"].shape
        assert result[~columns["mask"]].eq(0).all() and result.isfinite().all()
        assert not result.requires_grad
    for key, column in live.items():
        torch.testing.assert_close(column.detach(), before[key], rtol=0, atol=0, equal_nan=True)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """The same out as in, and half precision only rounds the result of a computation in float32."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    columns = {key: normal(2, 50) for key in ("rewards", "values", "logp", "behavior_logp")}
    columns |= {"mask": torch.rand(2, 50, generator=generator) < 0.8, "bootstrap": normal(2)}
    columns |= {"segment": torch.arange(50).div(4, rounding_mode="floor").expand(2, 50)}
    work = torch.promote_types(dtype, torch.float32)
    wider = {k: c.to(work) if c.is_floating_point() else c for k, c in columns.items()}
    for ours, expected in zip(estimate(name, columns), estimate(name, wider), strict=True):
        assert ours.dtype == dtype
        assert torch.equal(ours, expected.to(dtype))


@EVERY
@pytest.mark.parametrize(("rows", "width"), [(0, 3), (2, 0), (0, 0)])
def test_nothing_at_all(name: str, rows: int, width: int) -> None:
    columns = {key: column[:1].expand(rows, *column.shape[1:])[..., :width] for key, column in example().items()}
    columns["bootstrap"] = torch.zeros(rows, dtype=torch.float64)
    for result in estimate(name, columns):
        assert result.shape == (rows, width)


@pytest.mark.parametrize(
    ("changed", "options", "says"),
    [
        ({"mask": torch.ones(1, 3)}, {}, r"mask is torch.float32, not bool \(pass mask.bool\(\)\)"),
        ({"values": torch.ones(1, 4)}, {}, r"rewards \[1, 3\], values \[1, 4\], mask \[1, 3\] must all"),
        ({"bootstrap": torch.zeros(1, 1)}, {}, r"bootstrap has shape \[1, 1\], not \[1\]"),
    ],
)
def test_mistakes(changed: Columns, options: dict[str, Any], says: str) -> None:
    with pytest.raises(NovaError) as error:
        estimate("gae", {**example(), **changed}, **options)
    assert re.search(says, str(error.value))


def test_mistaken_options() -> None:
    taken = {key: example()[key] for key in ("rewards", "values", "mask", "bootstrap")}
    with pytest.raises(NovaError, match="n must be at least 1, not 0"):
        advantages.n_step(**taken, n=0)
    with pytest.raises(NovaError, match="unknown level 'token'"):
        advantages.clipped_is(**taken, logp=taken["values"], behavior_logp=taken["values"], level="token")  # type: ignore[arg-type]
