"""Read rows from JSON, JSONL, CSV, Parquet and Arrow files, saved datasets and the Hugging Face Hub.

Every source yields `RawRow`s with their locations. A row that cannot be read is yielded with its error; a file that
cannot be read raises NovaError.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.data.columnar import arrow_rows, from_hub, parquet_rows, saved_rows
from novarl.data.textual import Place, csv_rows, json_rows, jsonl_rows

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet", ".arrow")
_SPLIT = re.compile("train|test|valid|dev|eval", re.IGNORECASE)
"""Split names in file names."""
_HUB_ID = re.compile(r"(?P<id>[\w.-]{1,96}(/[\w.-]{1,96})?)(:(?P<config>[\w.-]+))?")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a source: its `value`, or the `error` if it could not be read. `where` names it in messages and, as
    the id of its prompt, its random stream: "rows.jsonl:12" (a line), "rows.json:31[7]" (line 31, element 7),
    "rows.parquet:12" (the 12th row). It has no directory, so that a file may be moved.
    `shown` replaces it in messages, such as "prompts[12]" for "data[12]"."""

    index: int
    where: str
    value: Mapping[str, Any] | None
    error: str | None = None
    shown: str | None = None

    @property
    def place(self) -> str:
        """The row's name in messages."""
        return self.shown or self.where


def read(path: str | Path, split: str | None = None) -> Iterator[RawRow]:
    """The rows of a file, a directory or a Hub dataset, in order. `path` is a file with one of `SUFFIXES`; a directory
    written by `save_to_disk` or holding data files; or a Hub id, `owner/name` or `owner/name:config`. Directories and
    Hub ids take a split (default "train"): `path@split`, or RL2's `split@path`. NovaError: the source is missing,
    empty, damaged, of an unknown type, or cannot be reached."""
    name, split = _name_and_split(str(path), split)
    file = _existing(name)
    if file is None:
        hub = _HUB_ID.fullmatch(name)
        if hub is None or name.lower().endswith(SUFFIXES):
            raise NovaError("no such file", where=name, fix=_nearest_file(name))
        rows: Iterator[Place] = from_hub(hub["id"], hub["config"], split or "train")
    elif file.is_dir():
        rows = _folder_rows(file, split)
    else:
        if split is not None:
            raise NovaError(f"a file has no splits, but split {split!r} was requested", where=name, fix="leave it out")
        rows = _file_rows(file)
    return _numbered(rows, name)


def from_python(rows: Iterable[Any], name: str, *, shown: str | None = None) -> list[RawRow]:
    """Rows in memory: mappings, or strings as prompts. Their locations are `name[0]`, `name[1]`, ..., and in messages
    `shown[0]`, `shown[1]`, ...

    Raises NovaError if there are none.
    """
    shown = shown or name
    if isinstance(rows, Mapping):
        what, fix = "a dataset with several splits", "select one: dataset['train']"
        raise NovaError(f"is {what}: {', '.join(map(str, rows))}", where=shown, fix=fix)
    found = []
    for index, row in enumerate(rows):
        value = {"prompt": row} if isinstance(row, str) else row
        error = (
            None if isinstance(value, Mapping) else f"has type {type(row).__name__}, but a row is a dict or a string"
        )
        place = f"{shown}[{index}]"
        found.append(RawRow(index, f"{name}[{index}]", value if error is None else None, error, place))
    if not found:
        raise NovaError("the dataset is empty", where=shown, fix="pass at least one row")
    return found


def _name_and_split(name: str, split: str | None) -> tuple[str, str | None]:
    if "@" not in name or _existing(name):
        return name, split
    head, _, tail = name.rpartition("@")
    if "/" not in head and ("/" in tail or _existing(tail)):
        head, tail = tail, head
    if split is not None and split != tail:
        raise NovaError(f"two splits were given, {tail!r} and {split!r}", where=name, fix="keep one of them")
    return head, tail


def _existing(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError):  # too long for a path; `~` without a home
        return None


def _folder_rows(directory: Path, split: str | None) -> Iterator[Place]:
    """The rows of a saved dataset, or of plain data files in the order of their names. Anything else, such as files or
    folders named after splits, is loaded with `datasets`."""
    if any((directory / name).exists() for name in ("dataset_dict.json", "state.json")):
        return saved_rows(directory, split)
    entries = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
    files = [entry for entry in entries if entry.is_file() and entry.name.lower().endswith(SUFFIXES)]
    plain = not any(entry.is_dir() for entry in entries) and not any(_SPLIT.search(file.name) for file in files)
    if files and plain and split in (None, "train"):
        return chain.from_iterable(map(_file_rows, files))
    return from_hub(str(directory), None, split or "train")


def _nearest_file(name: str) -> str:
    file = Path(name)
    if not name or not _existing(str(file.parent)):
        return f"the directory {file.parent} does not exist either" if name else "give a file"
    near = difflib.get_close_matches(file.name, sorted(entry.name for entry in file.parent.iterdir()), n=1)
    return f"did you mean {file.with_name(near[0])}?" if near else "check the path"


def _numbered(rows: Iterator[Place], name: str) -> Iterator[RawRow]:
    index = -1
    for index, (where, value, error) in enumerate(rows):
        yield RawRow(index, where, value, error)
    if index < 0:
        raise NovaError("the dataset is empty", where=name, fix="check that this is the right file")


def _file_rows(file: Path) -> Iterator[Place]:
    readers: dict[str, Callable[[Path], Iterator[Place]]] = {
        ".jsonl": jsonl_rows,
        ".json": json_rows,
        ".csv": csv_rows,
        ".parquet": parquet_rows,
        ".arrow": arrow_rows,
    }
    suffix = next((suffix for suffix in SUFFIXES if file.name.lower().endswith(suffix)), None)
    if suffix is None:
        what = f"unsupported file type *{file.suffix}"
        raise NovaError(what, where=str(file), fix=f"use one of {', '.join(SUFFIXES)}")
    if file.stat().st_size == 0:
        raise NovaError("the file is empty", where=str(file), fix="check that this is the right file")
    return readers[suffix.removesuffix(".gz")](file)
