"""The command line with a disk that kills the process (SIGKILL, no clean-up) at one chosen operation of a save.

python -m benchmarks.dying AT WORDS...      dies in the middle of operation AT of all saves of the run, counted from 0
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from novarl import cli
from novarl.core import checkpoint


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DyingDisk(checkpoint.Disk):
    """Leaves half of what it was writing, as a kill in the middle of a write would, and dies."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, -1

    def _reached(self) -> bool:
        self.count += 1
        return self.count == self.at

    def write(self, path: Path, data: bytes) -> None:
        if self._reached():
            super().write(path, data[: len(data) // 2])
            die()
        super().write(path, data)

    def produce(self, path: Path, writer: Callable[[Path], None]) -> None:
        reached = self._reached()
        super().produce(path, writer)
        if reached:
            for file in [file for file in path.rglob("*") if file.is_file()] or [path]:
                os.truncate(file, file.stat().st_size // 2)
            die()

    def sync(self, path: Path) -> None:
        if self._reached():
            die()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        if self._reached():
            die()
        super().rename(source, target)


if __name__ == "__main__":
    checkpoint.DISK = DyingDisk(int(sys.argv[1]))
    raise SystemExit(cli.main(sys.argv[2:]))
