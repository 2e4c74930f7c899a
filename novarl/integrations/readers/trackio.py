"""trackio: the SQLite file of a project, `~/.cache/huggingface/trackio/<project>.db`. It is opened read-only."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError, nearest
from novarl.integrations.names import TRL, TRL_HELD_OUT, plain_settings, translate
from novarl.integrations.readers.reading import Reading, count, some, span, whole
from novarl.integrations.trl_logs import kind_of

MAGIC = b"SQLite format 3\x00"
NONFINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
ELSEWHERE = {"system_metrics": "system metrics", "traces": "traces", "alerts": "alerts"}
"""Tables that are not read."""


def recognises(source: Path) -> bool:
    """Whether `source` is a database of trackio. Raises NovaError for a database that cannot be read."""
    if not source.is_file():
        return False
    with source.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return False
    try:
        with closing(_open(source)) as database:
            return "metrics" in _tables(database)
    except sqlite3.Error as error:
        fix = "copy the file, and import the copy"
        raise NovaError(f"the database cannot be read ({error})", where=str(source), fix=fix) from None


def read(source: Path, run: str | None = None) -> Reading:
    """The metrics of one run of a project. Raises NovaError if there are several and `run` names none."""
    with closing(_open(source)) as database:
        try:
            return _read(database, source, run)
        except sqlite3.Error as error:
            raise NovaError(f"not a project of trackio ({error})", where=str(source), fix="give another file") from None


def _read(database: sqlite3.Connection, source: Path, run: str | None) -> Reading:
    names = [name for (name,) in database.execute("SELECT DISTINCT run_name FROM metrics ORDER BY run_name")]
    if run is None and len(names) > 1:
        fix = f"add run=NAME, one of {some(names)}"
        raise NovaError(f"the project has {len(names)} runs", where=str(source), fix=fix)
    if not names or (run is not None and run not in names):
        raise NovaError(f"there is no run {run!r}", where=str(source), fix=nearest(str(run), names or ["(none)"]))
    run = run or names[0]
    found = Reading("trackio")
    lines = list(_lines(database, source, run))
    kind, found.kind = kind_of(name.removeprefix("train/") for _, values in lines for name in values)
    refused: set[str] = set()
    repeated = 0
    for step, values in lines:
        held_out = {name.replace("/", "_", 1): value for name, value in values.items() if name.startswith("eval/")}
        training = {
            name.removeprefix("train/"): value for name, value in values.items() if not name.startswith("eval/")
        }
        line = translate(training, TRL, "trackio", kind)
        before = found.metrics.setdefault(step, {})
        repeated += len(set(before) & set(line.metrics))
        before |= line.metrics
        found.renamed |= line.renamed
        refused.update(line.refused)
        if held_out:
            found.held_out[step] = found.held_out.get(step, {}) | translate(held_out, TRL_HELD_OUT, "trackio").metrics
    found.config = _config(database, run)
    found.read.append(f"run {run!r}: {count(len(lines), 'log')}, {span(found.metrics)}")
    found.absent.append("answers, tokens and log-probabilities")
    if refused:
        found.notes.append(f"not read, because not a number: {some(sorted(refused))}")
    if repeated:
        found.notes.append(f"{count(repeated, 'value')} logged again at the same step; the last is kept")
    found.notes += [f"not read: {what} ({number})" for what, number in _unread(database, run)]
    return found


def _open(source: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _lines(database: sqlite3.Connection, source: Path, run: str) -> Iterator[tuple[int, dict[str, Any]]]:
    query = "SELECT id, step, metrics FROM metrics WHERE run_name = ? ORDER BY step, id"
    for number, step, text in database.execute(query, (run,)):
        place = f"{source} metrics.id={number}"
        try:
            values = json.loads(text)
        except (ValueError, TypeError) as error:
            raise NovaError(f"not JSON ({error})", where=place, fix="restore the file") from None
        if not isinstance(values, Mapping):
            raise NovaError("not a JSON object", where=place, fix="restore the file")
        plain = {
            name: NONFINITE.get(value, value) if isinstance(value, str) else value for name, value in values.items()
        }
        yield whole(step, place), plain


def _config(database: sqlite3.Connection, run: str) -> dict[str, Any] | None:
    if "configs" not in _tables(database):
        return None
    row = database.execute("SELECT config FROM configs WHERE run_name = ? ORDER BY id DESC", (run,)).fetchone()
    return plain_settings(json.loads(row[0])) if row else None


def _unread(database: sqlite3.Connection, run: str) -> Iterator[tuple[str, int]]:
    for table in sorted(set(ELSEWHERE) & _tables(database)):
        (number,) = database.execute(f"SELECT COUNT(*) FROM {table} WHERE run_name = ?", (run,)).fetchone()
        if number:
            yield ELSEWHERE[table], number
