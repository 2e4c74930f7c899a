"""What a tracker is to the sink that feeds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class About:
    """The run that is tracked. `config` holds no secrets. `id` is the same after the run was resumed (`resumed`)."""

    project: str
    name: str
    id: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    resumed: bool = False


class Tracker(Protocol):
    """One run in a tracker. All methods are called in one thread, in which they may block or raise."""

    def start(self, about: About) -> None:
        """Import the library, and create or continue the run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of one update, in order. `step` repeats if a step has several updates."""

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """The rows of a table so far; replaces an earlier one of that name."""

    def system(self) -> None:
        """Record the machine's load, unless the library does so itself. Called about every ten seconds."""

    def artifact(self, path: Path, name: str) -> None:
        """Store a file or folder."""

    def finish(self, status: str) -> None:
        """End the run: `done`, `stopped`, `unsaved` or `failed`."""
