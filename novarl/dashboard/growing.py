"""Reads a file of lines that grows, from where the last read ended."""

from __future__ import annotations

from pathlib import Path

BLOCK = 8 << 20
"""Bytes read at a time, so that a large file can be shown while it is read."""

_SEEN = 64
"""Bytes before the last position that must not have changed; otherwise the file is another one, and read again."""


class GrowingFile:
    """A file of lines. `offset` is the position after the last complete line that was read."""

    def __init__(self) -> None:
        self.offset = 0
        self.size = 0
        self._before = b""

    def read(self, path: Path | None) -> tuple[bytes, bool]:
        """The next complete lines, at most about `BLOCK` bytes, and whether the file was begun anew: a resumed run cuts
        its logs. Empty if there is nothing new."""
        if path is None:
            began = self.offset > 0
            self._restart()
            return b"", began
        with path.open("rb") as file:
            self.size = file.seek(0, 2)
            began = False
            if self.offset:
                file.seek(self.offset - len(self._before))
                if self.size < self.offset or file.read(len(self._before)) != self._before:
                    self._restart()
                    began = True
            file.seek(self.offset)
            block = file.read(BLOCK)
            while block and b"\n" not in block and (more := file.read(BLOCK)):
                block += more
        end = block.rfind(b"\n") + 1
        if end:
            self.offset += end
            self._before = (self._before + block[max(0, end - _SEEN) : end])[-_SEEN:]
        return block[:end], began

    @property
    def progress(self) -> float:
        """The share of the file that was read. A last line without an end counts as read."""
        return 1.0 if self.size - self.offset < BLOCK // 8 else self.offset / self.size

    def _restart(self) -> None:
        self.offset, self.size, self._before = 0, 0, b""
