"""What the glossary says about a metric, for the page: formula, unit, healthy range as numbers, section."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from novarl.observe.figures import PANELS
from novarl.observe.glossary import SECTIONS, lookup

_NUMBER = r"(-?\d+(?:\.\d+)?(?:e-?\d+)?)"
_RANGES = (
    (re.compile(rf"{_NUMBER} to {_NUMBER}"), lambda low, high: (float(low), float(high))),
    (re.compile(rf"(?:[a-z ]+, |falls )?below {_NUMBER}"), lambda high: (None, float(high))),
    (re.compile(rf"at most {_NUMBER}"), lambda high: (None, float(high))),
    (re.compile(rf"above {_NUMBER}"), lambda low: (float(low), None)),
)
KEY = tuple(name for panel in PANELS for name, _ in panel.lines)
"""The metrics that are shown first."""

LOGARITHMIC = frozenset(name for panel in PANELS if panel.log for name, _ in panel.lines)


def healthy_range(text: str) -> tuple[float | None, float | None] | None:
    """The limits that a glossary entry's `healthy` begins with, or None if it has no numbers.

    >>> healthy_range("1e-5 to 1e-2; below 1e-12 the update had no effect"), healthy_range("rises")
    ((1e-05, 0.01), None)
    """
    first = text.split(";")[0].strip()
    for pattern, limits in _RANGES:
        if found := pattern.match(first):
            return limits(*found.groups())
    return None


def explained(names: Iterable[str]) -> list[dict[str, Any]]:
    """The metrics in the order in which they are shown: the most important first, then by section."""
    order = {name: place for place, name in enumerate(KEY)}
    found = [_entry(name) for name in names]
    sections = [*SECTIONS, "Other"]
    return sorted(
        found, key=lambda entry: (order.get(entry["name"], len(KEY)), sections.index(entry["section"]), entry["name"])
    )


def _entry(name: str) -> dict[str, Any]:
    try:
        metric = lookup(name)
    except KeyError:  # another program's metric
        return {"name": name, "section": "Other", "formula": "", "unit": "", "direction": "watch", "healthy": ""} | {
            "range": None,
            "key": False,
            "log": False,
        }
    section = next(title for title, metrics in SECTIONS.items() if any(metric is entry for entry in metrics.values()))
    return {
        "name": name,
        "section": section,
        "formula": metric.formula,
        "unit": metric.unit,
        "direction": metric.direction,
        "healthy": metric.healthy,
        "range": healthy_range(metric.healthy),
        "key": name in KEY,
        "log": name in LOGARITHMIC,
    }
