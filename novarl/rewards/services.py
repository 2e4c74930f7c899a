"""What TRL gives a reward function beside columns, made where the function runs.

    trainer_state               `global_step`, the steps done so far, and `max_steps`, those of the run
    log_extra(column, values)   a value for each rollout of the batch: they appear in the rollout log
    log_metric(name, value)     a number for the batch: its mean over the step's rollouts appears in the metrics

They cannot be sent to the child process. A request names those that are wanted, under `KEY` among the named
arguments; the reply then holds the function's value and what was logged (`VALUE`, `EXTRA`, `METRICS`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

NAMES = ("trainer_state", "log_extra", "log_metric")
KEY = "novarl services"
"""No Python parameter can have this name."""
VALUE, EXTRA, METRICS = "value", "extra", "metrics"


@dataclass(slots=True)
class Progress:
    """`step` of the run's `steps` are done. Where nothing is trained, it is as at the end of a run: 1 of 1."""

    step: int = 1
    steps: int = 1


def request(names: Sequence[str], progress: Progress, *, count: int) -> dict[str, Any]:
    """What the named arguments of a call that judges `count` rollouts hold for these services."""
    if not names:
        return {}
    state = {"global_step": progress.step, "max_steps": progress.steps}
    return {KEY: {"names": list(names), "count": count, "state": state}}


class TrainerState:
    """TRL's `trainer_state`, of which only `global_step` and `max_steps` are known."""

    def __init__(self, global_step: int, max_steps: int) -> None:
        self.global_step, self.max_steps = global_step, max_steps

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has only global_step and max_steps, not {name!r}")


class Services:
    """The services of one call. Its named arguments, `kwargs`, are completed by them."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.asked: dict[str, Any] | None = kwargs.pop(KEY, None)
        self.extra: dict[str, list[Any]] = {}
        self.metrics: dict[str, list[float]] = {}
        if self.asked is not None:
            made: dict[str, Callable[..., None] | TrainerState] = {
                "trainer_state": TrainerState(**self.asked["state"]),
                "log_extra": self.log_extra,
                "log_metric": self.log_metric,
            }
            kwargs |= {name: made[name] for name in self.asked["names"]}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        assert self.asked is not None
        values, count = list(values), self.asked["count"]
        if len(values) != count:
            raise ValueError(f"log_extra({column!r}) was given {len(values)} values for {count} rollouts")
        self.extra[str(column)] = json.loads(json.dumps(values, default=str))

    def log_metric(self, name: str, value: float) -> None:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"log_metric({name!r}) was given {number}, not a finite number")
        self.metrics.setdefault(str(name).replace("/", "_"), []).append(number)

    def reply(self, value: Any) -> Any:
        """The function's `value`, with what it logged."""
        if self.asked is None:
            return value
        means = {name: sum(numbers) / len(numbers) for name, numbers in self.metrics.items()}
        return {VALUE: value, EXTRA: self.extra, METRICS: means}
