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


def alerts_of(run: Run, events: Events) -> list[dict[str, Any]]:
    """The alerts, notes (alert events without the name of an alert) and findings of a run, in order. A finding has no
    step: it is about the whole run."""
    found = [
        {
            "run": run.name,
            "kind": "alert" if event.get("alert") else "note",
            "step": event.get("step"),
            "phase": event.get("phase"),
            "timestamp": event.get("timestamp"),
            "message": str(event.get("message", "")),
            **{name: event[name] for name in ("alert", "severity", "cause", "evidence", "fix") if name in event},
        }
        for event in events.of("alert")
    ]
    summary = run.read_json("summary.json") or {}
    for finding in summary.get("findings") or ():
        if isinstance(finding, dict):
            entry = {"run": run.name, "kind": "finding", "step": None, "phase": None, "timestamp": None}
            message = ". ".join(str(finding[name]).rstrip(".") for name in ("said", "cure") if finding.get(name))
            found.append({**entry, "sign": finding.get("sign"), "message": message + "."})
    return found


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and event.get("kind") in SHOWN else None
