"""Alerts over a growing series of metrics and rollouts. Each is raised once, and again only after it has cleared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from novarl.observe.stability.alerts import Alert
from novarl.observe.stability.faults import PLUMBING, Setting
from novarl.observe.stability.plumbing import Measured, judge
from novarl.observe.stability.rules import READ, RULES, TRAINING
from novarl.observe.stability.window import Record, Window

CLEAR = 10
"""Updates (steps, for plumbing faults) without its condition after which an alert has cleared."""
HELD = 16
"""Steps of measured rollouts that are kept."""


class Watch:
    """The state of the alerts of one phase. `limit` is the setting that truncates answers, in words; `setting` what the
    run says about its sampling."""

    def __init__(self, *, limit: str = "max_new_tokens", setting: Setting | None = None) -> None:
        self.window = Window(limit=limit)
        self.setting = setting or Setting()
        self.active: dict[str, int] = {}
        """Updates since the condition of each alert last held, for alerts that have been raised and not cleared."""
        self.measured: list[Measured] = []

    def add(self, step: int, record: Record) -> list[Alert]:
        """The alerts that the metrics of an update raise."""
        self.window.add({name: value for name, value in record.items() if name in READ} | {"step": float(step)})
        found = {}
        for rule in TRAINING:
            if rule.check is not None and self.window.updates >= rule.history:
                evidence = rule.check(self.window)
                if evidence is not None:
                    found[rule.name] = rule.alert(evidence, step)
        return self._raised(found, [rule.name for rule in TRAINING])

    def add_rollouts(self, step: int, measured: Measured) -> list[Alert]:
        """The alerts that the tokens of a step raise. Call it after `add` for the step's updates."""
        moves = [record.get("kl") for record in self.window.recent if record["step"] == float(step)]
        fresh = self.window.whole and self.window.step_count() == 1
        measured = measured.beside(sum(move for move in moves if move is not None), fresh=fresh)
        self.measured = [*self.measured, measured][-HELD:]
        named = judge(self.measured, self.setting)
        names = [rule.name for rule in PLUMBING]
        if named is None:
            return self._raised({}, names)
        # A fault keeps its name until it has cleared, though its signature may change as the policy moves away.
        cause = next((name for name in names if name in self.active), named.cause)
        return self._raised({cause: RULES[cause].alert(named.evidence, step)}, names)

    def _raised(self, found: Mapping[str, Alert], names: Iterable[str]) -> list[Alert]:
        fresh = [alert for name, alert in found.items() if name not in self.active]
        for name in names:
            if name in found:
                self.active[name] = 0
            elif name in self.active:
                self.active[name] += 1
                if self.active[name] >= CLEAR:
                    del self.active[name]
        return fresh

    @property
    def holding(self) -> list[str]:
        """The alerts whose condition held at the last call."""
        return [name for name, since in self.active.items() if since == 0]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to go on with the same alerts about metrics."""
        return {"window": self.window.state_dict(), "active": dict(self.active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.window.load_state_dict(state["window"])
        self.active = {name: int(count) for name, count in state["active"].items()}
