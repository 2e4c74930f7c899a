"""Constraints: maximise J subject to KL <= d and H >= H_0, by multipliers or a penalty.

The Lagrangian max_theta min_{lambda, nu >= 0} J - lambda (KL - d) - nu (H_0 - H) has, for given multipliers, the
gradient of

    J - lambda KL + nu H

So a constraint enters training as a coefficient: lambda is added to that of the KL term, nu to that of the entropy
bonus, and the terms themselves are differentiable. (A hinge, lambda max(0, KL - d), is no Lagrangian: within the limit
its gradient vanishes while lambda decays, and the run chatters.) An object here is asked once a step:

    constraint.update(measured, n=episodes) -> coef     `coef` is never negative; n is not read
    constraint.violation                                how far outside the limit the last measurement was, < 0 inside
    constraint.state_dict() / load_state_dict()         JSON values, an exact round trip

With v the violation (measured - limit for sense "max", limit - measured for "min"):

    Lagrangian          lambda follows v: holds the limit with equality where it binds, vanishes where it does not
    QuadraticPenalty    weight * max(0, v): the gradient of weight/2 max(0, v)^2; always lets a little violation stand

Both are soft: they act after the step that they judge. `learn.guard` has hard bounds on single steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NoReturn

from novarl.core.errors import NovaError

Sense = Literal["max", "min"]


def violation(measured: float, limit: float, sense: Sense) -> float:
    """How far the measured is on the wrong side: measured - limit for "max", the reverse for "min"."""
    return measured - limit if sense == "max" else limit - measured


def relative_error(excess: float, limit: float) -> float:
    """The violation over its limit, within [-1, 1]: what multipliers move by, so that no strange step decides a run."""
    return min(max(excess / limit, -1.0), 1.0)


@dataclass(slots=True, kw_only=True)
class Constraint(ABC):
    """A limit above 0 on something measured; `sense` "max": at most the limit, "min": at least.

    Instead of `limit`, `fraction` sets it to that part of the first measurement (for "min" only: an entropy floor
    relative to where the run began), and it is saved with the state. A NaN measurement changes nothing.
    """

    memory: ClassVar[tuple[str, ...]] = ("coef", "limit")
    """The attributes that a checkpoint holds."""

    sense: Sense
    limit: float | None = None
    fraction: float | None = None
    coef: float = field(init=False, default=0.0)
    violation: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        if self.sense not in ("max", "min"):
            self.refuse("sense", f"unknown sense '{self.sense}'", "use max or min")
        if (self.limit is None) == (self.fraction is None):
            self.refuse("limit", "a constraint has a limit, or a fraction of the first measurement", "give one of them")
        if self.fraction is not None and (self.sense == "max" or not 0 < self.fraction <= 1):
            self.refuse("fraction", "a fraction is of what must not fall too far", "use sense=min and one in (0, 1]")
        if self.limit is not None and not 0 < self.limit < math.inf:
            self.refuse("limit", f"limit={self.limit:g} is not a number above 0", "set one above 0")
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Refuse settings that make no sense (NovaError), and set the first coefficient."""

    @abstractmethod
    def respond(self, limit: float) -> float:
        """The coefficient that answers the violation just measured."""

    def update(self, measured: float, n: int = 1) -> float:
        """The coefficient after a step in which `measured` was seen, in the unit of the limit."""
        if math.isnan(measured):
            return self.coef
        if self.limit is None:
            self.limit = self._first(measured)
        self.violation = violation(measured, self.limit, self.sense)
        self.coef = self.respond(self.limit)
        return self.coef

    def _first(self, measured: float) -> float:
        """The limit, from the first measurement."""
        assert self.fraction is not None
        if not 0 < measured < math.inf:
            self.refuse("fraction", f"no fraction of {measured:g}, the first measurement, is a limit", "give a limit")
        return self.fraction * measured

    def state_dict(self) -> dict[str, Any]:
        """JSON values; with `load_state_dict` an exact round trip."""
        return {name: getattr(self, name) for name in self.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken; refuses (NovaError) the state of another kind of constraint."""
        if set(state) != set(self.memory):
            kept = f"the checkpoint holds {sorted(state)}, and {type(self).__name__} keeps {sorted(self.memory)}"
            self.refuse("mode", kept, "resume with the constraint that the run began with")
        for name in self.memory:
            setattr(self, name, state[name])

    def refuse(self, name: str, what: str, fix: str) -> NoReturn:
        """Raise the NovaError of one setting."""
        raise NovaError(what, where=f"constraint.{name}", fix=fix)

    def require(self, *names: str, zero: bool = False) -> None:
        """That settings are finite and above 0, or at least 0 where `zero` is allowed."""
        for name in names:
            value = getattr(self, name)
            if not ((value >= 0 if zero else value > 0) and value < math.inf):
                least = "at least" if zero else "above"
                self.refuse(name, f"{name}={value:g} must be finite and {least} 0", f"set {name} {least} 0")


@dataclass(slots=True, kw_only=True)
class Lagrangian(Constraint):
    """A multiplier by dual ascent on e = clip(v / limit, +-1), v the violation. In [0, max_coef].

        dual="projected"    I <- [I + lr e]+        lambda = [I + kp e + kd [e - e']+]+
        dual="softplus"     l <- l + lr e sigmoid(l)      lambda = log(1 + exp(l)): the gradient, and never 0

    kp and kd make the projected dual the PID of https://arxiv.org/abs/2007.03964 (algorithm 2, lr its K_I): the dual of
    a Lagrangian is an integrator and swings; kp damps it, kd answers to a violation that grows. I is kept within the
    bounds, so it does not wind up. A softplus multiplier moves by about lr e lambda^2 while it is small: it forgets a
    limit that did not bind as slowly as it learnt so. Dividing by the limit makes lr independent of the unit (it is
    dual ascent with rate lr / limit). The multiplier begins at `init`.
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
            self.refuse("init", f"init={self.init:g} is above max_coef={self.max_coef:g}", "start at or below it")
        self.coef = self.integral = self.init
        if self.dual == "softplus":
            if self.kp or self.kd:
                self.refuse(
                    "dual", "kp and kd are gains of the projected dual", "use dual=projected, or leave them out"
                )
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

    It is exact when the violation was measured on the policy that is being differentiated. (A penalty written
    p * violation^2, as enhanced RL2's `constraint_violation_penalty` p, is weight = 2 p.)
    """

    weight: float = 20.0
    max_coef: float = 100.0

    def check(self) -> None:
        self.require("weight", "max_coef")

    def respond(self, limit: float) -> float:
        return min(self.weight * max(self.violation, 0.0), self.max_coef)


def _sigmoid(x: float) -> float:
    return 0.5 * (1.0 + math.tanh(0.5 * x))
