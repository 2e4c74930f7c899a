"""`novarl show` and `novarl alerts`: one run, also while it grows and after it was killed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from novarl.core.errors import visible, wrapped
from novarl.observe.blame import blame
from novarl.observe.evaluations import flat
from novarl.observe.glossary import lookup
from novarl.observe.listing import Overview
from novarl.observe.run import LoadedRun
from novarl.observe.sinks.gauge import clock_text
from novarl.observe.stability.ending import Finding, findings
from novarl.observe.summary import next_steps, rose
from novarl.observe.terminal.listing_page import score_text, steps_text
from novarl.observe.terminal.tables import ABSENT, WIDTH, labelled, listed, size_text, table, value_text

SHOWN_ALERTS = 5
OWN = frozenset({"kind", "run_dir", "resume", "log.console"})
"""Settings that say nothing about the training."""
PROGRESS = frozenset({"step", "update", "schema"})


def facts(run: LoadedRun, seen: Overview, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """Everything that `novarl show` prints, as plain values. `defaults`: the default of every setting by dotted key;
    None for a run of another program."""
    events, records = list(run.events), _last_phase(run)
    kinds = [str(event.get("kind")) for event in events]
    failed = next((event for event in events if event.get("kind") == "failed_rollout"), None)
    return {
        "path": str(run.path),
        "status": seen.status,
        "kind": seen.kind,
        "algo": seen.algo,
        "subject": seen.subject,
        "steps": seen.steps,
        "planned_steps": seen.total,
        "phase": seen.phase,
        "seconds": seen.seconds,
        "began": None if seen.began is None else datetime.fromtimestamp(seen.began).isoformat(" ", "seconds"),
        "manifest": {k: run.manifest.get(k) for k in ("novarl", "writer", "device", "seed", "parameters", "ranks")},
        "model": run.config.get("model") if seen.config else None,
        "before": _score(run, events, "before"),
        "last": _score(run, events, "after") or _measured(records),
        "changed": changed(run, defaults),
        "metrics": _metrics(records),
        "findings": [finding._asdict() for finding in signs(run, events, records)],
        "alerts": alerts(events),
        "failed_rollouts": kinds.count("failed_rollout"),
        "bad_rows": kinds.count("bad_row"),
        "first_failure": blame(str(failed.get("error"))) if failed else None,
        "bytes": disk(run.path),
        "next": [{"command": command, "purpose": purpose} for command, purpose in _next(run, seen)],
    }


def _last_phase(run: LoadedRun) -> list[dict[str, Any]]:
    rows = list(run.metrics)
    return [row for row in rows if row.get("phase") == rows[-1].get("phase")]


def _score(run: LoadedRun, events: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """A measured score: from the summary, or from the event if the run has not ended."""
    if found := (run.summary or {}).get(name):
        return dict(found)
    event = next((e for e in reversed(events) if e.get("kind") == "eval" and e.get("name") == name), None)
    return None if event is None else {key: event[key] for key in ("score", "interval", "n") if key in event}


def _measured(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The last evaluation during training."""
    last = next((row for row in reversed(records) if "eval/score" in row), None)
    if last is None:
        return None
    found = {"score": last["eval/score"], "step": last["step"]}
    if {"eval/score_low", "eval/score_high"} <= set(last):
        found["interval"] = [last["eval/score_low"], last["eval/score_high"]]
    return found | ({"n": int(last["eval/n"])} if "eval/n" in last else {})


