"""What a reader finds in a source, and how it becomes a run directory."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from novarl.core.errors import NovaError
from novarl.observe.writer import RunWriter

Row = dict[str, Any]


@dataclass
class Reading:
    """The contents of a source.

    writer    the library that wrote it
    kind      rl, sft, dpo or rm
    rollouts  the answers of each step, as in docs/run_directory.md
    metrics   the metrics of each step, and `held_out` those of evaluations, under our names
    renamed   {the source's name of a metric: ours}
    read      what was read, one phrase each; `absent` what the source does not have; `notes` anything else to know
    summary   values that describe the whole run
    """

    writer: str
    kind: str = "rl"
    rollouts: dict[int, list[Row]] = field(default_factory=dict)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    held_out: dict[int, dict[str, float]] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    renamed: dict[str, str] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def extra(self) -> list[str]:
        """The columns of the source that were kept under `extra`."""
        return sorted({name for rows in self.rollouts.values() for row in rows for name in row.get("extra", {})})

    def write(self, out: Path, source: Path) -> None:
        """Write the run directory. Raises NovaError if it already holds a run, or if nothing was read."""
        if not self.rollouts and not self.metrics and not self.held_out:
            raise NovaError("contains no answers and no metrics", where=str(source), fix="give another source")
        counted = {step: counts(rows) for step, rows in self.rollouts.items()}
        manifest = {"imported": {"source": str(source), "read": self.read, "absent": self.absent, "notes": self.notes}}
        config = self.config
        run = RunWriter(out, writer=self.writer, kind=self.kind, config=config, manifest=manifest)
        for step in sorted({*self.rollouts, *self.metrics, *self.held_out}):
            metrics = counted.get(step, {}) | self.metrics.get(step, {}) | self.held_out.get(step, {})
            if metrics:
                run.step(step, metrics)
            if step in self.held_out:
                run.event("eval", name="held-out", step=step, metrics=self.held_out[step])
            if step in self.rollouts:
                run.rollouts(step, self.rollouts[step])
        run.close("done", imported=str(source), **({"totals": self.summary} if self.summary else {}))


def counts(rows: Sequence[Row]) -> dict[str, float]:
    """What the answers of a step tell about it: their number, and the mean and deviation of their rewards."""
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    found: dict[str, float] = {"episodes": float(len(rows))}
    if rewards:
        found |= {"reward_raw_mean": fmean(rewards), "reward_std": pstdev(rewards)}
    return found


def grouped(rows: Iterable[Row], key: str = "prompt") -> list[Row]:
    """The answers of a step with `group` and `index`: those with the same `key` are a group."""
    groups: dict[str, int] = {}
    sizes: Counter[int] = Counter()
    found = []
    for row in rows:
        group = groups.setdefault(str(row.get(key)), len(groups))
        found.append(row | {"group": group, "index": sizes[group]})
        sizes[group] += 1
    return found


def by_step(rows: Iterable[tuple[int, Row]], key: str = "prompt") -> dict[int, list[Row]]:
    """The answers of each step, grouped."""
    steps: dict[int, list[Row]] = {}
    for step, row in rows:
        steps.setdefault(step, []).append(row)
    return {step: grouped(steps[step], key) for step in sorted(steps)}


def json_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file with their place. Raises NovaError for a line that is no object."""
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file}:{number}", _object(line, f"{file}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise NovaError(f"cannot be read ({error})", where=str(file), fix="give a text file") from None


def first_line(file: Path) -> dict[str, Any]:
    """The first object of a JSONL file, or an empty one if it begins with something else."""
    try:
        return next((value for _, value in json_lines(file)), {})
    except NovaError:
        return {}


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NovaError(f"not JSON ({error})", where=place, fix="remove the line, or restore the file") from None
    if not isinstance(value, dict):
        raise NovaError("not a JSON object", where=place, fix="one object a line")
    return value


def number(value: Any, place: str) -> float | None:
    """`value` as a number; None for null, NaN and infinities. Raises NovaError for anything else."""
    if value is None:
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        what = f"{str(value)[:40]!r} is not a number"
        raise NovaError(what, where=place, fix="correct the value or the mapping") from None
    return found if math.isfinite(found) else None


def whole(value: Any, place: str) -> int:
    """`value` as a step number. Raises NovaError if it is none."""
    found = number(value, place)
    if found is None or found != int(found) or found < 0:
        raise NovaError(f"{str(value)[:40]!r} is not a step", where=place, fix="a whole number from 0")
    return int(found)


def text(value: Any) -> str | None:
    """`value` as text; what is no text is written as JSON."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first names, for a message."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


def count(number: int, what: str) -> str:
    """The number of some things, for a message."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def span(steps: Mapping[int, Any] | Sequence[int]) -> str:
    """The range of the steps, for a message."""
    first, last = min(steps), max(steps)
    return f"step {first}" if first == last else f"steps {first} to {last}"
