"""Step guards: undo or end the updates of a rollout when the policy has moved too far.

A KL penalty is soft; a guard is a hard limit. The distance is KL(pi_old || pi) per token, with pi_old the policy before
the rollout's first update, measured with k3 on the whole minibatch after the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from novarl.core.types import Record
from novarl.learn.optim import Optimizer

STOP = "stop_rollout"
"""Set to 1 in the Record of an update that ends training on its rollout."""


@dataclass(frozen=True, slots=True)
class StepGuard:
    """`early_stop` keeps the step and ends the rollout; `rollback` halves the step until the policy is within `limit`,
    or undoes it completely, including Adam's moments."""

    mode: Literal["early_stop", "rollback"]
    limit: float

    def around(self, optimizer: Optimizer, measure: Callable[[], float]) -> tuple[float, float, Record]:
        """Take a guarded step: (gradient norm, learning rate, metrics of the guard)."""
        before = Saved(optimizer) if self.mode == "rollback" else None
        norm, rate = optimizer.step()
        if before is None:
            distance = measure()
            return norm, rate, {"kl_to_old": distance, STOP: float(early_stop(distance, self.limit))}
        seen: dict[float, float] = {}
        after = [parameter.detach().clone() for parameter in optimizer.parameters.values()]

        def distance_at(fraction: float) -> float:
            before.place(optimizer, after, fraction)
            seen[fraction] = measure()
            return seen[fraction]

        fraction = backtrack(distance_at, self.limit)
        if fraction == 0.0:
            before.forget(optimizer)
            distance_at(fraction)
        return norm, rate, {"kl_to_old": seen[fraction], "step_fraction": fraction, STOP: float(fraction == 0.0)}


def early_stop(kl: float, limit: float) -> bool:
    """Whether to stop updating on a rollout: KL is above the limit or NaN."""
    return not kl <= limit


def backtrack(measure: Callable[[float], float], limit: float, *, halvings: int = 5) -> float:
    """The largest of 1, 1/2, 1/4, ..., 2^-halvings whose measured distance is within the limit; 0 if none is.
    `measure(fraction)` puts the policy at that fraction of its step and returns its KL to the policy before the step.
    NaN is never within the limit; the accepted fraction is the last call."""
    for fraction in (0.5**halving for halving in range(halvings + 1)):
        if measure(fraction) <= limit:
            return fraction
    return 0.0


class Saved:
    """The weights and the optimiser's moments before a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.weights = [parameter.detach().clone() for parameter in optimizer.parameters.values()]
        state = optimizer.state_dict()
        self.moments: dict[str, Any] = {
            "update": state["update"],
            "moments": {
                name: {key: value.clone() for key, value in moments.items()}
                for name, moments in state["moments"].items()
            },
        }

    @torch.no_grad()
    def place(self, optimizer: Optimizer, after: list[torch.Tensor], fraction: float) -> None:
        """Set the weights to `fraction` of the step to `after`; exact at both ends."""
        for parameter, start, end in zip(optimizer.parameters.values(), self.weights, after, strict=True):
            parameter.copy_(start if fraction == 0.0 else end if fraction == 1.0 else start.lerp(end, fraction))

    def restore(self, optimizer: Optimizer) -> None:
        """Undo everything since, as if the step had not been taken; the update count continues."""
        self.place(optimizer, self.weights, 0.0)
        self.forget(optimizer)
        if optimizer.sharding is not None:
            optimizer.sharding.moved()

    def forget(self, optimizer: Optimizer) -> None:
        """Restore the moments, as if the step had not been taken; the update count continues."""
        done = optimizer.update
        optimizer.load_state_dict(self.moments)
        optimizer.update = done