def changed(run: LoadedRun, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings that differ from the defaults; all of them if the defaults are not known."""
    settings = flat(run)
    if defaults is None:
        return settings
    held = {key: value for key, value in settings.items() if key not in OWN}
    return {key: value for key, value in held.items() if key not in defaults or not _same(value, defaults[key])}


def _same(value: Any, default: Any) -> bool:
    if isinstance(default, tuple | list):
        return isinstance(value, list) and list(default) == value
    return bool(value == default)


def _metrics(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first and last value of every metric of the phase with its unit and healthy range."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({name for row in (*records[:1], *records[-1:]) for name in row}):
        values = [row[name] for row in records if isinstance(row.get(name), float)]
        if not values or name in PROGRESS or name.startswith("time/"):
            continue
        try:
            metric = lookup(name)
        except KeyError:  # a metric of another program
            found[name] = {"first": values[0], "last": values[-1], "unit": None, "healthy": None}
            continue
        found[name] = {"first": values[0], "last": values[-1], "unit": metric.unit, "healthy": metric.healthy or None}
    return found


def signs(run: LoadedRun, events: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Warning signs in the metrics of the last phase."""
    before, after = _score(run, events, "before"), _score(run, events, "after") or _measured(records)
    numbers = [{k: v for k, v in row.items() if isinstance(v, int | float)} for row in records]
    usual = (run.summary or {}).get("usual_lr")
    return findings(numbers, improved=rose(before, after), usual_lr=usual)


def alerts(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The alerts with their phase, step and name, in order. Without a name (None) it is only a note."""
    return [
        {
            **{name: event.get(name) for name in ("phase", "step", "alert")},
            "message": str(event.get("message", "")),
        }
        for event in events
        if event.get("kind") == "alert"
    ]


def _alerts_and_notes(found: Mapping[str, Any], most: int | None = None) -> list[str]:
    """Both as lines: all, or the last `most` of each."""
    lines = []
    for title, named in (("Alerts:", True), ("Notes:", False)):
        rows = [alert for alert in found["alerts"] if (alert["alert"] is not None) == named]
        shown = rows if most is None else rows[-most:]
        if shown:
            lines += ["", title, *listed([_alert(alert) for alert in shown])]
        if (more := len(rows) - len(shown)) > 0:
            lines.append(f"  and {more} earlier: novarl alerts {found['path']}")
    return lines


def disk(path: Path) -> dict[str, int]:
    """The bytes of each file and folder of the run, the largest first. Links are not followed."""
    sizes = {entry.name: sum(_sizes(entry)) for entry in path.iterdir() if not entry.is_symlink()}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _sizes(entry: Path) -> Iterator[int]:
    for file in (entry, *(entry.rglob("*") if entry.is_dir() else ())):
        try:
            if file.is_file() and not file.is_symlink():
                yield file.stat().st_size
        except OSError:  # a growing run removes old checkpoints
            continue


def _next(run: LoadedRun, seen: Overview) -> list[tuple[str, str]]:
    path = run.path
    resume = f"novarl {seen.kind} {path}/config.yaml run_dir={path} resume=auto"
    if seen.status == "killed" and "novarl" in run.manifest:
        saved = any((path / "checkpoints").glob("*/MANIFEST"))
        return [(resume, "continue from the last checkpoint" if saved else "start again: it has no checkpoint yet")]
    summary = run.summary
    if seen.status == "running" or summary is None or "novarl" not in run.manifest:
        return []
    old = str((summary.get("paths") or {}).get("run_dir", path))
    moved = {name: str(path) + text.removeprefix(old) for name, text in (summary.get("paths") or {}).items()}
    return next_steps({**summary, "paths": {name: text for name, text in moved.items() if Path(text).exists()}})


def render_run(found: Mapping[str, Any], seen: Overview, *, every: bool) -> str:
    """The page of `novarl show`. `every`: also metrics without a healthy range."""
    lines = [*labelled(_head(found, seen)), ""]
    if found["changed"]:
        title = "Settings" if found["manifest"].get("writer") else "Settings that differ from the defaults"
        lines += [f"{title}:", *(f"  {line}" for line in _settings(found["changed"])), ""]
    lines += [*_metric_lines(found["metrics"], every=every), ""]
    problems = [" ".join(f"{part}." for part in (f["said"], f["cure"]) if part) for f in found["findings"]]
    if problems:
        lines += ["Findings:", *listed(problems), ""]
    if found["alerts"]:
        lines += [*_alerts_and_notes(found, SHOWN_ALERTS)[1:], ""]
    if found["failed_rollouts"] or found["bad_rows"]:
        counts = f"{found['failed_rollouts']} failed rollouts, {found['bad_rows']} rejected rows"
        first = f"; first error: {found['first_failure']}" if found["first_failure"] else ""
        lines += [*wrapped(f"Failures: {counts}{first}"), ""]
    for step in found["next"]:
        lines += [*wrapped(f"{step['purpose'][:1].upper()}{step['purpose'][1:]}:"), f"    {step['command']}"]
    return visible("\n".join(lines).rstrip("\n")) + "\n"


def _head(found: Mapping[str, Any], seen: Overview) -> list[tuple[str, str]]:
    manifest = found["manifest"]
    program = f"NovaRL {manifest['novarl']}" if manifest["novarl"] else str(manifest["writer"] or "unknown program")
    what = " ".join(part for part in (seen.kind, seen.algo, seen.subject) if part) or ABSENT
    parts = [f"model {found['model']}"] if found["model"] else []
    parts += [f"{name} {manifest[name]}" for name in ("seed", "device") if manifest[name] is not None]
    time = "" if seen.seconds is None else f" in {clock_text(seen.seconds)}"
    sizes = found["bytes"]
    largest = ", ".join(f"{name} {size_text(size)}" for name, size in list(sizes.items())[:3])
    head = [
        ("Run", found["path"]),
        ("Status", f"{seen.status}, {steps_text(seen)} steps{time}" if seen.steps is not None else seen.status),
        ("What", ", ".join([what, *parts, program])),
        *([("Started", found["began"])] if found["began"] else []),
        ("Score", f"{score_text(seen)}{_interval(found)}"),
        ("Disk", f"{size_text(sum(sizes.values()))} ({largest})" if sizes else ABSENT),
    ]
    return head


def _interval(found: Mapping[str, Any]) -> str:
    last = found["last"]
    if not last or not last.get("interval"):
        return ""
    low, high = (float(end) for end in last["interval"])
    if not math.isfinite(low + high):
        return ""
    where = f" at step {last['step']}" if "step" in last else ""
    return f" [{low:.3f}, {high:.3f}], n={last.get('n', ABSENT)}{where}"


def _settings(changed: Mapping[str, Any]) -> list[str]:
    shown = [(key, "null" if value is None else str(value)) for key, value in changed.items()]
    wide = max(len(key) for key, _ in shown) + 2
    lines: list[str] = []
    for key, text in shown:
        lines += wrapped(f"{key:<{wide}}{text}", WIDTH - 2, hanging=" " * wide)
    return lines


def _metric_lines(metrics: Mapping[str, Mapping[str, Any]], *, every: bool) -> list[str]:
    if not metrics:
        return ["No metrics yet."]
    shown = {name: row for name, row in metrics.items() if every or row["healthy"] or row["unit"] is None}
    rows = [(name, value_text(row["first"]), value_text(row["last"])) for name, row in shown.items()]
    lines = table(("metric", "first", "last"), rows, right=(1, 2))
    wide = max(map(len, lines)) + 2
    paired = [(line, row["healthy"] or "") for line, row in zip(lines[1:], shown.values(), strict=True)]
    found = [f"{lines[0]:<{wide}}healthy"]
    for line, healthy in paired:
        found += [part.rstrip() for part in wrapped(f"{line:<{wide}}{healthy}", WIDTH, hanging=" " * wide)]
    hidden = len(metrics) - len(shown)
    return found + ([f"{hidden} more without a healthy range: --all"] if hidden else [])


def _alert(alert: Mapping[str, Any]) -> str:
    return f"step {alert['step']}: {alert['message']}" if alert["step"] else str(alert["message"])


def render_alerts(found: Mapping[str, Any]) -> str:
    """The page of `novarl alerts`."""
    problems = [" ".join(f"{part}." for part in (f["said"], f["cure"]) if part) for f in found["findings"]]
    lines = ["Findings in the metrics:", *listed(problems)] if problems else ["No findings in the metrics."]
    if all(alert["alert"] is None for alert in found["alerts"]):
        lines.append("No alerts.")
    lines += _alerts_and_notes(found)
    return "\n".join(lines) + "\n"
