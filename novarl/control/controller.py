"""Base classes of controllers and constraints: bounds, state, and validation of targets."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NoReturn, Self

from novarl.core.errors import NovaError


@dataclass(slots=True, kw_only=True)
class Adapting(ABC):
    """What adapts a coefficient during a run."""

    memory: ClassVar[tuple[str, ...]] = ("coef",)
    """The attributes saved in checkpoints."""
    section: ClassVar[str]
    """The configuration section for error messages."""
    noun: ClassVar[str]
    chosen_by: ClassVar[str]
    """The setting that chooses the type."""

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values. The round trip through `load_state_dict` is exact."""
        return {name: getattr(self, name) for name in self.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raises NovaError for the state of another type."""
        if set(state) != set(self.memory):
            kept = f"the checkpoint contains {sorted(state)}, but {type(self).__name__} has {sorted(self.memory)}"
            self.refuse(self.chosen_by, kept, f"resume with the original {self.noun}")
        for name in self.memory:
            setattr(self, name, state[name])

    def refuse(self, name: str, what: str, fix: str) -> NoReturn:
        """Raise a NovaError for a setting."""
        raise NovaError(what, where=f"{self.section}.{name}", fix=fix)


@dataclass(slots=True, kw_only=True)
class Controller(Adapting):
    """`coef` is the current coefficient, `initial` the one the controller was created with."""

    gains: ClassVar[tuple[str, ...]] = ()
    """The settings that determine stability."""
    section: ClassVar[str] = "kl"
    noun: ClassVar[str] = "controller"
    chosen_by: ClassVar[str] = "controller"

    coef: float
    min_coef: float = 0.0
    max_coef: float = 100.0
    initial: float = field(init=False)

    def __post_init__(self) -> None:
        self.initial = self.coef
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, float) and not math.isfinite(value):
                self.refuse(spec.name, f"{spec.name}={value} is not a finite number", "use a finite number")
        self.check()
        if not 0 <= self.min_coef < self.max_coef:
            self.refuse(
                "min_coef",
                f"invalid range from {self.min_coef:g} to {self.max_coef:g}",
                "set 0 <= min_coef < max_coef",
            )
        if not self.min_coef <= self.coef <= self.max_coef:
            self.refuse(
                "coef",
                f"starts at {self.coef:g}, outside [{self.min_coef:g}, {self.max_coef:g}]",
                "start between min_coef and max_coef, or change them",
            )

    @abstractmethod
    def check(self) -> None:
        """Validate the settings (NovaError)."""

    @abstractmethod
    def update(self, kl: float, n: int = 1) -> float:
        """Update with the `kl` (in the unit of the target) of a step of `n` episodes, and return the coefficient."""

    def reset(self) -> None:
        """Reset to the initial state."""
        self.load_state_dict(self.started_at(self.initial).state_dict())

    def started_at(self, coef: float) -> Self:
        """A new controller with the same settings that starts at `coef`."""
        return replace(self, coef=coef)

    def bounded(self, coef: float) -> float:
        return min(max(coef, self.min_coef), self.max_coef)

    def require(self, name: str, above: float = 0.0) -> None:
        """Check that a setting is above a bound."""
        value = getattr(self, name)
        if not value > above:
            self.refuse(name, f"{name}={value:g} must be above {above:g}", f"set {name} above {above:g}")


@dataclass(slots=True, kw_only=True)
class Adaptive(Controller):
    """A controller with a target value."""

    target: float = 0.01
    min_coef: float = 1e-4

    response: ClassVar[int] = -1
    """Whether the measured quantity falls (-1) or rises (+1) with the coefficient."""

    def check(self) -> None:
        self.require("target")
        if self.coef == 0:
            self.refuse(
                "coef",
                "an adaptive coefficient that starts at 0 stays at 0, because updates are multiplicative",
                "start above 0, or use the controller 'fixed'",
            )
        self.require("min_coef")
        self.check_gains()

    def check_gains(self) -> None:
        """Reject gains with the wrong sign or 0."""
        for name in self.gains:
            self.require(name)


@dataclass(slots=True, kw_only=True)
class Multiplicative(Adaptive):
    """An adaptive controller whose only state is its coefficient."""

    def update(self, kl: float, n: int = 1) -> float:
        if not math.isnan(kl):
            self.coef = self.bounded(self.coef * self.multiplier(kl / self.target, n))
        return self.coef

    @abstractmethod
    def multiplier(self, ratio: float, n: int) -> float:
        """The factor for the coefficient when the measurement is `ratio` times its target."""


def clipped(value: float, bound: float) -> float:
    """The value clipped to [-bound, bound]."""
    return min(max(value, -bound), bound)
