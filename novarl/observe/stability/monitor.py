"""The monitor of a run: a sink that turns metrics and the rollout log into alert events.

It reads what the run reports and writes, and nothing reads it: training is the same without it. Each alert is an event
`alert` with `alert` (its name), `cause`, `evidence`, `fix`, `severity` and `message`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from novarl.observe.sinks.jsonl import read_metrics
from novarl.observe.stability.alerts import Alert
from novarl.observe.stability.columns import newest_setting, step_columns
from novarl.observe.stability.plumbing import measure
from novarl.observe.stability.watch import HELD, Watch


class Monitor:
    """Watches the run in `folder`; `emit(kind, **fields)` reports an event, and `limit()` is the setting that truncates
    answers. A resumed run goes on with the alerts that it had."""

    def __init__(self, folder: Path, emit: Callable[..., None], *, limit: Callable[[], str]) -> None:
        self.folder, self.emit, self.limit = folder, emit, limit
        self.watch = Watch()
        self.judged = 0
        """The last step whose tokens were judged."""

    def step(self, step: int, record: Mapping[str, float]) -> None:
        for alert in self._add(step, record):
            self.emit("alert", **alert_fields(alert))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind != "phase":
            return
        self.watch, self.judged = Watch(limit=self.limit(), setting=newest_setting(self.folder)), 0
        done, log = int(fields.get("done") or 0), self.folder / "metrics.jsonl"
        if not done or not log.is_file():
            return
        self.judged = max(0, done - HELD)
        for row in read_metrics(log):
            if row.get("phase") == fields["name"]:
                self._add(int(row["step"]), {name: value for name, value in row.items() if isinstance(value, float)})

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _add(self, step: int, record: Mapping[str, float]) -> list[Alert]:
        found = self.watch.add(step, record)
        if step > self.judged:
            columns = step_columns(self.folder / "rollouts" / f"step-{step:06d}")
            if columns is not None:
                self.judged = step
                found += self.watch.add_rollouts(step, measure(columns))
        return found


def alert_fields(alert: Alert) -> dict[str, str | int]:
    """The fields of an alert's event."""
    return {
        "step": alert.step,
        "alert": alert.alert,
        "severity": alert.severity,
        "cause": alert.cause,
        "evidence": alert.evidence,
        "fix": alert.fix,
        "message": alert.message,
    }
