"""Controllers that adapt the coefficient of the KL term (or of the entropy bonus) at each step.

`update(kl, n=episodes)` takes the KL of a step and returns the next coefficient, within [min_coef, max_coef]. All but
`Fixed` and `Schedule` change the logarithm of the coefficient by an amount that depends only on KL / target, so the
unit of KL does not matter, and a coefficient of 0 is rejected. Only `Ziegler` uses n; for the others the unit of time
is the step, because a policy moves by updates, regardless of their number of episodes.

With r = KL / target, and the coefficient clipped to [min_coef, max_coef]:

    fixed         beta
    dead_band     beta * speed if r > band, beta / speed if r < 1 / band
    ziegler       beta * (1 + clip(r - 1, +-clip) n / horizon)
    exponential   log beta += rate * clip(log r, +-clip)
    two_speed     beta * up if r > 1, else beta * down
    linear        beta * (1 + factor * clip(r - 1, +-max_step))
    pid           log beta = log beta_0 + kp e + ki sum e + kd (m - m'),  e = clip(r - 1, +-clip), m a moving average
    schedule      a curve from initial to final over `total_steps`, independent of KL

A k1 estimate of KL may be slightly negative: it counts as far below the target, like 0. Infinity counts as far above.
NaN is ignored. `control.stability` checks whether the gains give a stable loop.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from novarl.control.controller import Adaptive, Controller, Multiplicative, clipped
from novarl.core.errors import NovaError

Shape = Literal["constant", "linear", "cosine", "exponential", "warmup_cosine"]
SHAPES: tuple[Shape, ...] = get_args(Shape)


@dataclass(slots=True, kw_only=True)
class Fixed(Controller):
    """A constant coefficient; 0 disables the penalty."""

    def check(self) -> None:
        """Any coefficient is valid."""

    def update(self, kl: float, n: int = 1) -> float:
        return self.coef


@dataclass(slots=True, kw_only=True)
class Schedule(Controller):
    """final + (initial - final) * shape(p), p = step / total_steps, step = 0 for the first; independent of KL.

    shape: constant 1; linear 1 - p; cosine (1 + cos(pi p)) / 2; exponential (e^(-3p) - e^-3) / (1 - e^-3), which is the
    plain decay initial * e^(-3p) if final = initial * e^-3; warmup_cosine rises from 0 as initial * p / warmup_frac,
    then follows the cosine over the remaining steps. After the last step it is constant.
    """

    memory: ClassVar[tuple[str, ...]] = ("coef", "step")

    total_steps: int
    shape: Shape = "cosine"
    final_coef: float = 0.0
    warmup_frac: float = 0.1
    step: int = field(init=False, default=0)

    def check(self) -> None:
        self.require("total_steps")
        if self.shape not in SHAPES:
            self.refuse("shape", f"unknown shape '{self.shape}'", f"use one of {', '.join(SHAPES)}")
        if not 0 < self.warmup_frac < 1:
            self.refuse("warmup_frac", f"warmup_frac={self.warmup_frac:g} must be in (0, 1)", "use one in (0, 1)")
        if not self.min_coef <= self.final_coef <= self.max_coef:
            self.refuse("final_coef", "is outside min_coef and max_coef", "choose it between them, or change them")
        self.coef = self.bounded(self.at(0))

    def at(self, step: int) -> float:
        """The coefficient of a step, before clipping."""
        p, warm = min(step / self.total_steps, 1.0), self.warmup_frac
        if self.shape == "warmup_cosine" and p < warm:
            return self.initial * p / warm
        share = {
            "constant": 1.0,
            "linear": 1.0 - p,
            "cosine": (1.0 + math.cos(math.pi * p)) / 2.0,
            "exponential": (math.exp(-3.0 * p) - math.exp(-3.0)) / -math.expm1(-3.0),
            "warmup_cosine": (1.0 + math.cos(math.pi * (p - warm) / (1.0 - warm))) / 2.0,
        }[self.shape]
        return self.final_coef + (self.initial - self.final_coef) * share

    def update(self, kl: float, n: int = 1) -> float:
        self.step += 1
        self.coef = self.bounded(self.at(self.step))
        return self.coef


@dataclass(slots=True, kw_only=True)
class DeadBand(Multiplicative):
    """No change within [target / band, target * band], a factor of `speed` outside.

    The rule of PPO's adaptive penalty (https://arxiv.org/abs/1707.06347, section 4), whose authors double and halve. A
    policy trained with Adam takes ten or more steps to follow, so that a factor of 1.5 would oscillate forever.
    """

    gains: ClassVar[tuple[str, ...]] = ("speed",)

    band: float = 1.5
    speed: float = 1.05

    def check(self) -> None:
        Adaptive.check(self)
        self.require("band", above=1.0)
        self.require("speed", above=1.0)

    def multiplier(self, ratio: float, n: int) -> float:
        if ratio > self.band:
            return self.speed
        return 1.0 / self.speed if ratio < 1.0 / self.band else 1.0


@dataclass(slots=True, kw_only=True)
class Ziegler(Multiplicative):
    """beta * (1 + clip(KL / target - 1, +-clip) n / horizon) (https://arxiv.org/abs/1909.08593, section 2.2).

    `horizon`: the number of episodes in which an error at the clip multiplies the coefficient by about e^clip = 1.22. A
    step with more episodes counts as `horizon`. The authors' target of 6 nats is per answer.
    """

    gains: ClassVar[tuple[str, ...]] = ("clip", "horizon")

    clip: float = 0.2
    horizon: int = 10_000

    def check(self) -> None:
        Adaptive.check(self)
        if self.clip >= 1:
            self.refuse("clip", f"clip={self.clip:g} could set the coefficient to 0", "use one below 1")

    def multiplier(self, ratio: float, n: int) -> float:
        return 1.0 + clipped(ratio - 1.0, self.clip) * min(n, self.horizon) / self.horizon


@dataclass(slots=True, kw_only=True)
class Exponential(Multiplicative):
    """log beta += rate * clip(log(KL / target), +-clip): equally fast in both directions."""

    gains: ClassVar[tuple[str, ...]] = ("rate", "clip")

    rate: float = 0.05
    clip: float = 1.0

    def multiplier(self, ratio: float, n: int) -> float:
        low = math.exp(-self.clip)  # at or below it the clip is reached, which avoids logarithms of 0 or less
        return math.exp(self.rate * min(math.log(max(ratio, low)), self.clip))


@dataclass(slots=True, kw_only=True)
class TwoSpeed(Multiplicative):
    """beta * 1.03 while KL is above the target, otherwise beta * 0.99: the exponential rule of enhanced RL2.

    It rises three times as fast as it falls: with noise it converges where KL is above the target 25 % of the time, so
    the target is the upper quartile of KL and not its median. Kept for runs tuned with it; `exponential` is unbiased.
    """

    gains: ClassVar[tuple[str, ...]] = ("up", "down")

    up: float = 1.03
    down: float = 0.99

    def check(self) -> None:
        Adaptive.check(self)
        self.require("up", above=1.0)
        if self.down >= 1:
            self.refuse("down", f"down={self.down:g} does not lower the coefficient", "use one below 1")

    def multiplier(self, ratio: float, n: int) -> float:
        return self.up if ratio > 1.0 else self.down


@dataclass(slots=True, kw_only=True)
class Linear(Multiplicative):
    """Proportional to the clipped relative error: at most factor * max_step = 5 % per step."""

    gains: ClassVar[tuple[str, ...]] = ("factor", "max_step")

    factor: float = 0.25
    max_step: float = 0.2

    def check(self) -> None:
        Adaptive.check(self)
        if self.factor * self.max_step >= 1:
            self.refuse("max_step", "factor * max_step >= 1 could set the coefficient to 0", "lower one of them")

    def multiplier(self, ratio: float, n: int) -> float:
        return 1.0 + self.factor * clipped(ratio - 1.0, self.max_step)


@dataclass(slots=True, kw_only=True)
class PID(Adaptive):
    """log beta = log beta_0 + kp e + I + kd (m - m'), with e = clip(KL / target - 1, +-clip) and I += ki e.

    The derivative is that of the measurement's moving average, m = m' + smoothing (e + 1 - m'), 0 at the first update.
    If the coefficient is at a bound and the error would push it further, I is unchanged (anti-windup).
    """

    memory: ClassVar[tuple[str, ...]] = ("coef", "integral", "smoothed")
    gains: ClassVar[tuple[str, ...]] = ("kp", "ki", "kd")

    kp: float = 0.2
    ki: float = 0.05
    kd: float = 0.1
    smoothing: float = 0.3
    clip: float = 1.0
    integral: float = field(init=False, default=0.0)
    smoothed: float | None = field(init=False, default=None)

    def check(self) -> None:
        Adaptive.check(self)
        self.require("clip")
        if not 0 < self.smoothing <= 1:
            self.refuse("smoothing", f"smoothing={self.smoothing:g} is out of range", "use one in (0, 1]")

    def check_gains(self) -> None:
        self.require("ki")
        for name in ("kp", "kd"):
            if getattr(self, name) < 0:
                self.refuse(name, f"{name}={getattr(self, name):g} has the wrong sign", f"set {name} to 0 or above")

    def update(self, kl: float, n: int = 1) -> float:
        if math.isnan(kl):
            return self.coef
        error = clipped(kl / self.target - 1.0, self.clip)
        before = error + 1.0 if self.smoothed is None else self.smoothed
        self.smoothed = before + self.smoothing * (error + 1.0 - before)
        integral = self.integral + self.ki * error
        wanted = math.log(self.initial) + self.kp * error + integral + self.kd * (self.smoothed - before)
        low, high = math.log(self.min_coef), math.log(self.max_coef)
        if not (wanted > high and error > 0) and not (wanted < low and error < 0):
            self.integral = integral
        self.coef = self.bounded(math.exp(clipped(wanted, 700.0)))
        return self.coef


@dataclass(slots=True, kw_only=True)
class EntropyTarget(Multiplicative):
    """The entropy coefficient that keeps the entropy at a target, in nats per token: log beta += rate * clip(1 - H /
    target, +-1). The temperature rule of soft actor-critic (https://arxiv.org/abs/1812.05905, section 5) in log space.
    """

    gains: ClassVar[tuple[str, ...]] = ("rate",)
    section: ClassVar[str] = "entropy"
    response: ClassVar[int] = 1

    target: float
    rate: float = 0.05

    def multiplier(self, ratio: float, n: int) -> float:
        return math.exp(self.rate * clipped(1.0 - ratio, 1.0))


CONTROLLERS: dict[str, type[Controller]] = {
    "fixed": Fixed,
    "dead_band": DeadBand,
    "ziegler": Ziegler,
    "exponential": Exponential,
    "two_speed": TwoSpeed,
    "linear": Linear,
    "pid": PID,
    "schedule": Schedule,
}
ALIASES = {"adaptive": "dead_band", "adaptive_kl": "dead_band", "constant": "fixed"}
"""Aliases: NovaRL's switch `adaptive_kl` is the dead band."""


def make(kind: str, *, coef: float, target: float = 0.01, **settings: Any) -> Controller:
    """The KL controller named `kind`, one of CONTROLLERS or ALIASES; `target` is passed to those that have one.
    NovaError for an unknown name or setting and for invalid settings."""
    name = ALIASES.get(kind, kind)
    if name not in CONTROLLERS:
        raise NovaError(f"unknown controller '{kind}'", where="kl.controller", fix=f"use {', '.join(CONTROLLERS)}")
    chosen = CONTROLLERS[name]
    known = {spec.name: spec.default is MISSING for spec in fields(chosen) if spec.init}
    settings |= {"coef": coef} | ({"target": target} if "target" in known else {})
    for setting in settings:
        if setting not in known:
            what, fix = f"the controller {name} has no setting '{setting}'", f"use {', '.join(known)}"
            raise NovaError(what, where=f"kl.{setting}", fix=fix)
    for setting, needed in known.items():
        if needed and setting not in settings:
            raise NovaError(f"is required by the controller {name}", where=f"kl.{setting}", fix=f"set {setting}")
    return chosen(**settings)
