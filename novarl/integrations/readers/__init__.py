"""Readers of files that other libraries have written, chosen by the contents of the source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from novarl.core.errors import NovaError
from novarl.integrations.readers import columns, slime, trackio, trl, verifiers, verl
from novarl.integrations.readers.reading import Reading, first_line, some

FORMATS = "TRL (completions/*.parquet, trainer_state.json), verl (<step>.jsonl), slime (.pt), verifiers (results.jsonl)"
READERS = (trl, verifiers, verl, slime, columns)
"""In the order in which they are asked; `trackio` takes options, and is asked first."""


def read(source: Path, options: Mapping[str, str]) -> Reading:
    """The contents of `source`. `options` are a mapping for a JSONL file, or `run` for trackio.

    Raises NovaError if no reader knows the format, or an option does not belong to it.
    """
    if not source.exists():
        raise NovaError("no such file or directory", where=str(source), fix="check the path")
    if (source / "metrics.jsonl").is_file() and (source / "manifest.json").is_file():
        fix = "use it as it is: novarl.load_run(path)"
        raise NovaError("already a run directory", where=str(source), fix=fix)
    if trackio.recognises(source):
        _only(options, {"run"}, "trackio")
        return trackio.read(source, options.get("run"))
    if options:
        return columns.read(source, options)
    reader = next((reader for reader in READERS if reader.recognises(source)), None)
    if reader is None:
        raise _unknown(source)
    return reader.read(source)


def _only(options: Mapping[str, str], known: set[str], what: str) -> None:
    for name, value in options.items():
        if name not in known:
            raise NovaError(f"unknown option for {what}", where=f"{name}={value}", fix=f"one of {some(sorted(known))}")


def _unknown(source: Path) -> NovaError:
    verifiers.refuse_traces(source)
    if source.suffix == ".jsonl" and (found := first_line(source)):
        example = f"novarl import {source} prompt=COLUMN text=COLUMN reward=COLUMN"
        return NovaError(
            f"unknown format with the columns {some(found)}", where=str(source), fix=f"say which: {example}"
        )
    fix = f"known: {FORMATS}, trackio (.db), and any JSONL file with a mapping"
    return NovaError("unknown format", where=str(source), fix=fix)
