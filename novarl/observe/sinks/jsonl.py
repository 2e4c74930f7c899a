"""Log files with one JSON object per line: `metrics.jsonl`, `logs/train.jsonl` and `events.jsonl`.

metrics.jsonl      {"schema": 1, "phase": "rl", "step": 5, "nonfinite": {...}?, <metric>: number, ...}
    Metrics in alphabetical order, floats in their shortest exact form. Two identical runs write identical lines except
    for `time/`: every metric that the glossary does not mark as deterministic is written as `time/<name>`.
logs/train.jsonl   {"timestamp": "2026-01-15T10:30:00+00:00", "step": 5, "epoch": 2, "phase": "rl", <metric>: number}
    The same records, each metric under its plain name.
events.jsonl       {"schema": 1, "timestamp": ..., "kind": "save", "phase": "rl", "step": 5, <field>: anything}
    Events: saves, evaluations, skipped rows, failed rollouts, samples.

JSON has no NaN and no infinity. In the two metric files such a value is null and `nonfinite` has its name
(`{"entropy": "nan"}`); `read_metrics` restores it. In events it is the string "nan", "inf" or "-inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from novarl.core.errors import NovaError
from novarl.observe.glossary import deterministic

SCHEMA = 1


class JsonlSink:
    """Appends to the three files under `run`. Each line is written and flushed at once.

    An event of kind "phase" sets the phase of the following steps.
    """

    essential = True
    """Without its record a run cannot be read, resumed or trusted."""

    def __init__(self, run: Path) -> None:
        self.metrics = _append(run / "metrics.jsonl")
        self.train = _append(run / "logs" / "train.jsonl")
        self.events = _append(run / "events.jsonl")
        self.phase: str | None = None
        self.last_step = 0

    def step(self, step: int, record: Mapping[str, float]) -> None:
        self.last_step = step
        values = {name: float(record[name]) for name in record if name != "step"}
        nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
        finite = {name: None if name in nonfinite else value for name, value in values.items()}
        stable = {stable_name(name): value for name, value in finite.items()}
        extra = {"nonfinite": {stable_name(name): value for name, value in nonfinite.items()}} if nonfinite else {}
        _write(
            self.metrics, {"schema": SCHEMA, "phase": self.phase, "step": step, **extra, **dict(sorted(stable.items()))}
        )
        epoch = finite.pop("epoch", None)
        head = {"timestamp": _now(), "step": step, "epoch": None if epoch is None else int(epoch), "phase": self.phase}
        _write(self.train, {**head, **({"nonfinite": nonfinite} if nonfinite else {}), **dict(sorted(finite.items()))})

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "phase":
            self.phase, self.last_step = str(fields["name"]), int(fields.get("done", 0))
        head = {"schema": SCHEMA, "timestamp": _now(), "kind": kind, "phase": self.phase, "step": self.last_step}
        _write(self.events, {**head, **{name: _plain(value) for name, value in fields.items()}})

    def flush(self) -> None:
        for file in (self.metrics, self.train, self.events):
            file.flush()

    def close(self) -> None:
        for file in (self.metrics, self.train, self.events):
            file.close()


def stable_name(name: str) -> str:
    """The name of a metric in metrics.jsonl: under `time/` if its value depends on the clock or the machine."""
    return name if name.startswith("time/") or deterministic(name) else f"time/{name}"


def plain_name(name: str) -> str:
    """The inverse of `stable_name`. Stage times (`time/rollout_s`) keep their `time/`."""
    bare = name.removeprefix("time/")
    return name if deterministic(bare) else bare


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a metrics.jsonl with plain names, NaN and infinities restored, without an incomplete last line.
    NovaError for a line that is not JSON."""
    for row in read_lines(path):
        for name, text in row.pop("nonfinite", {}).items():
            row[name] = float(text)
        yield {plain_name(name): value for name, value in row.items()}


def read_lines(path: Path, *, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file that may still be growing, or of its first `most` bytes."""
    if most is not None and not path.is_file():
        return
    with path.open("rb") as file:
        read = 0
        for number, line in enumerate(file, start=1):
            read += len(line)
            if not line.endswith(b"\n") or (most is not None and read - len(line) >= most):
                return
            try:
                value = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                why = {UnicodeDecodeError: "not UTF-8 text", RecursionError: "nested too deeply"}.get(type(error))
                raise NovaError(
                    why or f"not JSON: {getattr(error, 'msg', error)}", where=f"{path}:{number}", fix=_FIX
                ) from None
            if not isinstance(value, dict) or not isinstance(value.get("nonfinite", {}), dict):
                raise NovaError("not a line written by a run", where=f"{path}:{number}", fix=_FIX)
            yield value


_FIX = "restore the file from a copy, or remove the line"


def _append(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate, legal in JSON and not in UTF-8, becomes \udXXX: JSON's own escape.
    return path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")


def _write(file: TextIO, line: Mapping[str, Any]) -> None:
    file.write(json.dumps(line, ensure_ascii=False, allow_nan=False, default=str) + "\n")
    file.flush()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
