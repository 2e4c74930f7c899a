"""Constraints: golden steps, and a bandit trained by exact gradients that comes to rest at its limits.

That the multipliers converge to the exact ones, and the gradients' faults: tests/certificates/constraint_cases.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from novarl.control.constraints import Constraint, Lagrangian, QuadraticPenalty
from novarl.core.errors import NovaError
from novarl.learn.guard import backtrack, early_stop

REFERENCE = torch.tensor([0.3, 0.25, 0.2, 0.1, 0.1, 0.05], dtype=torch.float64)
REWARD = torch.tensor([0.0, 0.2, 0.1, 1.0, 0.7, 0.9], dtype=torch.float64)
LIMIT, FLOOR = 0.2, 0.8
DUALS: dict[str, dict[str, Any]] = {
    "projected": {},
    "softplus": {"dual": "softplus", "init": 0.5},
    "pid": {"kp": 0.1, "kd": 0.1},
}


def kl_of(p: Tensor) -> Tensor:
    return (p * (p / REFERENCE).log()).sum()


def entropy_of(p: Tensor) -> Tensor:
    return -(p * p.log()).sum()


def train(kl: Constraint | None, entropy: Constraint | None, *, steps: int = 1500) -> list[tuple[float, float, float]]:
    """(KL, H, J) after each step of a softmax bandit under descent of -J + lambda KL - nu H, from the reference.

    Each step measures, updates the multipliers and uses them in the next, as a run does.
    """
    logits, seen, multiplier, bonus = REFERENCE.log().requires_grad_(), [], 0.0, 0.0
    for _ in range(steps):
        p = logits.softmax(0)
        loss = multiplier * kl_of(p) - bonus * entropy_of(p) - (p * REWARD).sum()
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - gradient).detach().requires_grad_()
        p = logits.detach().softmax(0)
        seen.append((float(kl_of(p)), float(entropy_of(p)), float((p * REWARD).sum())))
        multiplier = kl.update(seen[-1][0]) if kl else 0.0
        bonus = entropy.update(seen[-1][1]) if entropy else 0.0
    return seen


def ceiling(**settings: Any) -> Lagrangian:
    return Lagrangian(sense="max", **({"limit": LIMIT, "lr": 0.02} | settings))


def rests_at(values: list[float], limit: float) -> bool:
    """Within 5 % over the last 200 steps."""
    return all(abs(value / limit - 1) <= 0.05 for value in values[-200:])


@pytest.fixture(scope="module")
def free() -> tuple[float, float, float]:
    return train(None, None)[-1]


@pytest.mark.parametrize("dual", DUALS)
def test_kl_comes_to_rest_at_its_limit(dual: str, free: tuple[float, float, float]) -> None:
    seen = train(ceiling(**DUALS[dual]), None)
    assert free[0] > 5 * LIMIT, "the limit binds"
    assert rests_at([kl for kl, _, _ in seen], LIMIT)
    assert 0.45 < seen[-1][2] < free[2], "and some reward is left"


@pytest.mark.parametrize("dual", DUALS)
def test_entropy_comes_to_rest_at_its_floor(dual: str, free: tuple[float, float, float]) -> None:
    seen = train(None, Lagrangian(limit=FLOOR, sense="min", lr=0.05, **DUALS[dual]))
    assert free[1] < FLOOR / 2
    assert rests_at([entropy for _, entropy, _ in seen], FLOOR)


def test_both_limits_hold_together() -> None:
    """KL = 0.4 alone leaves an entropy of 1.68: a floor of 1.72 binds as well, and one of 1.6 does not."""
    for floor, binds in ((1.72, True), (1.6, False)):
        kl, entropy = ceiling(limit=0.4), Lagrangian(limit=floor, sense="min", lr=0.05)
        seen = train(kl, entropy, steps=2000)
        assert rests_at([kl for kl, _, _ in seen], 0.4)
        assert seen[-1][1] == pytest.approx(floor if binds else 1.6835, rel=1e-3)
        assert (entropy.coef > 0.01) == binds and (binds or entropy.coef == 0)


def test_pid_swings_less() -> None:
    """Why it is there: the integrator overshoots, kp damps it."""
    overshoot = {
        dual: max(kl for kl, _, _ in train(ceiling(lr=0.05, init=0.0, **gains), None, steps=600))
        for dual, gains in (("projected", {}), ("pid", {"kp": 0.3, "kd": 1.0}))
    }
    assert overshoot["pid"] < 0.8 * overshoot["projected"]


class Hinge(Lagrangian):
    """The primal lambda max(0, KL - d), whose gradient is 0 within the limit."""

    def update(self, measured: float, n: int = 1) -> float:
        coef = Lagrangian.update(self, measured, n)
        return coef if self.violation > 0 else 0.0


class WrongSign(Lagrangian):
    def update(self, measured: float, n: int = 1) -> float:
        assert self.limit is not None
        return Lagrangian.update(self, 2 * self.limit - measured, n)


class Absolute(Lagrangian):
    def update(self, measured: float, n: int = 1) -> float:
        assert self.limit is not None
        return Lagrangian.update(self, self.limit + abs(measured - self.limit), n)


@pytest.mark.parametrize("faulty", [WrongSign, Absolute])
def test_planted_faults_do_not_come_to_rest(faulty: type[Lagrangian]) -> None:
    made = faulty(limit=LIMIT, sense="max", lr=0.02, init=0.1)
    assert not rests_at([kl for kl, _, _ in train(made, None)], LIMIT)


def test_a_hinge_chatters() -> None:
    """It hovers about the limit, but its coefficient jumps between 0 and the multiplier, step by step."""
    coefs: list[float] = []

    class Watched(Hinge):
        def update(self, measured: float, n: int = 1) -> float:
            coefs.append(Hinge.update(self, measured, n))
            return coefs[-1]

    train(Watched(limit=LIMIT, sense="max", lr=0.02, init=0.1), None)
    assert 0.0 in coefs[-200:] and max(coefs[-200:]) > 0.1
    sound = ceiling()
    train(sound, None)
    assert sound.coef > 0.1 and abs(sound.violation) < 0.05 * LIMIT


def test_quadratic_penalty_is_the_gradient_of_the_differentiable_one() -> None:
    """Along a whole run: same gradients, so the same policy; and it lets some violation stand."""
    penalty, weight = QuadraticPenalty(limit=LIMIT, sense="max", weight=5.0), 5.0
    logits = REFERENCE.log().requires_grad_()
    for step in range(300):
        p = logits.softmax(0)
        distance = kl_of(p)
        coef = penalty.update(distance.item())
        (ours,) = torch.autograd.grad(coef * distance, logits, retain_graph=True)
        (theirs,) = torch.autograd.grad(
            weight / 2 * (distance - LIMIT).clamp(min=0).square(), logits, retain_graph=True
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-15)
        (gradient,) = torch.autograd.grad(coef * distance - (p * REWARD).sum(), logits)
        logits = (logits - 0.5 * gradient).detach().requires_grad_()
        assert (coef == 0) == (distance <= LIMIT) and (step != 0 or coef == 0)
    assert 1.05 * LIMIT < distance.item() < 2 * LIMIT


def test_golden_multipliers() -> None:
    """Limit 0.2; 0.3, 0.1 and 9 are errors of 0.5, -0.5 and (at most) 1."""
    for measured, error in ((0.3, 0.5), (0.1, -0.5), (9.0, 1.0), (math.inf, 1.0)):
        assert ceiling(lr=0.1).update(measured) == pytest.approx(0.1 + 0.1 * error)
        soft = ceiling(lr=0.1, dual="softplus", init=math.log(2))  # l = 0, sigmoid 1/2
        assert soft.update(measured) == pytest.approx(math.log1p(math.exp(0.05 * error)))
    floor = Lagrangian(limit=0.2, sense="min", lr=0.1)
    assert floor.update(0.1) == pytest.approx(0.15) and floor.violation == pytest.approx(0.1)
    pid = ceiling(lr=0.1, kp=0.2, kd=0.3)
    got = [pid.update(measured) for measured in (0.3, 0.36, 0.22, 0.0)]
    assert got == pytest.approx([0.15 + 0.1, 0.23 + 0.16 + 0.3 * 0.3, 0.24 + 0.02, 0.0])
    assert pid.integral == pytest.approx(0.14)


def test_golden_penalty() -> None:
    penalty = QuadraticPenalty(limit=0.2, sense="max", weight=10.0)
    assert [penalty.update(value) for value in (0.25, 0.2, 0.1)] == pytest.approx([0.5, 0.0, 0.0])
    assert penalty.violation == pytest.approx(-0.1)
    assert QuadraticPenalty(limit=0.2, sense="min", weight=10.0).update(0.15) == pytest.approx(0.5)


def test_a_floor_relative_to_the_start_is_fixed_by_the_first_measurement_and_saved() -> None:
    floor = Lagrangian(fraction=0.5, sense="min")
    assert floor.update(math.nan) == 0.1 and floor.limit is None
    floor.update(2.0)
    assert floor.limit == 1.0 and floor.violation == -1.0
    resumed = Lagrangian(fraction=0.5, sense="min")
    resumed.load_state_dict(json.loads(json.dumps(floor.state_dict())))
    assert resumed.update(0.9) == floor.update(0.9) and resumed.limit == 1.0
    with pytest.raises(NovaError, match="first measurement"):
        Lagrangian(fraction=0.5, sense="min").update(0.0)


MAKERS: dict[str, Callable[[], Constraint]] = {
    **{dual: lambda gains=gains: ceiling(**gains) for dual, gains in DUALS.items()},
    "penalty": lambda: QuadraticPenalty(limit=LIMIT, sense="max"),
    "floor": lambda: Lagrangian(fraction=0.5, sense="min"),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=20), st.lists(st.floats(0.01, 5.0), max_size=10))
def test_state_survives_json_bit_by_bit(make: Callable[[], Constraint], past: list[float], rest: list[float]) -> None:
    made, resumed = make(), make()
    for measured in past:
        made.update(measured)
    resumed.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert [resumed.update(measured) for measured in rest] == [made.update(measured) for measured in rest]
    assert resumed.state_dict() == made.state_dict()


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@given(st.lists(st.floats(1e-6, 1e300), min_size=1))
def test_a_coefficient_is_never_negative_nor_above_its_bound(make: Callable[[], Constraint], seen: list[float]) -> None:
    made = make()
    assert all(0.0 <= made.update(measured) <= 100.0 for measured in seen)


@pytest.mark.parametrize("dual", DUALS)
def test_a_multiplier_at_its_ceiling_comes_down_at_once(dual: str) -> None:
    made = ceiling(**DUALS[dual], max_coef=1.0)
    for _ in range(1000):
        made.update(9.0)
    assert made.coef == pytest.approx(1.0)
    assert made.update(0.0) < 1.0


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_nan_changes_nothing(make: Callable[[], Constraint]) -> None:
    made = make()
    made.update(0.3)
    before = made.state_dict(), made.violation
    assert made.update(math.nan) == made.coef
    assert (made.state_dict(), made.violation) == before


def test_the_measure_is_compared_in_the_right_direction() -> None:
    assert [early_stop(kl, 0.1) for kl in (0.0, 0.1, 0.11, math.inf, math.nan)] == [False, False, True, True, True]


def test_backtrack_measures_from_the_largest_down_and_no_further_than_needed() -> None:
    asked: list[float] = []

    def quadratic(fraction: float) -> float:
        asked.append(fraction)
        return fraction**2

    assert backtrack(quadratic, 1.0) == 1.0 and asked == [1.0]
    asked.clear()
    assert backtrack(quadratic, 0.1) == 0.25 and asked == [1.0, 0.5, 0.25]
    asked.clear()
    assert backtrack(quadratic, 1e-9) == 0.0 and asked == [0.5**k for k in range(6)]
    assert backtrack(quadratic, 1e-9, halvings=20) == 0.5**15
    assert backtrack(lambda fraction: math.nan, 1.0) == 0.0
    assert backtrack(lambda fraction: math.nan if fraction > 0.5 else 0.0, 1.0) == 0.5


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: Lagrangian(sense="max"), "limit"),
        (lambda: Lagrangian(sense="min", limit=1.0, fraction=0.5), "limit"),
        (lambda: Lagrangian(sense="max", fraction=0.5), "fraction"),
        (lambda: Lagrangian(sense="min", fraction=1.5), "fraction"),
        (lambda: Lagrangian(sense="max", limit=0.0), "limit"),
        (lambda: QuadraticPenalty(sense="max", limit=math.nan), "limit"),
        (lambda: QuadraticPenalty(sense="max", limit=1.0, weight=0.0), "weight"),
        (lambda: Lagrangian(sense="most", limit=1.0), "sense"),  # type: ignore[arg-type]
        (lambda: Lagrangian(sense="max", limit=1.0, lr=-0.1), "lr"),
        (lambda: Lagrangian(sense="max", limit=1.0, kp=-0.1), "kp"),
        (lambda: Lagrangian(sense="max", limit=1.0, init=101.0), "init"),
        (lambda: Lagrangian(sense="max", limit=1.0, dual="log"), "dual"),  # type: ignore[arg-type]
        (lambda: Lagrangian(sense="max", limit=1.0, dual="softplus", kp=0.1), "dual"),
        (lambda: Lagrangian(sense="max", limit=1.0, dual="softplus", init=0.0), "init"),
        (lambda: ceiling().load_state_dict(QuadraticPenalty(sense="max", limit=1.0).state_dict()), "mode"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object], where: str) -> None:
    with pytest.raises(NovaError) as caught:
        make()
    assert caught.value.where == f"constraint.{where}" and caught.value.fix
