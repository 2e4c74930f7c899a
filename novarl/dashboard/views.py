"""Every view of the page as plain JSON values."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from novarl.core.config_files import read as read_settings
from novarl.core.errors import NovaError
from novarl.dashboard.events import Events, alerts_of
from novarl.dashboard.explain import explained
from novarl.dashboard.runs import Library, Run
from novarl.dashboard.samples import Samples
from novarl.dashboard.series import Floats, Series, smoothed, thinned

RECENT = 600.0
"""Seconds since the last write after which a run without summary.json no longer counts as running."""

MEMORY = 768 << 20
"""Bytes of columns that stay in memory, over all runs."""

WATCHED = ("metrics.jsonl", "events.jsonl", "summary.json", "manifest.json", "rollouts", "config.yaml")

TAIL = 1 << 14
"""Bytes at the end of metrics.jsonl in which the last values of the list of runs are looked for."""

SMOOTH = 80
"""A curve of fewer points is drawn without its mean."""

LATE = 50
"""The stage breakdown is a mean over this many updates, the last ones."""


class Book:
    """What is known about the runs of a library. All methods may be called from several threads."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._lock = threading.Lock()
        self._series: dict[str, Series] = {}
        self._events: dict[str, Events] = {}
        self._samples: dict[str, Samples] = {}
        self._heads: dict[str, tuple[object, dict[str, Any]]] = {}
        library.refresh()

    def series(self, name: str) -> Series:
        """The metrics of a run. The least recently asked for are dropped when all together exceed `MEMORY`."""
        run = self.library[name]
        with self._lock:
            found = self._series.pop(name, None)
            if found is None or found.run != run:
                found = Series(run)
            self._series[name] = found
            while len(self._series) > 1 and sum(series.nbytes for series in self._series.values()) > MEMORY:
                self._series.pop(next(iter(self._series)))
        return found

    def events(self, name: str) -> Events:
        with self._lock:
            found = self._events.setdefault(name, Events(self.library[name]))
        found.update()
        return found

    def samples(self, name: str) -> Samples:
        run = self.library[name]
        with self._lock:
            return self._samples.setdefault(name, Samples(run))

    def unread(self) -> list[str]:
        """The runs that were asked for and whose metrics are not read to the end."""
        with self._lock:
            return [name for name, series in self._series.items() if series.progress < 1.0]

    def runs(self) -> dict[str, Any]:
        """All runs, the most recently written first."""
        found = [self.head(name) for name in list(self.library.runs)]
        found.sort(key=lambda run: (-(run["updated"] or 0.0), run["name"]))
        return {"runs": found, "refused": self.library.refused, "places": [str(place) for place in self.library.places]}

    def head(self, name: str) -> dict[str, Any]:
        """One line of the run list. Reads the small files and the end of metrics.jsonl."""
        run = self.library[name]
        state = stamp(run)
        known = self._heads.get(name)
        if known is None or known[0] != state:
            known = (state, self._head(run))
            self._heads[name] = known
        head = known[1]
        return {**head, "status": _status(head)}

    def _head(self, run: Run) -> dict[str, Any]:
        head: dict[str, Any] = {"name": run.name, "path": str(run.path), "problem": run.problem(), "notes": []}
        for name in ("kind", "seed", "device", "novarl", "writer"):
            head[name] = None
        head |= {"summary": None, "last": {}, "phase": None, "total": None, "alerts": 0, "rollouts": 0, "updated": None}
        if head["problem"] is not None:
            return head
        manifest = run.read_json("manifest.json")
        if manifest is None:
            head["notes"].append("manifest.json is missing: kind and versions are unknown")
        head |= {name: (manifest or {}).get(name) for name in ("kind", "seed", "device", "novarl", "writer")}
        try:
            summary = run.read_json("summary.json") or {}
            head["last"] = last_line(run)
            if head["last"].get("step", 0.0) <= float(summary.get("steps") or 0.0):  # otherwise it was resumed
                head["summary"] = summary.get("status")
            head["phase"] = head["last"].pop("phase", None)
            events = self.events(run.name)
            head["total"] = next((e.get("steps") for e in reversed(events.of("phase"))), None)
            head["alerts"] = sum(alert["kind"] != "note" for alert in alerts_of(run, events))
            head["rollouts"] = len(self.samples(run.name).steps())
            metrics = run.file("metrics.jsonl")
            head["updated"] = None if metrics is None else metrics.stat().st_mtime
            if metrics is None:
                head["notes"].append("metrics.jsonl is missing: the run has made no update")
            if not head["rollouts"]:
                head["notes"].append("no rollouts were logged: rollouts/ is empty or missing (log.rollouts_every)")
        except NovaError as error:
            head["problem"] = str(error)
        except OSError as error:
            head["problem"] = f"{run.path}: cannot be read ({error.strerror})"
        return head

    def run(self, name: str) -> dict[str, Any]:
        """Manifest, summary, phases, metrics with their explanations, evaluations and damage of one run."""
        run, series, events = self.library[name], self.series(name), self.events(name)
        _must_be_readable(run)
        whole = series.ready()
        damaged = series.damaged[:20] + [f"and {len(series.damaged) - 20} more"] * (len(series.damaged) > 20)
        return {
            "run": self.head(name),
            "manifest": run.read_json("manifest.json"),
            "summary": run.read_json("summary.json"),
            "phases": whole.phases,
            "metrics": explained(whole.names()),
            "names": {phase: whole.names(phase) for phase in whole.phases},
            "evaluations": events.of("eval"),
            "damaged": damaged,
        }

    def curves(self, name: str, metrics: Sequence[str], phase: str, points: int) -> dict[str, Any]:
        """The metrics as points to draw. An empty `phase` is the last one, an empty list every metric. `progress`
        below 1: the file is still being read, and the points are evenly spaced samples of it."""
        _must_be_readable(self.library[name])
        series = self.series(name)
        shown = series.ready()
        with series.lock:
            phase = phase or (shown.phases[-1] if shown.phases else "")
            drawn = {}
            for metric in metrics or shown.names():
                across, values, odd = shown.column(metric, phase)
                drawn[metric] = {
                    **_points(*thinned(across, values, points)),
                    "smooth": _points(*smoothed(across, values, points // 3)) if len(values) >= SMOOTH else None,
                    "count": len(values),
                    "nonfinite": [round(place, 4) for place in odd.tolist()[:200]],
                    "nonfinite_count": len(odd),
                }
        return {
            "run": name,
            "phase": phase,
            "phases": shown.phases,
            "rows": series.rows,
            "progress": series.progress,
            "series": drawn,
        }

    def stages(self, name: str) -> dict[str, Any]:
        """Mean seconds of each stage over the last updates of the last phase that have it, and memory."""
        series = self.series(name)
        shown = series.ready()
        phase = shown.phases[-1] if shown.phases else ""
        stages, memory = {}, {}
        for metric in shown.names():
            _, values, _ = shown.column(metric, phase)
            if len(values) and metric.startswith("time/") and metric.endswith("_s"):
                stages[metric.removeprefix("time/").removesuffix("_s")] = float(values[-LATE:].mean())
            if len(values) and metric.startswith("memory_"):
                memory[metric] = {"last": float(values[-1]), "most": float(values.max())}
        return {"run": name, "phase": phase, "updates": LATE, "stages": stages, "memory_mb": memory}

    def alerts(self, names: Sequence[str] = ()) -> dict[str, Any]:
        """Alerts during the run, and the findings at its end, of the runs named, or of all."""
        found, unread = [], {}
        for name in names or list(self.library.runs):
            run = self.library[name]
            try:
                found += alerts_of(run, self.events(name))
            except NovaError as error:
                unread[name] = str(error)
        return {"alerts": found, "unreadable": unread}

    def config(self, names: Sequence[str]) -> dict[str, Any]:
        """The configurations side by side: every key that one of them has, and whether they differ."""
        settings, absent = {}, {}
        for name in names:
            run = self.library[name]
            try:
                path = run.file("config.yaml")
                if path is None:
                    absent[name] = "the run has no config.yaml"
                else:
                    settings[name] = flat(read_settings(path)[0])
            except NovaError as error:
                absent[name] = str(error)
        keys = list(dict.fromkeys(key for config in settings.values() for key in config))
        rows = []
        for key in keys:
            values = [config.get(key, ABSENT) for config in settings.values()]
            rows.append({"key": key, "values": values, "differs": any(value != values[0] for value in values)})
        return {"runs": list(settings), "absent": absent, "rows": rows}


def _points(across: Floats, values: Floats) -> dict[str, list[float]]:
    """Places with four decimals, values with seven digits: more cannot be seen, and takes time to send."""
    return {
        "x": [round(place, 4) for place in across.tolist()],
        "y": [float(f"{value:.7g}") for value in values.tolist()],
    }


ABSENT = "(absent)"


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Dotted keys, and values as text."""
    if isinstance(value, dict) and value:
        pairs = (flat(inner, f"{prefix}.{key}" if prefix else str(key)) for key, inner in value.items())
        return {key: text for pair in pairs for key, text in pair.items()}
    shown = {None: "null", True: "true", False: "false"}
    return {prefix: shown[value] if value is None or isinstance(value, bool) else str(value)}


def last_line(run: Run) -> dict[str, Any]:
    """The metrics of the last complete line, and of earlier lines near the end for those that it lacks."""
    path = run.file("metrics.jsonl")
    if path is None:
        return {}
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL))
        block = file.read()
    if size > len(block):
        block = block[block.find(b"\n") + 1 :]
    end = Series(run)
    end.take(block[: block.rfind(b"\n") + 1])
    return {**end.last(), **({"phase": end.phases[-1]} if end.phases else {})}


def stamp(run: Run) -> tuple[object, ...]:
    """Changes when the run is written to."""
    found: list[object] = [run]
    for name in WATCHED:
        try:
            state = os.stat(run.path / name)
            found.append((state.st_mtime_ns, state.st_size, state.st_ino))
        except OSError:
            found.append(None)
    return tuple(found)


def _status(head: dict[str, Any]) -> str:
    if head["problem"] is not None:
        return "unreadable"
    if head["summary"] is not None:
        return str(head["summary"])
    if head["updated"] is None:
        return "empty"
    return "running" if time.time() - head["updated"] < RECENT else "silent"


def _must_be_readable(run: Run) -> None:
    if (problem := run.problem()) is not None:
        raise NovaError(problem)


def plain(value: Any) -> Any:
    """`value` for JSON, which has no NaN and no infinity: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
