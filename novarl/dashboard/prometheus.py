"""The last values of all runs in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

import re
from typing import Any

from novarl.observe.glossary import lookup


def exposition(runs: list[dict[str, Any]]) -> str:
    """One gauge `novarl_<metric>` per metric, labelled with run, phase and the metric's name.

    A character that Prometheus does not allow in a name is written as `_`.
    """
    families: dict[str, list[str]] = {}
    about: dict[str, str] = {}
    for run in runs:
        labels = f'run="{_escaped(run["name"])}"'
        _add(families, "novarl_alerts", labels, float(run["alerts"]))
        _add(families, "novarl_running", labels, float(run["status"] == "running"))
        for name, value in run["last"].items():
            family = "novarl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            phase, metric = _escaped(run["phase"] or ""), _escaped(name)
            _add(families, family, f'{labels},phase="{phase}",metric="{metric}"', float(value))
            about.setdefault(family, _formula(name))
    about |= {"novarl_alerts": "alerts and findings", "novarl_running": "1 if the run was written to recently"}
    lines = []
    for family, samples in sorted(families.items()):
        lines += [f"# HELP {family} {about.get(family) or 'a metric of the run'}", f"# TYPE {family} gauge", *samples]
    return "\n".join(lines) + "\n"


def _add(families: dict[str, list[str]], family: str, labels: str, value: float) -> None:
    families.setdefault(family, []).append(f"{family}{{{labels}}} {value!r}")


def _formula(name: str) -> str:
    try:
        metric = lookup(name)
    except KeyError:
        return ""
    text = f"{metric.formula} [{metric.unit}]" if metric.unit not in ("", "1") else metric.formula
    return text.replace("\\", "\\\\").replace("\n", " ")


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
