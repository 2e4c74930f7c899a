"""Step guards: what may undo or end a rollout's updates when the policy has moved too far from where it began.

A penalty on KL is a price; a guard is a bound. Distance is KL(pi_old || pi) per token, pi_old the policy before the
rollout's first update, measured with k3 on the whole minibatch after the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from novarl.core.types import Record
from novarl.learn.optim import Optimizer

STOP = "stop_rollout"
"""Set to 1 in the Record of an update after which the rest of its rollout is not to be learnt from."""


@dataclass(frozen=True, slots=True)
class StepGuard:
    """`early_stop` lets the step stand and ends the rollout; `rollback` shortens the step, by halves, until the policy
    is within `limit`, or undoes it altogether, Adam's moments included."""

    mode: Literal["early_stop", "rollback"]
    limit: float

    def around(self, optimizer: Optimizer, measure: Callable[[], float]) -> tuple[float, float, Record]:
        """Step under guard: (gradient norm, learning rate, what the guard did)."""
        before = _Saved(optimizer) if self.mode == "rollback" else None
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
    """Whether a rollout's updates should end: KL above the limit, or not a number."""
    return not kl <= limit


def backtrack(measure: Callable[[float], float], limit: float, *, halvings: int = 5) -> float:
    """The largest of 1, 1/2, 1/4, ..., 2^-halvings whose measured distance is within the limit; 0 if none is.

    `measure(fraction)` puts the policy at that fraction of its step and returns its KL to the policy before the step;
    NaN is not within any limit. It is asked from the largest down, and not again once one is accepted.
    """
    for fraction in (0.5**halving for halving in range(halvings + 1)):
        if measure(fraction) <= limit:
            return fraction
    return 0.0


class _Saved:
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
        """Put the weights at `fraction` of the step to `after`: at either end, to the bit."""
        for parameter, start, end in zip(optimizer.parameters.values(), self.weights, after, strict=True):
            parameter.copy_(start if fraction == 0.0 else end if fraction == 1.0 else start.lerp(end, fraction))

    def forget(self, optimizer: Optimizer) -> None:
        """Put the moments back, as if the step had never been; the count of updates goes on."""
        done = optimizer.update
        optimizer.load_state_dict(self.moments)
        optimizer.update = done
