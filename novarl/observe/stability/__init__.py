"""Alerts with named causes, over the metrics and the tokens of a run.

for alert in review(run.metrics, {step: run.rollouts(step) for step in run.steps()}):
    print(alert.step, alert.alert, alert.evidence)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from novarl.observe.rollouts import RolloutRow
from novarl.observe.stability.alerts import Alert, Rule
from novarl.observe.stability.columns import row_columns
from novarl.observe.stability.faults import Setting
from novarl.observe.stability.plumbing import measure
from novarl.observe.stability.rules import RULES
from novarl.observe.stability.watch import Watch

__all__ = ["RULES", "Alert", "Rule", "Setting", "Watch", "review"]


def review(
    records: Iterable[Mapping[str, Any]],
    rollouts: Mapping[int, Sequence[RolloutRow]] | None = None,
    *,
    setting: Setting | None = None,
) -> list[Alert]:
    """The alerts of a run, in order: as the run itself raised them, or would have.

    `records`: the metrics of each update in order, with `step` and, if there are several, `phase` (`load_run(...)
    .metrics`). `rollouts`: the answers by step, of any steps of the last phase. `setting`: what is known of the
    sampling.
    """
    found: list[Alert] = []
    phase, watch = object(), Watch(setting=setting)
    rows = [dict(record) for record in records]
    last = rows[-1].get("phase") if rows else None
    for place, row in enumerate(rows):
        if row.get("phase") != phase:
            phase, watch = row.get("phase"), Watch(setting=setting)
        step = int(row.get("step", place + 1))
        found += watch.add(step, {name: value for name, value in row.items() if isinstance(value, float)})
        ends = place + 1 == len(rows) or int(rows[place + 1].get("step", place + 2)) != step
        if ends and phase == last and rollouts is not None and step in rollouts:
            columns = row_columns(rollouts[step])
            if columns is not None:
                found += watch.add_rollouts(step, measure(columns))
    return found
