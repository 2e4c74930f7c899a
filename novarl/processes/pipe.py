"""The parent's end of a worker process: start it, exchange JSON under a deadline, end it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from novarl.processes.channel import MOST_BYTES

_NOTICE = 0.1
"""Seconds within which a wait notices that it is no longer wanted."""


_GRACE = 3.0
"""Seconds in which the keeper ends the worker and all that it has started."""
_HEADER = 64
"""The most bytes of a reply's first line."""


class Died(Exception):
    """The worker ended, or sent something that is no reply."""


class Cancelled(Exception):
    """Nobody waits for the answer any more."""


class Pipe:
    """One worker process, `python -m module` with a `core.channel`, and its `core.keeper`, so that it ends with all its
    children.

    `process` is the keeper, which ends as the worker does; `worker` is the worker's own process id, once it is known.
    """

    def __init__(self, module: str) -> None:
        # The child finds modules exactly where the parent does, in the same order.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        self.worker: int | None = None
        self._secret = secrets.token_hex(16).encode()
        self._unread = bytearray()
        self._size: int | None = None
        self._end = weakref.finalize(self, _end, self.process, os.getpid())
        with contextlib.suppress(BrokenPipeError):  # a process that is gone already says so at the first request
            os.write(self._in, self._secret + b"\n")

    def send(self, message: dict[str, Any], *, deadline: float, cancelled: threading.Event) -> None:
        """Write one request. TimeoutError past `deadline` (of `time.monotonic`), Died, Cancelled."""
        left = memoryview(json.dumps(message, default=str).encode() + b"\n")
        try:
            while left:
                if time.monotonic() > deadline:
                    raise TimeoutError
                self._wait(self._in, select.POLLOUT, deadline=deadline, cancelled=cancelled)
                left = left[os.write(self._in, left) :]
        except (BrokenPipeError, BlockingIOError) as error:
            raise Died(self._obituary()) from error

    def receive(self, *, deadline: float, cancelled: threading.Event) -> dict[str, Any]:
        """Read one reply. TimeoutError past `deadline`, also while a reply is still coming in; Died, Cancelled."""
        late = False
        while (reply := self._whole_reply()) is None:
            if late:
                raise TimeoutError
            self._wait(self._out, select.POLLIN, deadline=deadline, cancelled=cancelled)
            piece = os.read(self._out, 1 << 16)
            if not piece:
                raise Died(self._obituary())
            self._unread += piece
            late = time.monotonic() > deadline
        self.worker = reply.get("pid", self.worker)
        return reply

    def _whole_reply(self) -> dict[str, Any] | None:
        """The next reply, where all of it is there. Died: what the worker wrote is none."""
        if self._size is None:
            header, newline, _ = self._unread[:_HEADER].partition(b"\n")
            if not newline and len(header) < _HEADER:
                return None
            secret, _, size = header.partition(b" ")
            if secret != self._secret or not size.isdigit():
                raise Died(f"wrote to the pipe of replies, which is not its own: {bytes(header)!r}")
            if int(size) > MOST_BYTES:
                raise Died(f"sent a reply of {int(size) / 1e6:.1f} MB; a reply may have {MOST_BYTES / 1e6:.0f} MB")
            self._size = int(size)
            del self._unread[: len(header) + 1]
        if len(self._unread) < self._size:
            return None
        body = self._unread[: self._size]
        del self._unread[: self._size]
        self._size = None
        try:
            reply: dict[str, Any] = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Died(f"sent a reply that is not JSON: {bytes(body[:80])!r}") from error
        return reply

    def used(self) -> tuple[int, float] | None:
        """(resident bytes that no file backs and no other process shares, CPU seconds of the process and of its
        children that have ended), where there is /proc."""
        try:
            resident, shared = Path(f"/proc/{self.worker}/statm").read_text().split()[1:3]
            ticks = Path(f"/proc/{self.worker}/stat").read_text().rpartition(")")[2].split()[11:15]
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
        _kill(self.process)

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
        if code is None:
            return "closed its output"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork: the worker is not its own
        return
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.write(process.stdin.fileno(), b'{"op": "stop"}\n')  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Have the keeper end everything. Where it does not (the user's code has stopped it), its end is the worker's."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
        process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
