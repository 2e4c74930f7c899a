"""Constraints: maximise J subject to KL <= d and H >= H_0, with multipliers or a penalty.

The Lagrangian max_theta min_{lambda, nu >= 0} J - lambda (KL - d) - nu (H_0 - H) has, for given multipliers, the
gradient of J - lambda KL + nu H. So a constraint enters training as a coefficient, which is never negative and is
updated once per step: lambda is added to that of the KL term, nu to that of the entropy bonus. (A hinge, lambda max(0,
KL - d), is not a Lagrangian: within the limit its gradient vanishes while lambda decays, and training oscillates.)

Both kinds are soft: they act after the measured step. `learn.guard` has hard limits on single steps.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from novarl.control.controller import Adapting

Sense = Literal["max", "min"]


def violation(measured: float, limit: float, sense: Sense) -> float:
    """The violation: measured - limit for "max", limit - measured for "min"."""
    return measured - limit if sense == "max" else limit - measured


def relative_error(excess: float, limit: float) -> float:
    """The violation relative to its limit, clipped to [-1, 1] to limit the effect of outliers."""
    return min(max(excess / limit, -1.0), 1.0)


@dataclass(slots=True, kw_only=True)
class Constraint(Adapting):
    """A positive limit on a measured quantity; `sense` "max": at most the limit, "min": at least.

    Instead of `limit`, `fraction` sets the limit relative to the first measurement, which is saved with the state (only
    for "min"). NaN measurements are ignored.
    """

    memory: ClassVar[tuple[str, ...]] = ("coef", "limit")
    section: ClassVar[str] = "constraint"
    noun: ClassVar[str] = "constraint"
    chosen_by: ClassVar[str] = "mode"

    sense: Sense
    limit: float | None = None
    fraction: float | None = None
    coef: float = field(init=False, default=0.0)
    violation: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.sense not in ("max", "min"):
            self.refuse("sense", f"unknown sense '{self.sense}'", "use max or min")
        if (self.limit is None) == (self.fraction is None):
            self.refuse("limit", "a constraint needs a limit or a fraction of the first measurement", "set one of them")
        if self.fraction is not None and (self.sense == "max" or not 0 < self.fraction <= 1):
            self.refuse(
                "fraction", "a fraction is only valid for a lower limit", "use sense=min and a fraction in (0, 1]"
            )
        if self.limit is not None and not 0 < self.limit < math.inf:
            self.refuse("limit", f"limit={self.limit:g} must be a positive number", "set a limit above 0")
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Validate the settings (NovaError) and set the initial coefficient."""

    @abstractmethod
    def respond(self, limit: float) -> float:
        """The coefficient after the violation just measured."""

    def update(self, measured: float, n: int = 1) -> float:
        """Update with the value `measured` in a step, in the unit of the limit, and return the coefficient."""
        if math.isnan(measured):
            return self.coef
        if self.limit is None:
            self.limit = self._first(measured)
        self.violation = violation(measured, self.limit, self.sense)
        self.coef = self.respond(self.limit)
        return self.coef

    def _first(self, measured: float) -> float:
        """Compute the limit from the first measurement."""
        assert self.fraction is not None
        if not 0 < measured < math.inf:
            self.refuse(
                "fraction",
                f"the first measurement is {measured:g}, so a fraction of it is not a valid limit",
                "set a limit",
            )
        return self.fraction * measured

    def require(self, *names: str, zero: bool = False) -> None:
        """Check that settings are finite and above 0, or at least 0 with `zero`."""
        for name in names:
            value = getattr(self, name)
            if not ((value >= 0 if zero else value > 0) and value < math.inf):
                least = "at least" if zero else "above"
                self.refuse(name, f"{name}={value:g} must be finite and {least} 0", f"set {name} {least} 0")


@dataclass(slots=True, kw_only=True)
class Lagrangian(Constraint):
    """A multiplier in [0, max_coef], updated by dual ascent on e = clip(v / limit, +-1), v the violation.

        dual="projected"    I <- [I + lr e]+        lambda = [I + kp e + kd [e - e']+]+
        dual="softplus"     l <- l + lr e sigmoid(l)      lambda = log(1 + exp(l)): the gradient, and never 0

    kp and kd make the projected dual the PID of https://arxiv.org/abs/2007.03964 (algorithm 2, lr its K_I): plain dual
    ascent oscillates; kp damps it, kd reacts to growing violations. A small softplus multiplier rises as slowly as it
    has decayed. Dividing by the limit makes lr independent of the unit. It starts at `init`.
    """

    memory: ClassVar[tuple[str, ...]] = ("coef", "limit", "integral", "error")

    lr: float = 0.01
    dual: Literal["projected", "softplus"] = "projected"
    kp: float = 0.0
    kd: float = 0.0
    init: float = 0.1
    max_coef: float = 100.0
    integral: float = field(init=False, default=0.0)
    """I, or l for softplus."""
    error: float | None = field(init=False, default=None)
    """The last e."""

    def check(self) -> None:
        self.require("lr", "max_coef")
        self.require("kp", "kd", "init", zero=True)
        if self.init > self.max_coef:
            self.refuse("init", f"init={self.init:g} is above max_coef={self.max_coef:g}", "set init at or below it")
        self.coef = self.integral = self.init
        if self.dual == "softplus":
            if self.kp or self.kd:
                self.refuse("dual", "kp and kd require the projected dual", "use dual=projected, or remove them")
            self.require("init")
            self.integral = self.init + math.log(-math.expm1(-self.init))
        elif self.dual != "projected":
            self.refuse("dual", f"unknown dual '{self.dual}'", "use projected or softplus")

    def respond(self, limit: float) -> float:
        error = relative_error(self.violation, limit)
        if self.dual == "softplus":
            self.integral += self.lr * error * _sigmoid(self.integral)
            ceiling = self.max_coef + math.log(-math.expm1(-self.max_coef))
            self.integral = min(self.integral, ceiling)
            return min(max(self.integral, 0.0) + math.log1p(math.exp(-abs(self.integral))), self.max_coef)
        rise = 0.0 if self.error is None else max(error - self.error, 0.0)
        self.error = error
        self.integral = min(max(self.integral + self.lr * error, 0.0), self.max_coef)
        return min(max(self.integral + self.kp * error + self.kd * rise, 0.0), self.max_coef)


@dataclass(slots=True, kw_only=True)
class QuadraticPenalty(Constraint):
    """weight * max(0, violation), at most max_coef: as a coefficient, the gradient of weight/2 * max(0, violation)^2.

    It is exact if the violation was measured on the current policy. (A penalty p * violation^2, such as enhanced RL2's
    `constraint_violation_penalty` p, corresponds to weight = 2 p.)
    """

    weight: float = 20.0
    max_coef: float = 100.0

    def check(self) -> None:
        self.require("weight", "max_coef")

    def respond(self, limit: float) -> float:
        return min(self.weight * max(self.violation, 0.0), self.max_coef)


def _sigmoid(x: float) -> float:
    return 0.5 * (1.0 + math.tanh(0.5 * x))
