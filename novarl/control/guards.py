"""Guards: what a run does when an alert is raised. Alerts only observe; a guard acts, and only as configured.

    stop   end the run after saving
    skip   undo the update that raised it, or, if its gradient is not finite, do not take it

A guard has its own watch on the metrics of every update, on every rank, and is part of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from novarl.core.errors import NotFinite
from novarl.core.types import Record
from novarl.learn.guard import Saved
from novarl.learn.optim import Optimizer

Action = Literal["warn", "stop", "skip"]
SKIPPED = "skipped_update"
"""1 in the Record of an update that was undone or not taken."""
UNDOABLE = ("nan", "kl_explosion", "gradient_spike")
"""Alerts about a single update, which skipping it takes back."""


class Raised(Protocol):
    """An alert."""

    @property
    def alert(self) -> str: ...
    @property
    def evidence(self) -> str: ...


class Watching(Protocol):
    """What raises alerts: the interface of `observe.stability.Watch`, which loops may not know."""

    @property
    def holding(self) -> Sequence[str]: ...
    def add(self, step: int, record: Record) -> Sequence[Raised]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class AlarmGuard:
    """Acts on alerts by name; alerts without an action only warn. `emit(kind, **fields)` reports each action."""

    actions: Mapping[str, Action]
    watch: Watching
    emit: Callable[..., None]
    stop: Raised | None = None
    """The alert that ends the run."""

    @property
    def skips(self) -> bool:
        return "skip" in self.actions.values()

    def before(self, optimizer: Optimizer) -> Saved | None:
        """What `judge` needs to undo the next update; a copy of weights and moments, only if updates may be skipped."""
        return Saved(optimizer) if self.skips else None

    def attempt(self, step: int, update: Callable[[], Record], optimizer: Optimizer) -> Record:
        """The update's Record; if its gradient is not finite and that is to be skipped, one without measurements."""
        try:
            return update()
        except NotFinite as error:
            if self.actions.get("nan") != "skip":
                raise
            optimizer.drop_gradients()
            self.emit("guard", action="skip", alert="nan", step=step, evidence=error.what)
            return {"grad_norm": float("nan"), "lr": optimizer.settings.rate(optimizer.update)}

    def judge(self, step: int, record: Record, optimizer: Optimizer, before: Saved | None) -> Record:
        """Act on the complete Record of an update. Returns metrics of the guard."""
        alerts = self.watch.add(step, record)
        for alert in alerts:
            if self.actions.get(alert.alert) == "stop":
                self.stop = self.stop or alert
                self.emit("guard", action="stop", alert=alert.alert, step=step, evidence=alert.evidence)
        if before is None:
            return {}
        wrong = [name for name in self.watch.holding if self.actions.get(name) == "skip"]
        if wrong and "nan" not in wrong:
            before.restore(optimizer)
            evidence = next((alert.evidence for alert in alerts if alert.alert == wrong[0]), "the same as before")
            self.emit("guard", action="skip", alert=wrong[0], step=step, evidence=evidence)
        return {SKIPPED: float(bool(wrong))}

    def state_dict(self) -> dict[str, Any]:
        return self.watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.watch.load_state_dict(state)
