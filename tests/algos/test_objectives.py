"""Several objectives: golden weights, the sign that went wrong elsewhere, and what no improvement may do."""

from __future__ import annotations

import json
import math
import re
from typing import Any, get_args

import pytest
import torch
from hypothesis import assume, given, strategies as st

from novarl.control.objectives import (
    Method,
    Objective,
    Objectives,
    augmented_tchebycheff,
    combine,
    ideal_point,
    maximised,
    score,
    smooth_tchebycheff,
    tchebycheff,
    weighted_sum,
)
from novarl.core.errors import NovaError

METHODS = get_args(Method)
MU, RHO = 0.5, 0.1
NUMBER = st.floats(-5, 5)
CASES = st.integers(1, 4).flatmap(
    lambda k: st.tuples(
        st.lists(NUMBER, min_size=k, max_size=k),
        st.lists(NUMBER, min_size=k, max_size=k),
        st.lists(st.just(0.0) | st.floats(0.01, 3), min_size=k, max_size=k).filter(any),
    )
)


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def weights_of(method: str, estimates: torch.Tensor, ideal: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    match method:
        case "weighted_sum":
            return weighted_sum(estimates, ideal, weights)
        case "tchebycheff":
            return tchebycheff(estimates, ideal, weights)
        case "augmented_tchebycheff":
            return augmented_tchebycheff(estimates, ideal, weights, rho=RHO)
    return smooth_tchebycheff(estimates, ideal, weights, mu=MU)


def reward_and_kl(method: Method = "weighted_sum", **options: Any) -> Objectives:
    return Objectives([Objective("reward", "max", 1.0), Objective("kl", "min", 0.5)], method, **options)


def test_golden_weights() -> None:
    """Regrets 2 x (1 - 0.5) = 1 and 1 x (3 - 1) = 2; mu = 1/log 2 makes the odds of the softmax 2 : 4."""
    state = row(0.5, 1.0), row(1.0, 3.0), row(2.0, 1.0)
    assert weighted_sum(*state).tolist() == [2.0, 1.0]
    assert tchebycheff(*state).tolist() == [0.0, 1.0]
    assert augmented_tchebycheff(*state, rho=0.25).tolist() == [0.5, 1.25]
    assert smooth_tchebycheff(*state, mu=1 / math.log(2)).tolist() == pytest.approx([2 / 3, 2 / 3])


def test_golden_scores() -> None:
    state = row(0.5, 1.0), row(1.0, 3.0), row(2.0, 1.0)
    assert score(*state, method="weighted_sum").item() == 2.0
    assert score(*state, method="tchebycheff").item() == -2.0
    assert score(*state, method="augmented_tchebycheff", rho=0.25).item() == -2.75
    assert score(*state, method="smooth_tchebycheff", mu=1 / math.log(2)).item() == pytest.approx(-math.log2(6))


def test_equal_regrets_share() -> None:
    assert tchebycheff(row(0, 0), row(1, 1), row(1, 1)).tolist() == [0.5, 0.5]


def test_what_has_no_weight_is_never_the_worst() -> None:
    """Its regret of 0 would otherwise be larger than those of objectives past their ideals."""
    state = row(3.0, 0.0), row(1.0, 9.0), row(1.0, 0.0)
    assert tchebycheff(*state).tolist() == [1.0, 0.0]
    assert smooth_tchebycheff(*state, mu=0.1).tolist() == [1.0, 0.0]
    assert score(*state, method="smooth_tchebycheff").item() == pytest.approx(2.0)


@pytest.mark.parametrize("method", METHODS)
@given(case=CASES, data=st.data())
def test_improving_one_objective_never_lowers_the_score(
    method: str, case: tuple[list[float], list[float], list[float]], data: st.DataObject
) -> None:
    """Also past the ideal, where a regret with an absolute value would turn round."""
    estimates, ideal, weights = (row(*values) for values in case)
    better = estimates.clone()
    better[data.draw(st.integers(0, len(better) - 1))] += data.draw(st.floats(0, 10))
    before, after = (score(j, ideal, weights, method=method, mu=MU, rho=RHO) for j in (estimates, better))
    assert after >= before - 1e-12


@pytest.mark.parametrize("method", METHODS)
@given(case=CASES)
def test_the_weights_are_the_gradient_of_the_score(
    method: str, case: tuple[list[float], list[float], list[float]]
) -> None:
    estimates, ideal, weights = (row(*values) for values in case)
    regret = (weights * (ideal - estimates))[weights > 0]
    assume((regret == regret.max()).sum() == 1)
    estimates.requires_grad_()
    (gradient,) = torch.autograd.grad(score(estimates, ideal, weights, method=method, mu=MU, rho=RHO), estimates)
    g = weights_of(method, estimates.detach(), ideal, weights)
    torch.testing.assert_close(g, gradient, rtol=1e-12, atol=1e-12)
    assert (g >= 0).all()


def test_smooth_lies_between_plain_and_weighted_sum() -> None:
    state = row(0.5, 1.0, 0.0), row(1.0, 3.0, 0.9), row(2.0, 1.0, 1.5)
    torch.testing.assert_close(smooth_tchebycheff(*state, mu=1e-3), tchebycheff(*state))
    torch.testing.assert_close(smooth_tchebycheff(*state, mu=1e9), weighted_sum(*state) / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    estimates, weights = torch.rand(3, dtype=dtype), torch.ones(3, dtype=torch.float64)
    for method in METHODS:
        assert weights_of(method, estimates, estimates + 1, weights).dtype == dtype
        assert score(estimates, estimates + 1, weights, method=method).dtype == dtype
    assert combine(torch.rand(3, 5, dtype=dtype), weights).dtype == dtype


def test_combine() -> None:
    advantages = torch.tensor([[1.0, -1.0], [10.0, 0.0]])
    assert combine(advantages, row(2.0, 0.5)).tolist() == [7.0, -2.0]
    assert combine(advantages, row(2.0, 0.5)).tolist() == (row(2.0, 0.5) @ advantages.double()).tolist()


def test_turned_round_and_ideal() -> None:
    assert maximised(row(1.0, 2.0), ["max", "min"]).tolist() == [1.0, -2.0]
    assert ideal_point(row(1.0, 2.0), row(3.0, 1.0)).tolist() == [3.0, 2.0]


@pytest.mark.parametrize("method", METHODS)
def test_good_beats_bad(method: Method) -> None:
    """Reward 1 and KL 0.01 against reward 0 and KL 1: elsewhere the bad one had the lower loss."""

    def after(means: list[float]) -> float:
        objectives = reward_and_kl(method, beta=0.0)
        objectives.observe([0.5, 0.5], [0.5, 0.5])
        objectives.observe(means, [0.5, 0.5])
        return objectives.score()

    assert after([1.0, 0.01]) > after([0.0, 1.0])


@pytest.mark.parametrize("method", METHODS)
def test_weights_of_raw_values_push_the_right_way(method: Method) -> None:
    objectives = reward_and_kl(method)
    objectives.observe([0.5, 0.4], [0.5, 0.2])
    reward, kl = objectives.observe([0.5, 0.4], [0.5, 0.2])
    assert reward > 0 > kl, "regrets are equal: both count"


def test_golden_observations() -> None:
    """beta 0.5: means 1, then (1 + 3)/2 = 2; variances 4, then (4 + 16)/2 = 10; the KL has got worse since."""
    objectives = reward_and_kl(beta=0.5)
    assert objectives.observe([1.0, 2.0], [2.0, 1.0]) == pytest.approx([1 / 2, -0.5])
    assert objectives.observe([3.0, 4.0], [4.0, 0.0]) == pytest.approx([1 / 10**0.5, -0.5 * 2**0.5])
    state = objectives.state_dict()
    assert state == {
        "names": ["reward", "kl"],
        "steps": 2,
        "mean": [2.0, 3.0],
        "variance": [10.0, 0.5],
        "best": [2.0, -2.0],
    }
    assert objectives.score() == pytest.approx(2 / 10**0.5 - 0.5 * 3 * 2**0.5)


def test_the_worst_off_gets_the_weight() -> None:
    """After the KL has risen above its best, Tchebycheff turns to it, and back once the reward has fallen further."""
    objectives = reward_and_kl("tchebycheff", beta=0.0)
    objectives.observe([1.0, 1.0], [1.0, 1.0])
    assert objectives.observe([1.0, 2.0], [1.0, 1.0]) == [0.0, -0.5]
    assert objectives.observe([0.0, 2.0], [1.0, 1.0]) == [1.0, 0.0]


def test_an_ideal_that_is_known() -> None:
    """Without it an objective that never got anywhere has no regret; with it, the largest."""
    plain, known = (
        Objectives(
            [Objective("accuracy", "max", ideal=ideal), Objective("kl", "min", ideal=ideal and 0.0)], "tchebycheff"
        )
        for ideal in (None, 1.0)
    )
    for objectives in (plain, known):
        objectives.observe([0.1, 0.2], [0.5, 0.5])
    assert plain.observe([0.1, 0.25], [0.5, 0.5]) == [0.0, -2.0]
    assert known.observe([0.1, 0.25], [0.5, 0.5]) == [2.0, 0.0]


def test_an_ideal_that_is_surpassed_moves() -> None:
    objectives = Objectives([Objective("r", "max", ideal=1.0)], "tchebycheff", beta=0.0)
    objectives.observe([3.0], [1.0])
    objectives.observe([2.0], [1.0])
    assert objectives.score() == -1.0


@pytest.mark.parametrize("method", METHODS)
def test_units_do_not_matter(method: Method) -> None:
    """Measured in thousandths, the weights are a thousandth: what they make of the values is the same."""
    metres, millimetres = (reward_and_kl(method, mu=MU, rho=RHO) for _ in range(2))
    for means, deviations in (([1.0, 0.5], [1.0, 0.1]), ([0.8, 0.3], [0.5, 0.2]), ([1.1, 0.45], [0.7, 0.1])):
        one = metres.observe(means, deviations)
        other = millimetres.observe([1000 * m for m in means], [1000 * d for d in deviations])
        assert [1000 * weight for weight in other] == pytest.approx(one, rel=1e-9)
        assert millimetres.score() == pytest.approx(metres.score(), rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_what_never_varied_has_no_weight_yet(method: Method) -> None:
    objectives = Objectives([Objective("solved", "max", ideal=1.0), Objective("length", "min")], method)
    assert objectives.weights() == [0.0, 0.0] and objectives.score() == 0.0
    assert objectives.observe([0.3, 5.0], [1e-17, 0.0]) == [0.0, 0.0]
    solved, length = objectives.observe([0.3, 5.0], [1e-17, 2.0])
    assert solved == 0.0 and length <= -(0.5**0.5) + 1e-9, "what is out of reach must not share the weight of the rest"
    assert objectives.observe([0.35, 5.0], [0.1, 2.0])[0] > 0


def test_a_single_loss_after_many_wins_does_not_outweigh_the_rest() -> None:
    """100 steps of winning everything, then one lost of 16: its weight is within what 1 / sqrt(steps) allows."""
    objectives = reward_and_kl()
    first, _ = objectives.observe([0.5, 0.5], [0.5, 0.5])
    for _ in range(99):
        objectives.observe([1.0, 0.5], [0.0, 0.5])
    assert objectives.observe([15 / 16, 0.5], [0.242, 0.5])[0] <= first * 101**0.5


@pytest.mark.parametrize("method", METHODS)
def test_state_goes_through_json_and_on(method: Method) -> None:
    straight, first, second = (reward_and_kl(method) for _ in range(3))
    steps = [([1.0, 0.5], [1.0, 0.1]), ([0.8, 0.3], [0.5, 0.2]), ([1.1, 0.45], [0.7, 0.1]), ([0.2, 0.1], [0.3, 0.3])]
    whole = [straight.observe(*step) for step in steps]
    assert [first.observe(*step) for step in steps[:2]] == whole[:2]
    state = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(state)
    assert second.weights() == whole[1]
    assert [second.observe(*step) for step in steps[2:]] == whole[2:]
    assert state == json.loads(json.dumps(first.state_dict())), "the state that was loaded is nobody's to change"


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: Objective("kl", None), "invalid direction"),  # type: ignore[arg-type]
        (lambda: Objective("kl", "down"), "invalid direction"),  # type: ignore[arg-type]
        (lambda: Objective("kl_penalty", "max", -0.1), r"at least 0.*direction min and weight 0.1"),
        (lambda: Objective("kl", "min", math.nan), "finite weight"),
        (lambda: Objective("kl", "min", 1.0, math.inf), "ideal"),
        (lambda: Objectives([]), "needs a weight above 0"),
        (lambda: Objectives([Objective("kl", "min", 0.0)]), "needs a weight above 0"),
        (lambda: Objectives([Objective("kl", "min"), Objective("kl", "max")]), "declared twice"),
        (lambda: reward_and_kl("hypervolume"), "unknown method"),  # type: ignore[arg-type]
        (lambda: reward_and_kl(mu=0.0), "mu > 0"),
        (lambda: reward_and_kl(beta=1.0), "beta < 1"),
        (lambda: reward_and_kl().observe([math.nan, 0.0], [1.0, 1.0]), "objective 'reward'"),
        (lambda: reward_and_kl().observe([0.0, 0.0], [1.0, -1.0]), "objective 'kl'"),
        (lambda: reward_and_kl().load_state_dict({"names": ["reward"]}), "reward, kl"),
    ],
)
def test_mistakes_are_said(mistake: Any, words: str) -> None:
    with pytest.raises(NovaError) as caught:
        mistake()
    assert re.search(words, str(caught.value))


def test_an_unknown_score_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown method"):
        score(row(0.0), row(0.0), row(1.0), method="hypervolume")
