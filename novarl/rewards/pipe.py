"""The parent's end of a worker process: start it, exchange JSON lines under a deadline, end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

_NOTICE = 0.1
"""Seconds within which a wait notices that it is no longer wanted."""


class Died(Exception):
    """The worker ended, or sent something that is no reply."""


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


class Pipe:
    """One worker process (see `worker`), leader of a session of its own, so that it ends with all its children."""

    def __init__(self) -> None:
        # The child finds modules exactly where the parent does, in the same order.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "novarl.rewards.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._unread = b""
        self._end = weakref.finalize(self, _end, self.process)

    def send(self, message: dict[str, Any], *, deadline: float, cancelled: threading.Event) -> None:
        """Write one request. TimeoutError past `deadline` (of `time.monotonic`), Died, Cancelled."""
        left = memoryview(json.dumps(message, default=str).encode() + b"\n")
        try:
            while left:
                self._wait(self._in, select.POLLOUT, deadline=deadline, cancelled=cancelled)
                left = left[os.write(self._in, left) :]
        except (BrokenPipeError, BlockingIOError) as error:
            raise Died(self._obituary()) from error

    def receive(self, *, deadline: float, cancelled: threading.Event) -> dict[str, Any]:
        """Read one reply. TimeoutError past `deadline`, Died, Cancelled."""
        while b"\n" not in self._unread:
            self._wait(self._out, select.POLLIN, deadline=deadline, cancelled=cancelled)
            piece = os.read(self._out, 1 << 16)
            if not piece:
                raise Died(self._obituary())
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            reply: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise Died(f"sent a line that is no reply: {line[:80]!r}") from error
        return reply

    def used(self) -> tuple[int, float] | None:
        """(resident bytes that no file backs and no other process shares, CPU seconds of the process and of its
        children that have ended), where there is /proc."""
        try:
            resident, shared = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1:3]
            ticks = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        except (OSError, IndexError, ValueError):
            return None
        own = (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
        return own, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    @property
    def ended(self) -> bool:
        """Whether the worker is gone."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """End the worker and all its children now."""
        self._end.detach()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        _close(self.process)

    def close(self) -> None:
        """Let the worker finish, for a second at most, and end it."""
        self._end()

    def _wait(self, fd: int, event: int, *, deadline: float, cancelled: threading.Event) -> None:
        poll = select.poll()
        poll.register(fd, event)
        while not cancelled.is_set():
            left = deadline - time.monotonic()
            if poll.poll(1000 * max(0.0, min(left, _NOTICE))):
                return
            if left <= 0:
                raise TimeoutError
        raise Cancelled

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        code = self.process.returncode
        return "closed its output" if code is None else f"ended its process with exit code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.write(process.stdin.fileno(), b'{"op": "stop"}\n')  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    _close(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
