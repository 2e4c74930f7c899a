"""What a run directory says about itself at a glance, also if the run is in progress, was killed, or is damaged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.rundir import RunDir
from novarl.observe.run import LoadedRun, load_run

QUIET = 120.0
"""Seconds without a new line after which a run of another library, which takes no lock, no longer counts as running."""

MARKS = ("manifest.json", "metrics.jsonl", "summary.json")
DEEPEST = 4
"""How far below the given directory runs are looked for."""


@dataclass(frozen=True, slots=True)
class Overview:
    """One run. What is not known is None.

    status   running, killed (no end was recorded and nobody writes), done, stopped, unsaved, failed, or unreadable
    steps    steps done in the last phase, `total` those planned
    before, after   held-out scores; `after` is the last one so far
    seconds  duration of the last process
    began    when the first process started, in seconds since 1970
    problem  why the run is unreadable
    """

    path: Path
    status: str
    kind: str | None = None
    algo: str | None = None
    subject: str | None = None
    steps: int | None = None
    total: int | None = None
    before: float | None = None
    after: float | None = None
    seconds: float | None = None
    began: float | None = None
    phase: str | None = None
    problem: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)


def find_runs(folder: Path) -> Iterator[Path]:
    """The run directories in `folder`, or `folder` itself. Links are not followed, so `latest` is not listed twice."""
    if any((folder / name).is_file() for name in MARKS):
        yield folder
        return
    yield from _below(folder, DEEPEST)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() or not entry.is_dir():
            continue
        if any((entry / name).is_file() for name in MARKS):
            yield entry
        elif depth > 1:
            yield from _below(entry, depth - 1)


def overview(path: Path) -> Overview:
    """The run in `path`. Damaged files make it "unreadable", with the reason; nothing is raised."""
    try:
        return _overview(load_run(path))
    except NovaError as error:
        return Overview(path, "unreadable", problem=str(error))
    except OSError as error:
        return Overview(path, "unreadable", problem=f"{path}: cannot be read: {error.strerror}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"a file has unexpected contents ({type(error).__name__}: {error})"
        return Overview(path, "unreadable", problem=f"{path}: {what}")


def _overview(run: LoadedRun) -> Overview:
    manifest, summary = run.manifest, run.summary
    config = run.config if (run.path / "config.yaml").exists() else {}
    events = list(_events(run.path, ("start", "phase", "eval", "summary")))
    ended = _ended(summary, events)
    phase: dict[str, Any] = next((event for event in reversed(events) if event["kind"] == "phase"), {})
    last = last_line(run.path / "metrics.jsonl") or {}
    before, after = _scores(run, summary, events)
    began = _seconds(next(iter(events), {}).get("timestamp"))
    kind = manifest.get("kind") or (summary or {}).get("command")
    planned, done = phase.get("steps"), last.get("step")
    if ended and summary is not None:
        done = summary.get("steps", done)
    elif last.get("phase") != phase.get("name"):
        done = phase.get("done", 0) if phase else done
    return Overview(
        path=run.path,
        status=ended or ("running" if is_running(run) else "killed"),
        kind=kind,
        algo=config.get("algo") or (config.get("loss") if isinstance(config.get("loss"), str) else None),
        subject=config.get("task") or _name(config.get("data")),
        steps=None if done is None or kind == "eval" else int(done),
        total=None if planned is None else int(planned),
        before=before,
        after=after,
        seconds=_duration(run, summary if ended else None, events),
        began=began,
        phase=phase.get("name"),
        config=config,
    )


def _ended(summary: Mapping[str, Any] | None, events: Iterable[Mapping[str, Any]]) -> str | None:
    """The status in summary.json; None if there is none, or the run was resumed after it was written."""
    if summary is None:
        return None
    ends = [event["kind"] for event in events if event["kind"] in ("start", "summary")]
    if "summary" in ends and ends[-1] == "start":
        return None
    return str(summary.get("status", "done"))


def is_running(run: LoadedRun) -> bool:
    """Whether a process writes to the run: it holds the run's lock, or, for another library, wrote recently."""
    if "novarl" in run.manifest:
        return RunDir(run.path).is_claimed()
    files = [run.path / name for name in ("metrics.jsonl", "events.jsonl")]
    return any(file.exists() and time.time() - file.stat().st_mtime < QUIET for file in files)


def _scores(
    run: LoadedRun, summary: Mapping[str, Any] | None, events: Iterable[Mapping[str, Any]]
) -> tuple[float | None, float | None]:
    """The held-out scores before training and last measured."""
    found = {event.get("name"): event for event in events if event["kind"] == "eval"}
    held = {name: (summary or {}).get(name) or found.get(name) or {} for name in ("before", "after")}
    before, after = (_number(held[name].get("score")) for name in ("before", "after"))
    if after is None and (run.path / "metrics.jsonl").exists():
        measured = [row["eval/score"] for row in run.metrics if "eval/score" in row]
        after = _number(measured[-1]) if measured else None
    return before, after


def _duration(run: LoadedRun, summary: Mapping[str, Any] | None, events: list[dict[str, Any]]) -> float | None:
    if summary is not None and "seconds" in summary:
        return float(summary["seconds"])
    start = next((event for event in reversed(events) if event["kind"] == "start"), None)
    last = last_line(run.path / "logs" / "train.jsonl") or (events[-1] if events else {})
    if start is None or (begin := _seconds(start.get("timestamp"))) is None:
        return None
    end = _seconds(last.get("timestamp"))
    return max(0.0, (end if end is not None else begin) - begin)


def _events(path: Path, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The complete events of some kinds; other lines are not parsed, since there may be many."""
    file = path / "events.jsonl"
    marks = [f'"kind": "{kind}"'.encode() for kind in kinds]
    if not file.exists():
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n") and any(mark in line[:400] for mark in marks):
                try:
                    event = json.loads(line)
                except ValueError:
                    raise NovaError("not JSON", where=f"{file}:{number}", fix="remove the line") from None
                if isinstance(event, dict) and event.get("kind") in kinds:
                    yield event


def last_line(file: Path) -> dict[str, Any] | None:
    """The last complete line of a JSONL file, without reading what is before it; None if there is none."""
    if not file.exists():
        return None
    with file.open("rb") as lines:
        size, span = lines.seek(0, 2), 1 << 16
        while True:
            lines.seek(max(0, size - span))
            whole = lines.read(min(span, size)).rpartition(b"\n")[0]
            _, cut, line = whole.rpartition(b"\n")
            if cut or span >= size:
                break
            span *= 4
    line = line.strip()
    if not line:
        return None
    try:
        value = json.loads(line)
    except ValueError:
        raise NovaError("the last complete line is not JSON", where=str(file), fix="remove the line") from None
    return value if isinstance(value, dict) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _seconds(stamp: Any) -> float | None:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError):
        return None


def _name(value: Any) -> str | None:
    return Path(str(value)).name if value else None
