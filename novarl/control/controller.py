"""What every controller of a coefficient is made of: bounds, memory, and for those with a target the check of it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NoReturn, Self

from novarl.core.errors import NovaError


@dataclass(slots=True, kw_only=True)
class Controller(ABC):
    """`coef` is the coefficient to use now. `initial` is the one the controller was made with."""

    memory: ClassVar[tuple[str, ...]] = ("coef",)
    """The attributes that a checkpoint holds."""
    gains: ClassVar[tuple[str, ...]] = ()
    """The settings that decide whether the loop settles."""
    section: ClassVar[str] = "kl"
    """Where errors say that the settings stand."""

    coef: float
    min_coef: float = 0.0
    max_coef: float = 100.0
    initial: float = field(init=False)

    def __post_init__(self) -> None:
        self.initial = self.coef
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, float) and not math.isfinite(value):
                self.refuse(spec.name, f"{spec.name}={value} is not a finite number", "give a finite number")
        self.check()
        if not 0 <= self.min_coef < self.max_coef:
            self.refuse(
                "min_coef",
                f"a coefficient cannot lie between {self.min_coef:g} and {self.max_coef:g}",
                "let 0 <= min_coef < max_coef",
            )
        if not self.min_coef <= self.coef <= self.max_coef:
            self.refuse(
                "coef",
                f"starts at {self.coef:g}, outside [{self.min_coef:g}, {self.max_coef:g}]",
                "start within min_coef and max_coef, or move them",
            )

    @abstractmethod
    def check(self) -> None:
        """Refuse settings that make no sense (NovaError)."""

    @abstractmethod
    def update(self, kl: float, n: int = 1) -> float:
        """The coefficient after a step of `n` episodes in which `kl` was measured, in the unit of the target."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values; with `load_state_dict` an exact round trip."""
        return {name: getattr(self, name) for name in self.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state_dict` was taken; refuses (NovaError) the state of another kind of controller."""
        if set(state) != set(self.memory):
            self.refuse(
                "controller",
                f"the checkpoint holds {sorted(state)}, and {type(self).__name__} keeps {sorted(self.memory)}",
                "resume with the controller that the run began with",
            )
        for name in self.memory:
            setattr(self, name, state[name])

    def reset(self) -> None:
        """Forget every update."""
        self.load_state_dict(self.started_at(self.initial).state_dict())

    def started_at(self, coef: float) -> Self:
        """A new controller of the same settings that has seen nothing and starts at `coef`."""
        return replace(self, coef=coef)

    def bounded(self, coef: float) -> float:
        return min(max(coef, self.min_coef), self.max_coef)

    def refuse(self, name: str, what: str, fix: str) -> NoReturn:
        """Raise the NovaError of one setting."""
        raise NovaError(what, where=f"{self.section}.{name}", fix=fix)

    def require(self, name: str, above: float = 0.0) -> None:
        """That a setting is larger than a bound."""
        value = getattr(self, name)
        if not value > above:
            self.refuse(name, f"{name}={value:g} must be above {above:g}", f"set {name} above {above:g}")


@dataclass(slots=True, kw_only=True)
class Adaptive(Controller):
    """A controller with a target for what it measures."""

    target: float = 0.01
    min_coef: float = 1e-4

    response: ClassVar[int] = -1
    """Whether what is measured falls (-1) or rises (+1) as the coefficient grows."""

    def check(self) -> None:
        self.require("target")
        if self.coef == 0:
            self.refuse(
                "coef",
                "an adaptive coefficient that starts at 0 stays at 0, since it is adapted by factors",
                "start above 0, or use the controller 'fixed'",
            )
        self.require("min_coef")
        self.check_gains()

    def check_gains(self) -> None:
        """Refuse gains that push the wrong way or not at all."""
        for name in self.gains:
            self.require(name)


@dataclass(slots=True, kw_only=True)
class Multiplicative(Adaptive):
    """An adaptive controller that remembers nothing but its coefficient."""

    def update(self, kl: float, n: int = 1) -> float:
        if not math.isnan(kl):
            self.coef = self.bounded(self.coef * self.multiplier(kl / self.target, n))
        return self.coef

    @abstractmethod
    def multiplier(self, ratio: float, n: int) -> float:
        """What the coefficient is multiplied by when the measured is `ratio` times its target."""


def clipped(value: float, bound: float) -> float:
    """The value within [-bound, bound]."""
    return min(max(value, -bound), bound)
