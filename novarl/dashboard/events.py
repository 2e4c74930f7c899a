"""The events of a run that the page shows, read incrementally: alerts, phases, evaluations, starts and saves."""

from __future__ import annotations

import json
import threading
from typing import Any

from novarl.dashboard.growing import GrowingFile
from novarl.dashboard.runs import Run

SHOWN = ("alert", "phase", "eval", "start", "save")
_OTHERS = (b'"kind": "sample"', b'"kind": "failed_rollout"', b'"kind": "bad_row"')
"""Frequent kinds that are not shown; their lines are not parsed."""


class Events:
    """The events of one run. `update` reads what was appended."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.shown: list[dict[str, Any]] = []
        self._file = GrowingFile()
        self._lock = threading.Lock()

    def update(self) -> bool:
        """Read appended lines; True if there were any."""
        changed = False
        with self._lock:
            while True:
                block, began = self._file.read(self.run.file("events.jsonl"))
                if began:
                    self.shown, changed = [], True
                if not block:
                    return changed
                changed = True
                for line in block.splitlines():
                    if not any(other in line for other in _OTHERS) and (event := _parsed(line)) is not None:
                        self.shown.append(event)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.shown if event["kind"] == kind]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and event.get("kind") in SHOWN else None
