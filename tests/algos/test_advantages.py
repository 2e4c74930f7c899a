"""Golden numbers by hand, the definitions in plain Python, and properties, for every credit rule."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from novarl.algos import advantages

GROUPS = torch.tensor([7, -3, 7, 2**62, -3, 7])
REWARDS = torch.tensor([1.0, 2.0, 4.0, 5.0, 6.0, 1.0], dtype=torch.float64)
"""Three groups, interleaved: {1, 4, 1}, {2, 6}, {5}."""

Rule = Callable[[Tensor, Tensor], Tensor]
RULES: dict[str, Rule] = {
    "group": lambda r, g: advantages.group(r, g),
    "group_std": lambda r, g: advantages.group(r, g, norm_std=True),
    "leave_one_out": lambda r, g: advantages.leave_one_out(r, g),
    "batch": lambda r, g: advantages.batch(r, g),
    "reinforce_pp": lambda r, g: advantages.reinforce_pp(r, g),
    "opo": lambda r, g: advantages.opo(r, g, lengths=torch.full_like(g, 3)),
}
EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)

# Rewards as quarters, so that sums are exact and "equal" means equal.
QUARTERS = st.integers(-40, 40).map(lambda n: n / 4)
TRAJECTORIES = st.lists(st.tuples(QUARTERS, st.sampled_from([-(2**63), -1, 0, 3, 2**63 - 1])), min_size=1, max_size=12)


def columns(trajectories: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    rewards, groups = zip(*trajectories, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)


def members(rewards: Tensor, group: Tensor) -> list[list[float]]:
    """For each trajectory, the rewards of its group."""
    return [[float(r) for r, other in zip(rewards, group, strict=True) if other == own] for own in group]


def test_group_golden() -> None:
    """Means 2, 4, 5."""
    assert advantages.group(REWARDS, GROUPS).tolist() == [-1.0, -2.0, 2.0, 0.0, 2.0, -1.0]


def test_group_std_golden() -> None:
    """Sample deviations sqrt(((-1)^2 + 2^2 + (-1)^2) / 2) = sqrt 3 and sqrt((2^2 + 2^2) / 1) = sqrt 8, plus eps."""
    three, eight = math.sqrt(3) + 0.5, math.sqrt(8) + 0.5
    expected = [-1 / three, -2 / eight, 2 / three, 0.0, 2 / eight, -1 / three]
    assert advantages.group(REWARDS, GROUPS, norm_std=True, eps=0.5).tolist() == pytest.approx(expected)


def test_leave_one_out_golden() -> None:
    """1 - (4 + 1)/2, 2 - 6, 4 - (1 + 1)/2, nobody, 6 - 2, 1 - (1 + 4)/2."""
    expected = [-1.5, -4.0, 3.0, 0.0, 4.0, -1.5]
    assert advantages.leave_one_out(REWARDS, GROUPS).tolist() == pytest.approx(expected)


def test_batch_golden() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0])
    group = torch.tensor([3, -1, 3])
    assert advantages.batch(rewards, group).tolist() == [-2.0, -1.0, 3.0]
    assert advantages.batch(rewards[:1], group[:1]).tolist() == [0.0]
    root = math.sqrt(7)
    standard = advantages.batch(rewards, group, norm_std=True, eps=0.0).tolist()
    assert standard == pytest.approx([-2 / root, -1 / root, 3 / root])


def test_reinforce_pp_golden() -> None:
    """Centred -1, -2, 2, 0, 2, -1: squares 14, over 5."""
    expected = [a / (math.sqrt(2.8) + 0.5) for a in (-1, -2, 2, 0, 2, -1)]
    assert advantages.reinforce_pp(REWARDS, GROUPS, eps=0.5).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e30])
def test_rewards_of_any_size_are_scaled_alike(scale: float) -> None:
    """In 32 bits the squares of 1e30 are infinite: every advantage would be 0, and nothing learnt in silence."""
    rewards, group = torch.tensor([1.0, -1.0, 2.0, 4.0]) * scale, torch.tensor([0, 0, 1, 1])
    every = torch.ones(4, dtype=torch.bool)
    root = math.sqrt(2)
    for advantage, expected in (
        (advantages.group(rewards, group, norm_std=True, eps=0.0), [1 / root, -1 / root, -1 / root, 1 / root]),
        (
            advantages.reinforce_pp(rewards, group, eps=0.0),
            [a * math.sqrt(3) / 2 for a in (1, -1, -1, 1)],
        ),
        (advantages.whiten(rewards, every, eps=0.0), [a / math.sqrt(13 / 3) for a in (-0.5, -2.5, 0.5, 2.5)]),
    ):
        assert advantage.dtype == torch.float32
        assert advantage.tolist() == pytest.approx(expected)


def test_reinforce_pp_leaves_a_group_that_hardly_varies_small() -> None:
    """Where GRPO would make both groups look alike."""
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.51], dtype=torch.float64)
    advantage = advantages.reinforce_pp(rewards, torch.tensor([0, 0, 1, 1]))
    assert float(advantage[3] / advantage[1]) == pytest.approx(0.01)


def test_opo_golden() -> None:
    """Means weighted by length: (1 1 + 2 4 + 1 1)/4 = 2.5, (3 2 + 1 6)/4 = 3, and 5."""
    lengths = torch.tensor([1, 3, 2, 9, 1, 1])
    assert advantages.opo(REWARDS, GROUPS, lengths=lengths).tolist() == [-1.5, -1.0, 1.5, 0.0, 3.0, -1.5]


def test_opo_with_answers_of_no_token() -> None:
    rewards, group = torch.tensor([1.0, 3.0, 7.0]), torch.tensor([0, 0, 1])
    advantage = advantages.opo(rewards, group, lengths=torch.tensor([0, 2, 0]))
    assert advantage.tolist() == [-2.0, 0.0, 0.0]


@given(TRAJECTORIES)
def test_opo_of_equal_lengths_is_the_group_rule(trajectories: list[tuple[float, int]]) -> None:
    rewards, group = columns(trajectories)
    ours = advantages.opo(rewards, group, lengths=torch.full_like(group, 7))
    torch.testing.assert_close(ours, advantages.group(rewards, group), rtol=0, atol=1e-12)


def test_remax_is_the_greedy_baseline() -> None:
    assert advantages.remax is advantages.scst


def test_constant_and_scst_golden() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0])
    assert advantages.constant_baseline(rewards, 0.5).tolist() == [0.5, 1.5, 5.5]
    assert advantages.scst(rewards, torch.tensor([1.0, 4.0, 4.0])).tolist() == [0.0, -2.0, 2.0]


def test_ema_uses_the_average_of_the_past_and_then_updates_it() -> None:
    first, ema = advantages.ema_baseline(torch.tensor([1.0, 3.0]), None, beta=0.75)
    assert (first.tolist(), ema) == ([1.0, 3.0], 2.0)
    second, ema = advantages.ema_baseline(torch.tensor([6.0, 10.0]), ema, beta=0.75)
    assert (second.tolist(), ema) == ([4.0, 8.0], 0.75 * 2.0 + 0.25 * 8.0)
    nothing, after = advantages.ema_baseline(torch.empty(0), ema, beta=0.75)
    assert (nothing.tolist(), after) == ([], ema)


@given(TRAJECTORIES)
def test_definitions_in_plain_python(trajectories: list[tuple[float, int]]) -> None:
    rewards, group = columns(trajectories)
    rows = list(zip(rewards.tolist(), members(rewards, group), strict=True))
    centred = [r - statistics.fmean(others) for r, others in rows]
    deviations = [statistics.stdev(others) if len(others) > 1 else 0.0 for _, others in rows]
    alone = [0.0 if len(others) == 1 else r - (sum(others) - r) / (len(others) - 1) for r, others in rows]
    flat = {tuple(sorted(others)): len(set(others)) == 1 for _, others in rows}
    assert advantages.group(rewards, group).tolist() == pytest.approx(centred, abs=1e-12)
    standard = [a / (s + 1e-6) for a, s in zip(centred, deviations, strict=True)]
    assert advantages.group(rewards, group, norm_std=True).tolist() == pytest.approx(standard, abs=1e-9)
    assert advantages.leave_one_out(rewards, group).tolist() == pytest.approx(alone, abs=1e-12)
    by_group = {int(g): others for g, (_, others) in zip(group, rows, strict=True)}
    count = sum(flat[tuple(sorted(others))] for others in by_group.values())
    assert int(advantages.zero_variance_groups(rewards, group)) == count


@EVERY_RULE
@given(trajectories=TRAJECTORIES, data=st.data())
def test_order_and_names_of_groups_do_not_matter(
    rule: Rule, trajectories: list[tuple[float, int]], data: st.DataObject
) -> None:
    rewards, group = columns(trajectories)
    order = torch.tensor(data.draw(st.permutations(range(len(rewards)))))
    names = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, min_size=12, max_size=12))
    renamed = torch.tensor(names)[torch.unique(group, return_inverse=True)[1]]
    expected = rule(rewards, group)[order]
    torch.testing.assert_close(rule(rewards[order], group[order]), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(rule(rewards, renamed), rule(rewards, group), rtol=0, atol=1e-12)


@EVERY_RULE
@given(trajectories=TRAJECTORIES, shift=st.floats(-1e3, 1e3), scale=st.floats(0.1, 10.0))
def test_shift_and_scale(rule: Rule, trajectories: list[tuple[float, int]], shift: float, scale: float) -> None:
    """A constant added to all rewards changes nothing; a factor scales the advantage, unless it is standardised."""
    rewards, group = columns(trajectories)
    before = rule(rewards, group)
    torch.testing.assert_close(rule(rewards + shift, group), before, rtol=1e-6, atol=1e-6)
    factor = 1.0 if rule in (RULES["group_std"], RULES["reinforce_pp"]) else scale
    torch.testing.assert_close(rule(scale * rewards, group), factor * before, rtol=1e-4, atol=1e-9)


@EVERY_RULE
@given(value=st.floats(-1e6, 1e6), size=st.integers(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(rule: Rule, value: float, size: int, dtype: torch.dtype) -> None:
    rewards = torch.full((size,), value, dtype=dtype)
    advantage = rule(rewards, torch.full((size,), 5))
    assert advantage.dtype == dtype
    assert advantage.eq(0).all()


def test_the_mean_of_tenths_is_not_a_tenth() -> None:
    """Why rewards are shifted first: 0.1 + 0.1 + 0.1 is not 0.3, and over a tiny deviation the error is not small."""
    assert (0.1 + 0.1 + 0.1) / 3 != 0.1
    rewards, group = torch.full((3,), 0.1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    assert advantages.group(rewards, group, norm_std=True, eps=1e-300).tolist() == [0.0, 0.0, 0.0]


@given(TRAJECTORIES)
def test_leave_one_out_is_the_group_rule_scaled(trajectories: list[tuple[float, int]]) -> None:
    """RLOO = k/(k-1) (R - mean)."""
    rewards, group = columns(trajectories)
    size = torch.tensor([len(others) for others in members(rewards, group)], dtype=torch.float64)
    expected = advantages.group(rewards, group) * size / (size - 1).clamp(min=1)
    torch.testing.assert_close(advantages.leave_one_out(rewards, group), expected, rtol=0, atol=1e-12)


def test_whiten_golden() -> None:
    """1, 3, 8: mean 4, sample variance (9 + 1 + 16) / 2 = 13."""
    values = torch.tensor([[1.0, math.nan, 3.0], [math.inf, 8.0, -5.0]], dtype=torch.float64)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    root = math.sqrt(13)
    expected = torch.tensor([[-3 / root, 0.0, -1 / root], [0.0, 4 / root, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(advantages.whiten(values, mask), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_whiten_of_nothing_one_and_equals_is_zero(kept: int) -> None:
    values, mask = torch.full((4,), 0.1), torch.arange(4) < kept
    assert advantages.whiten(values, mask).tolist() == [0.0] * 4


@given(st.lists(QUARTERS, min_size=2, max_size=12))
def test_whitening_one_group_is_grpo(values: list[float]) -> None:
    rewards = torch.tensor(values, dtype=torch.float64)
    group, everything = torch.zeros(len(values), dtype=torch.int64), torch.ones(len(values), dtype=torch.bool)
    ours = advantages.whiten(rewards, everything, eps=1e-6)
    torch.testing.assert_close(ours, advantages.group(rewards, group, norm_std=True), rtol=0, atol=1e-12)


def test_zero_variance_groups_golden() -> None:
    """{1, 4, 1} and {2, 6} vary, {5} does not; with the first two 4s made 1s, one varies."""
    assert int(advantages.zero_variance_groups(REWARDS, GROUPS)) == 1
    assert int(advantages.zero_variance_groups(REWARDS.clamp(max=1.0), GROUPS)) == 3
    assert int(advantages.zero_variance_groups(torch.empty(0), torch.empty(0, dtype=torch.int64))) == 0


@EVERY_RULE
def test_no_trajectories(rule: Rule) -> None:
    assert rule(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)


@EVERY_RULE
def test_inputs_are_left_alone(rule: Rule) -> None:
    rewards, group = REWARDS.clone(), GROUPS.clone()
    rule(rewards, group)
    assert torch.equal(rewards, REWARDS) and torch.equal(group, GROUPS)
