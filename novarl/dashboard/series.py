"""The metrics of a run as columns, read incrementally, and thinned for drawing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from novarl.dashboard.growing import GrowingFile
from novarl.dashboard.runs import Run
from novarl.observe.sinks.jsonl import plain_name

LARGE = 1 << 18
"""Bytes from which a block is parsed by pyarrow, which is faster, but takes a moment to load."""

SLOW = 24 << 20
"""Bytes from which a file is read in the background, with a preview until then."""

Floats = NDArray[np.float64]


class Series:
    """The metrics of a run. `update` reads what was appended; the other methods use what was read so far.

    names      metrics, with their plain names
    rows       updates read
    nonfinite  for each metric that ever was NaN or infinite: the rows
    damaged    one sentence for each line that could not be read; the line is left out
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.lock = threading.RLock()
        self._file = GrowingFile()
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self.lines = 0
        self.generation = getattr(self, "generation", -1) + 1
        self._columns: dict[str, Floats] = {}
        self._phases = np.zeros(0, dtype=np.int16)
        self.phases: list[str] = []
        self.nonfinite: dict[str, list[int]] = {}
        self.damaged: list[str] = []
        self._preview: Series | None = None
        self._placed: dict[str, tuple[int, NDArray[np.int64], Floats]] = {}

    def update(self, seconds: float = 60.0) -> bool:
        """Read appended lines for about `seconds`; True if there were any."""
        until, changed = time.monotonic() + seconds, False
        with self.lock:
            while True:
                block, began = self._file.read(self.run.file("metrics.jsonl"))
                if began:
                    self._clear()
                    changed = True
                if not block:
                    return changed
                changed = True
                self.take(block)
                if time.monotonic() > until:
                    return True

    @property
    def progress(self) -> float:
        """The share of the file that was read."""
        return self._file.progress

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._columns.values())

    def names(self, phase: str | None = None) -> list[str]:
        """The metrics of all phases or of one."""
        with self.lock:
            names = sorted(name for name in self._columns if name != "step")
            if phase is None:
                return names
            rows = self._rows_of(phase)
            odd = {name for name, where in self.nonfinite.items() if np.isin(where, rows).any()}
            return [name for name in names if name in odd or np.isfinite(self._columns[name][rows]).any()]

    def last(self) -> dict[str, float]:
        """The last finite value of every metric in the last phase."""
        if not self.rows:
            return {}
        rows = self._rows_of(self.phases[self._phases[self.rows - 1]])
        found = {}
        for name, column in self._columns.items():
            values = column[rows]
            known = values[np.isfinite(values)]
            if len(known):
                found[name] = float(known[-1])
        return found

    def column(self, name: str, phase: str) -> tuple[Floats, Floats, Floats]:
        """The positions and values of a metric in a phase, without updates that lack it, and the positions where it was
        NaN or infinite.

        The position of an update is its step. The n updates of one step are spaced evenly: step - 1 + 1/n, ..., step.
        """
        with self.lock:
            if phase not in self.phases or name not in self._columns:
                return np.zeros(0), np.zeros(0), np.zeros(0)
            rows, across = self._places(phase)
            values = self._columns[name][rows]
            where = np.asarray(self.nonfinite.get(name, ()), dtype=np.int64)
        known = np.isfinite(values)
        odd = across[np.isin(rows, where)]
        across, values = across[known], values[known]
        if len(across) > 1 and (across[1:] < across[:-1]).any():
            order = np.argsort(across, kind="stable")
            across, values = across[order], values[order]
        return across, values, odd

    def _places(self, phase: str) -> tuple[NDArray[np.int64], Floats]:
        """The rows of a phase and their positions, which are the same for every metric."""
        known = self._placed.get(phase)
        if known is None or known[0] != self.rows:
            rows = self._rows_of(phase)
            known = self._placed[phase] = (self.rows, rows, positions(self._columns["step"][rows]))
        return known[1], known[2]

    def _rows_of(self, phase: str) -> NDArray[np.int64]:
        return np.flatnonzero(self._phases[: self.rows] == self.phases.index(phase))

    def take(self, block: bytes) -> None:
        """Append complete lines."""
        table = _parse_fast(block) if len(block) >= LARGE else None
        if table is None:
            table = self._parse_lines(block)
        phases, columns, nonfinite, rows = table
        first, self.lines = self.rows, self.lines + block.count(b"\n")
        self._reserve(first + rows)
        for name in phases:
            if name not in self.phases:
                self.phases.append(name)
        order = {name: place for place, name in enumerate(self.phases)}
        self._phases[first : first + rows] = [order[name] for name in phases]
        for name, values in columns.items():
            if name not in self._columns:
                self._columns[name] = np.full(len(self._phases), np.nan)
            self._columns[name][first : first + rows] = values
        for name, where in nonfinite.items():
            self.nonfinite.setdefault(name, []).extend(first + row for row in where)
        self.rows += rows

    def ready(self, seconds: float = 0.3) -> Series:
        """The series itself, read to the end, or a preview while a large file is being read."""
        path = self.run.file("metrics.jsonl")
        if not self.rows and path is not None and path.stat().st_size > SLOW:
            return self.preview()
        self.update(seconds)
        return self if self.progress == 1.0 else self.preview()

    def preview(self, points: int = 300) -> Series:
        """About `points` lines, evenly spaced in the file: what a large file shows until it is read."""
        if self._preview is not None:
            return self._preview
        found = self._preview = Series(self.run)
        path = self.run.file("metrics.jsonl")
        if path is None:
            return found
        lines = []
        with path.open("rb") as file:
            size = self._file.size = file.seek(0, 2)
            for place in sorted({size * number // points for number in range(points)}):
                file.seek(place)
                file.readline()  # the rest of the line that `place` is in
                line = file.readline()
                if line.endswith(b"\n"):
                    lines.append(line)
        found.take(b"".join(dict.fromkeys(lines)))
        return found

    def _reserve(self, rows: int) -> None:
        if rows <= len(self._phases):
            return
        size = max(rows, 2 * len(self._phases), 64)
        self._phases = np.concatenate([self._phases, np.zeros(size - len(self._phases), dtype=np.int16)])
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate([column, np.full(size - len(column), np.nan)])

    def _parse_lines(self, block: bytes) -> Table:
        """The block line by line. A damaged line is left out and noted."""
        phases: list[str] = []
        columns: dict[str, Floats] = {}
        nonfinite: dict[str, list[int]] = {}
        lines = block.splitlines()
        for number, line in enumerate(lines, start=self.lines + 1):
            try:
                row = json.loads(line)
                step = float(row["step"])
            except (ValueError, KeyError, TypeError, RecursionError):
                self.damaged.append(f"metrics.jsonl:{number} is not a line of metrics; it is left out")
                continue
            place = len(phases)
            phases.append(str(row.get("phase") or "run"))
            for name, value in row.items():
                if name == "step" or not isinstance(value, int | float) or isinstance(value, bool) or name == "schema":
                    continue
                if (plain := plain_name(name)) not in columns:
                    columns[plain] = np.full(len(lines), np.nan)
                columns[plain][place] = value
            if "step" not in columns:
                columns["step"] = np.full(len(lines), np.nan)
            columns["step"][place] = step
            odd = row.get("nonfinite")
            for name in odd if isinstance(odd, Mapping) else ():
                nonfinite.setdefault(plain_name(name), []).append(place)
        return phases, {name: column[: len(phases)] for name, column in columns.items()}, nonfinite, len(phases)


Table = tuple[list[str], dict[str, Floats], dict[str, list[int]], int]
"""Parsed lines: the phase of each, columns by plain name, rows with a non-finite value by name, number of rows."""


def _parse_fast(block: bytes) -> Table | None:
    """The block at once; None if a line is damaged or unusual, so that the lines must be read one by one."""
    import pyarrow
    import pyarrow.json

    options = pyarrow.json.ReadOptions(block_size=len(block) + 1, use_threads=False)
    try:
        table = pyarrow.json.read_json(pyarrow.BufferReader(block), read_options=options)
    except pyarrow.ArrowException:
        return None
    rows = table.num_rows
    if "step" not in table.column_names or table.column("step").null_count or rows != block.count(b"\n"):
        return None
    phases = table.column("phase").to_pylist() if "phase" in table.column_names else [None] * rows
    columns: dict[str, Floats] = {}
    nonfinite: dict[str, list[int]] = {}
    for name in table.column_names:
        column, kind = table.column(name).combine_chunks(), table.schema.field(name).type
        if name == "nonfinite" and pyarrow.types.is_struct(kind):
            for inner in kind:
                where = np.flatnonzero(column.field(inner.name).is_valid().to_numpy(zero_copy_only=False))
                nonfinite[plain_name(inner.name)] = where.tolist()
        elif name != "schema" and (pyarrow.types.is_floating(kind) or pyarrow.types.is_integer(kind)):
            values: Any = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
            columns["step" if name == "step" else plain_name(name)] = values
    if "step" not in columns:
        return None
    return [str(name or "run") for name in phases], columns, nonfinite, rows


def positions(steps: Floats) -> Floats:
    """Where each update is drawn: see `Series.column`."""
    if not len(steps):
        return steps
    begins = np.flatnonzero(np.concatenate([[True], steps[1:] != steps[:-1]]))
    counts = np.diff(np.concatenate([begins, [len(steps)]]))
    number = np.arange(len(steps)) - np.repeat(begins, counts) + 1
    return steps - 1 + number / np.repeat(counts, counts)


def smoothed(across: Floats, values: Floats, points: int) -> tuple[Floats, Floats]:
    """About `points` means over windows of a twentieth of the curve, to draw over the measured points."""
    half = max(1, len(values) // 40)
    places = np.unique(np.linspace(0, len(values) - 1, min(points, len(values))).astype(np.int64))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    reach = np.minimum(half, np.minimum(places, len(values) - 1 - places))  # symmetric, so that the ends do not lag
    return across[places], (sums[places + reach + 1] - sums[places - reach]) / (2 * reach + 1)


def thinned(across: Floats, values: Floats, points: int) -> tuple[Floats, Floats]:
    """At most about `points` of the measured points: the first and the last, and the lowest and highest of each of
    `points` / 2 intervals. Nothing is averaged, so no peak is lost."""
    count = len(values)
    if count <= points:
        return across, values
    buckets = max(1, points // 2)
    edges = np.linspace(0, count, buckets + 1).astype(np.int64)
    width = int(np.diff(edges).max())
    spread = edges[:-1, None] + np.arange(width)[None, :]
    inside = spread < edges[1:, None]
    spread = np.minimum(spread, count - 1)
    taken = values[spread]
    low = spread[np.arange(buckets), np.where(inside, taken, np.inf).argmin(axis=1)]
    high = spread[np.arange(buckets), np.where(inside, taken, -np.inf).argmax(axis=1)]
    chosen = np.unique(np.concatenate([[0], low, high, [count - 1]]))
    return across[chosen], values[chosen]
