"""Certificates of the constraints: their coefficients lead to the constrained optimum, and their gradients are right.

"converges": the bandit is solved exactly for the coefficient of the moment, the constraint is told what was measured,
and so on; the multiplier must come to rest at the one that the exact side finds by bisection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from novarl.control import constraints
from novarl.control.constraints import Constraint, Lagrangian, QuadraticPenalty
from novarl.learn import guard
from tests.certificates import constraint_exact as exact
from tests.certificates.certificate import Certificate
from tests.certificates.constraint_exact import REFERENCE, REWARD
from tests.certificates.fault import Fault, Function, instead, planted, scaled

KL_LIMIT, LOOSE, FLOOR = 0.15, 3.0, 0.9
"""A limit on KL that binds and one that does not (the best arm is at KL -log 0.12 = 2.1), and a floor of entropy."""
STEP = torch.tensor([-1.0, 0.4, 2.0, 0.7, -0.3], dtype=torch.float64)
STEP_LIMITS = (1.0, 0.2, 0.05, 0.01, 1e-3, 1e-6)
INSIDE, OUTSIDE = 0.5, 1.4
"""Measurements over the limit, for the gradients on either side of it."""


def numbers(*values: float | Tensor) -> Tensor:
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def converged(measure: Callable[[float], Tensor], constraint: Constraint) -> Tensor:
    """(what is measured, the coefficient) after 600 rounds of exact response and update."""
    for _ in range(600):
        constraint.update(float(measure(constraint.coef)))
    return numbers(measure(constraint.coef), constraint.coef)


def kl_at(multiplier: float) -> Tensor:
    return exact.kl(exact.optimum(multiplier), REFERENCE)


def entropy_at(nu: float) -> Tensor:
    return exact.entropy(exact.optimum(0.0, nu))


def convergence() -> list[Certificate]:
    def binding(**dual: Any) -> Callable[[], Tensor]:
        return lambda: converged(kl_at, Lagrangian(limit=KL_LIMIT, sense="max", **dual))

    def held() -> Tensor:
        return numbers(KL_LIMIT, exact.bisected(kl_at, KL_LIMIT, falling=True))

    def floored() -> Tensor:
        return numbers(FLOOR, exact.bisected(entropy_at, FLOOR, falling=False))

    def half_floored() -> Tensor:
        floor = 0.5 * float(entropy_at(2.0))
        return numbers(floor, exact.bisected(entropy_at, floor, falling=False))

    claim = "KL = d, lambda by bisection"
    return [
        Certificate("KL <= d, projected dual, converges", claim, binding(lr=0.05, init=2.0), held),
        Certificate("KL <= d, softplus dual, converges", claim, binding(lr=0.1, dual="softplus", init=1.0), held),
        Certificate("KL <= d, PID dual, converges", claim, binding(lr=0.05, kp=0.05, kd=0.02), held),
        Certificate(
            "KL <= d where it does not bind",
            "KL = -log ref(best), lambda = 0",
            lambda: converged(kl_at, Lagrangian(limit=LOOSE, sense="max", lr=0.05)),
            lambda: numbers(-REFERENCE[REWARD.argmax()].log(), 0.0),
        ),
        Certificate(
            "H >= H_0 converges",
            "H = H_0, nu by bisection",
            lambda: converged(entropy_at, Lagrangian(limit=FLOOR, sense="min", lr=0.05)),
            floored,
        ),
        Certificate(
            "H >= half of the first H converges",
            "H = H(first) / 2, nu by bisection",
            lambda: converged(entropy_at, Lagrangian(fraction=0.5, sense="min", lr=0.05, init=2.0)),
            half_floored,
        ),
    ]


def updated_gradient(constraint: Constraint, measured: float) -> Tensor:
    """The gradient of -J + coef KL after one update, as a run would take it."""
    coef = constraint.update(measured)
    return exact.gradient(lambda p: coef * exact.kl(p, REFERENCE) - (p * REWARD).sum())


def lagrangian_gradient(multiplier: float) -> Tensor:
    return exact.gradient(lambda p: multiplier * (exact.kl(p, REFERENCE) - KL_LIMIT) - (p * REWARD).sum())


def penalty_gradient(limit: float) -> Tensor:
    return exact.gradient(
        lambda p: 20.0 / 2 * (exact.kl(p, REFERENCE) - limit).clamp(min=0.0).square() - (p * REWARD).sum()
    )


def gradients() -> list[Certificate]:
    here = float(exact.kl(exact.START.softmax(0), REFERENCE))
    claim = "grad(-J + lambda (KL - d))"

    def multiplier() -> Lagrangian:
        return Lagrangian(limit=KL_LIMIT, sense="max", lr=0.1, init=0.6)

    def penalty(limit: float) -> Callable[[], Tensor]:
        return lambda: updated_gradient(QuadraticPenalty(limit=limit, sense="max", weight=20.0), here)

    return [
        Certificate(
            "Lagrangian's gradient within the limit",
            claim,
            lambda: updated_gradient(multiplier(), INSIDE * KL_LIMIT),
            lambda: lagrangian_gradient(0.6 - 0.1 * 0.5),
        ),
        Certificate(
            "Lagrangian's gradient past the limit",
            claim,
            lambda: updated_gradient(multiplier(), OUTSIDE * KL_LIMIT),
            lambda: lagrangian_gradient(0.6 + 0.1 * 0.4),
        ),
        Certificate(
            "quadratic penalty past the limit",
            "grad(-J + weight/2 max(0, KL - d)^2)",
            penalty(0.5 * here),
            lambda: penalty_gradient(0.5 * here),
        ),
        Certificate(
            "quadratic penalty within the limit", "grad(-J)", penalty(2 * here), lambda: penalty_gradient(2 * here)
        ),
    ]


def steps() -> list[Certificate]:
    def accepted() -> Tensor:
        return numbers(*[guard.backtrack(lambda f: float(exact.along(STEP, f)), limit) for limit in STEP_LIMITS])

    def largest() -> Tensor:
        within = [[f for f in exact_fractions if float(exact.along(STEP, f)) <= limit] for limit in STEP_LIMITS]
        return numbers(*[max(fractions, default=0.0) for fractions in within])

    exact_fractions = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)
    return [
        Certificate("backtrack", "max {f in 1, 1/2, ..., 1/32: KL(old || old + f step) <= d}, or 0", accepted, largest),
        Certificate(
            "early_stop",
            "1[KL(old || old + step) > d]",
            lambda: numbers(*[guard.early_stop(float(exact.along(STEP, 1.0)), limit) for limit in STEP_LIMITS]),
            lambda: (exact.along(STEP, 1.0) > torch.tensor(STEP_LIMITS, dtype=torch.float64)).double(),
        ),
    ]


def certificates() -> list[Certificate]:
    return [*convergence(), *gradients(), *steps()]


def absolute(function: Function) -> Function:
    return lambda *arguments: abs(function(*arguments))


def hinge(update: Function) -> Function:
    """The primal lambda max(0, KL - d): no gradient within the limit."""

    def faulty(self: Lagrangian, measured: float, n: int = 1) -> float:
        self.coef = update(self, measured, n) if measured > KL_LIMIT else 0.0 * update(self, measured, n)
        return self.coef

    return faulty


def last_accepted(measure: Callable[[float], float], limit: float, *, halvings: int = 5) -> float:
    return next((0.5**h for h in range(halvings, -1, -1) if measure(0.5**h) <= limit), 0.0)


def full_step_anyway(function: Function) -> Function:
    return lambda measure, limit: function(measure, limit) or 1.0


FAULTS: list[Fault] = [
    *planted(
        constraints,
        "violation",
        ("sign", scaled(-1.0), "KL <= d, projected dual, converges"),
        ("sign", scaled(-1.0), "quadratic penalty past the limit"),
        ("absolute value", absolute, "KL <= d, projected dual, converges"),
        ("absolute value", absolute, "quadratic penalty within the limit"),
        ("never inside the limit", lambda f: lambda *a: max(f(*a), 0.0), "KL <= d where it does not bind"),
        ("sign", scaled(-1.0), "KL <= d, softplus dual, converges"),
        ("a floor taken for a ceiling", lambda f: lambda m, limit, _: f(m, limit, "max"), "H >= H_0 converges"),
    ),
    *planted(
        constraints,
        "relative_error",
        ("sign", scaled(-1.0), "KL <= d, PID dual, converges"),
        ("absolute value", absolute, "H >= half of the first H converges"),
        ("not divided by the limit", instead(lambda excess, _: excess), "Lagrangian's gradient past the limit"),
    ),
    *planted(
        constraints.Lagrangian,
        "update",
        ("a hinge for primal", hinge, "Lagrangian's gradient within the limit"),
        ("a hinge for primal", hinge, "KL <= d, projected dual, converges"),
    ),
    *planted(
        constraints.QuadraticPenalty, "respond", ("without its half", scaled(2.0), "quadratic penalty past the limit")
    ),
    *planted(
        guard,
        "backtrack",
        ("the smallest step", instead(last_accepted), "backtrack"),
        ("the full step where none fits", full_step_anyway, "backtrack"),
    ),
    *planted(guard, "early_stop", ("the other way round", lambda f: lambda *a: not f(*a), "early_stop")),
]
"""That of every public function and of both coefficients."""
