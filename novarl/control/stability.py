"""Whether a controller and the run it controls make a loop that settles: a simulation of both, on plain numbers.

The plant, that is how KL answers to the coefficient beta. The policy that maximises E[R] - beta KL(pi || ref) is
ref * exp(R / beta) / Z, and while it is near the reference

    KL = Var_ref(R) / (2 beta^2)

so that log KL falls by 2 for every 1 that log beta rises. That is the steepest that it gets for a reward of moderate
variance (further out the reward is exhausted and KL no longer answers), and steep is what makes a loop swing. The
policy does not jump there: an update covers a part of the way, one in `lag`. What is measured is the mean of a finite
batch: the KL times exp(noise * standard normal). Everything is relative to the target, so its size does not matter.

    KL += (target * (beta* / beta)^slope - KL) / lag          measured = KL * exp(noise * z)
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
"""A loop that in its second half is ever further than this factor from its target does not settle."""
OFFSETS = (-0.3, 0.3)
"""How far, in log coefficient, the simulated loops start from balance: just outside the band of 1.5."""


@dataclass(frozen=True, slots=True)
class Plant:
    """How the measured quantity answers to the coefficient: `slope` in logarithms, `lag` in steps, `noise` relative."""

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
    """The quantity over its target after each of `steps` steps, `balance` being the coefficient that holds it there.

    Before the first step the quantity is where the starting coefficient would keep it. The controller is updated.
    """
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
    """Refuse (NovaError, naming the gain) a controller whose simulated loop does not settle; changes nothing.

    Loops that start a little above and a little below their balance are followed for STEPS steps of `episodes`
    episodes. They begin in the middle of the controller's bounds, so that the verdict is on the gains and not on where
    the run starts. Controllers without a target have no loop. A controller that is merely slow passes.
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
        f"with {gains} the simulated loop swings further than a factor of {SETTLED:g} from its target",
        where=f"{controller.section}.{blamed[0]}",
        fix=f"try {blamed[0]}={defaults[blamed[0]]:g}",
    )


def _mended(controller: Adaptive, gain: str, default: float, episodes: int, plant: Plant) -> bool:
    """Whether the default of one gain alone, where it goes with the others, would let the loop settle."""
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
