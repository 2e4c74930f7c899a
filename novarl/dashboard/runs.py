"""Finds runs under directories, and opens their files. A link that leaves the directory is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from novarl.core.documents import read_object
from novarl.core.errors import NovaError
from novarl.core.rundir import FORMAT

MARKS = ("metrics.jsonl", "manifest.json", "summary.json", "events.jsonl")
"""A directory with one of these files is a run, possibly a half-written one."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory. `name` is unique among the runs shown; `path` and `root` contain no links."""

    name: str
    path: Path
    root: Path

    def file(self, name: str) -> Path | None:
        """The file or folder `name` of the run, or None if there is none. NovaError for a link that leaves the root."""
        path = self.path / name
        if not os.path.lexists(path):
            return None
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(self.root):
            raise NovaError("a link that leaves the run directory; it is not followed", where=str(path))
        return real if real.exists() else None

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of the run, or None if there is no such file. NovaError if it is damaged."""
        path = self.file(name)
        return None if path is None else read_object(path)

    def problem(self) -> str | None:
        """One sentence about why the run cannot be read, or None."""
        try:
            manifest = self.read_json("manifest.json")
        except NovaError as error:
            return str(error)
        written = (manifest or {}).get("format", FORMAT)
        if written != FORMAT:
            return f"{self.path}: run directory format {written}; this version of NovaRL reads format {FORMAT}"
        return None


@dataclass
class Library:
    """The runs in `places`, each a run directory or a directory of runs. `refused` says what is not shown, and why."""

    places: Sequence[Path]
    runs: dict[str, Run] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def refresh(self) -> bool:
        """Look for runs again; True if the list changed."""
        runs: dict[str, Run] = {}
        refused: list[str] = []
        paths: set[Path] = set()
        for place in self.places:
            for run in _found(place, refused):
                if run.path in paths:
                    continue
                paths.add(run.path)
                name, number = run.name, 2
                while name in runs:
                    name, number = f"{run.name} ({number})", number + 1
                runs[name] = Run(name, run.path, run.root)
        changed = runs != self.runs or refused != self.refused
        self.runs, self.refused = runs, refused
        return changed

    def __getitem__(self, name: str) -> Run:
        """The run of that name. NovaError if none has it."""
        try:
            return self.runs[name]
        except KeyError:
            raise NovaError(f"no run is named {name[:80]!r}", where="run", fix="see /api/runs") from None


def check_places(names: Sequence[str]) -> list[Path]:
    """The directories, which must exist. NovaError otherwise."""
    places = []
    for name in names:
        path = Path(name).expanduser()
        if not path.is_dir():
            what = "is a file" if path.exists() else "no such directory"
            raise NovaError(what, where=name, fix="give a run directory, or a directory that contains runs")
        places.append(path)
    return places


def is_run(folder: Path) -> bool:
    return any(os.path.lexists(folder / mark) for mark in MARKS)


def _found(place: Path, refused: list[str]) -> list[Run]:
    """The runs of a place: itself, or its folders and their folders."""
    root = Path(os.path.realpath(place))
    if is_run(root):
        return [Run(root.name or "run", root, root)]
    found: list[Run] = []
    for folder in _folders(root, root, refused):
        if is_run(folder):
            found.append(Run(_name(folder, root), folder, root))
        else:
            inner = [deeper for deeper in _folders(folder, root, refused) if is_run(deeper)]
            found += [Run(_name(deeper, root), deeper, root) for deeper in inner]
    return found


def _name(folder: Path, root: Path) -> str:
    return folder.relative_to(root).as_posix()


def _folders(folder: Path, root: Path, refused: list[str]) -> list[Path]:
    """The folders in a folder, in the order of their names. A link is followed within the root only, after the others,
    so that a run that has a name and a link (`latest`) is listed under its name."""
    plain, linked = [], []
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        refused.append(f"{folder}: cannot be read ({error.strerror})")
        return []
    for entry in entries:
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        if not entry.is_symlink():
            plain.append(Path(entry.path))
            continue
        real = Path(os.path.realpath(entry.path))
        if not real.is_relative_to(root):
            refused.append(f"{entry.path}: a link that leaves {root}; it is not followed")
        elif real not in plain and real != root:
            linked.append(real)
    return [*plain, *(path for path in linked if path not in plain)]
