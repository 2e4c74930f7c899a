"""The command line with a disk that kills the process (SIGKILL, no clean-up) at one chosen operation of a save.

python -m benchmarks.dying AT WORDS...     dies in the middle of operation AT of all that the run saves, counted from 0
python -m benchmarks.dying FILE WORDS...   dies nowhere, and writes the name of each operation to FILE as a JSON list
"""

from __future__ import annotations

import json
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
        self.at, self.names = at, list[str]()

    def _reached(self, name: str) -> bool:
        self.names.append(name)
        return len(self.names) - 1 == self.at

    def write(self, path: Path, data: bytes) -> None:
        if self._reached(f"write {path.name}"):
            super().write(path, data[: len(data) // 2])
            die()
        super().write(path, data)

    def produce(self, path: Path, writer: Callable[[Path], None]) -> None:
        reached = self._reached(f"produce {path.name}")
        super().produce(path, writer)
        if reached:
            for file in [file for file in path.rglob("*") if file.is_file()] or [path]:
                os.truncate(file, file.stat().st_size // 2)
            die()

    def sync(self, path: Path) -> None:
        if self._reached(f"sync {path.name}"):
            die()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        if self._reached(f"rename {target.name}"):
            die()
        super().rename(source, target)

    def link(self, path: Path, target: str) -> None:
        if self._reached(f"link {path.name}"):
            die()
        super().link(path, target)

    def remove(self, path: Path) -> None:
        if self._reached(f"remove {path.name}"):
            for file in [file for file in path.rglob("*") if file.is_file()][::2] if path.is_dir() else []:
                file.unlink()
            die()
        super().remove(path)


if __name__ == "__main__":
    at = sys.argv[1]
    disk = DyingDisk(int(at) if at.isdecimal() else -1)
    checkpoint.DISK = disk
    code = cli.main(sys.argv[2:])
    if not at.isdecimal():
        Path(at).write_text(json.dumps(disk.names))
    raise SystemExit(code)
