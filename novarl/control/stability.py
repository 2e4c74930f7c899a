"""Check the stability of a controller in closed loop, by simulating it with a simple model of the run.

The policy that maximises E[R] - beta KL(pi || ref) is ref * exp(R / beta) / Z, and near the reference KL = Var_ref(R) /
(2 beta^2), the steepest response to the coefficient beta. An update covers 1 / `lag` of the distance, and the
measurement is the mean of a finite batch. Everything is relative to the target:

    KL += (target * (beta* / beta)^slope - KL) / lag          measured = KL * exp(noise * standard normal)
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, fields, replace
from typing import Any

from novarl.control.controller import Adaptive, Controller
from novarl.core.errors import NovaError

STEPS = 400
SETTLED = 4.0
"""A loop that deviates from its target by more than this factor in its second half is unstable."""
OFFSETS = (-0.3, 0.3)
"""The initial distance of simulated loops from equilibrium in log coefficient: just outside the band of 1.5."""


@dataclass(frozen=True, slots=True)
class Plant:
    """The response of the measured quantity to the coefficient: log `slope`, `lag` in steps, relative `noise`."""

    slope: float = 2.0
    lag: float = 5.0
    noise: float = 0.15


def simulate(
    controller: Adaptive,
    *,
    balance: float,
    plant: Plant | None = None,
    steps: int = STEPS,
    episodes: int = 256,
    seed: int = 0,
) -> list[float]:
    """The quantity relative to its target after each of `steps` steps, from the equilibrium of the starting
    coefficient; `balance` is the equilibrium coefficient. The controller is updated."""
    plant, draw = plant or Plant(), random.Random(seed)

    def settled() -> float:
        return math.exp(controller.response * plant.slope * math.log(controller.coef / balance))

    ratio, seen = settled(), []
    for _ in range(steps):
        ratio += (settled() - ratio) / plant.lag
        controller.update(controller.target * ratio * math.exp(plant.noise * draw.gauss(0.0, 1.0)), episodes)
        seen.append(ratio)
    return seen


def check_stability(controller: Controller, *, episodes: int = 256, plant: Plant | None = None) -> None:
    """Raise NovaError, naming the gain, if the simulated loop of a controller is unstable. It is not changed.

    Loops that start slightly above and below equilibrium are simulated from the middle of the controller's bounds, so
    that the result depends on the gains alone. Controllers without a target have no loop. A slow controller passes.
    """
    if not isinstance(controller, Adaptive):
        return
    plant = plant or Plant()
    if _settles(controller, episodes, plant):
        return
    defaults: dict[str, Any] = {spec.name: spec.default for spec in fields(controller) if spec.name in controller.gains}
    alone = [name for name in defaults if _mended(controller, name, defaults[name], episodes, plant)]
    blamed = alone or list(defaults)
    gains = ", ".join(f"{name}={getattr(controller, name):g}" for name in blamed)
    raise NovaError(
        f"with {gains} the simulated loop deviates from its target by more than a factor of {SETTLED:g}",
        where=f"{controller.section}.{blamed[0]}",
        fix=f"try {blamed[0]}={defaults[blamed[0]]:g}",
    )


def _mended(controller: Adaptive, gain: str, default: float, episodes: int, plant: Plant) -> bool:
    """Whether replacing one gain by its default, if compatible with the others, stabilises the loop."""
    try:
        other = replace(controller, **{gain: default})
    except NovaError:
        return False
    return _settles(other, episodes, plant)


def _settles(controller: Adaptive, episodes: int, plant: Plant) -> bool:
    middle = math.sqrt(controller.min_coef * controller.max_coef)
    for offset in OFFSETS:
        fresh = controller.started_at(middle)
        seen = simulate(fresh, balance=middle * math.exp(offset), plant=plant, episodes=episodes)
        if not all(1 / SETTLED <= ratio <= SETTLED for ratio in seen[STEPS // 2 :]):
            return False
    return True
