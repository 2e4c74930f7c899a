"""A child process: started, spoken to under a deadline, and ended together with all of its own children."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from novarl.processes.channel import JSON, Codec

_NOTICE = 0.1
"""Seconds within which a wait notices that it was cancelled."""
_GRACE = 1.0
"""Seconds in which the child may end by itself when it is told to."""
_KEEPER_GRACE = 3.0
"""Seconds in which the keeper ends the child and everything that the child has started."""
_HEADER = 64
"""The most bytes of a reply's first line."""


class Died(Exception):
    """The child ended, or sent something that is not a reply."""


class Cancelled(Exception):
    """The caller no longer waits for the answer."""


class Child:
    """One child process that runs `main()` of a module, which reads requests from a `Channel` and writes replies.

    Between this process and the child stands a `keeper`, which ends the child and all of its children when this
    process ends, whatever the child is doing. `process` is the keeper; it ends as the child does.

    module:  the module whose `main` runs in the child
    codec:   how messages are written; the module's Channel must use the same
    environ: variables that only the child has
    fork:    fork this process, which has everything imported, instead of starting a new interpreter. Only a process
             with a single thread can be forked safely
    """

    def __init__(
        self, module: str, *, codec: Codec = JSON, environ: Mapping[str, str] | None = None, fork: bool = False
    ) -> None:
        self.process = _Fork(module, environ or {}) if fork else _interpreter(module, environ or {})
        assert self.process.stdin is not None and self.process.stdout is not None
        self._codec = codec
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._nonce = secrets.token_hex(16).encode()
        self._unread = bytearray()
        self._size: int | None = None
        self._using = threading.RLock()
        self._end = weakref.finalize(self, _end, self.process, self._nonce, self._using, os.getpid())
        with contextlib.suppress(BrokenPipeError):  # a child that is gone already is noticed at the first request
            os.write(self._in, self._nonce + b"\n")

    def send(self, message: Any, *, deadline: float = math.inf, cancelled: Callable[[], bool] | None = None) -> None:
        """Write one request. TimeoutError past `deadline` (of `time.monotonic`), Died, Cancelled."""
        body = self._codec.encode(message)
        left = memoryview(b"%s %d\n%b" % (self._nonce, len(body), body))
        with self._using:
            try:
                while left:
                    if time.monotonic() > deadline:
                        raise TimeoutError
                    self._wait(self._in, select.POLLOUT, deadline, cancelled)
                    left = left[os.write(self._in, left) :]
            except (BrokenPipeError, BlockingIOError) as error:
                raise Died(self._cause()) from error

    def receive(self, *, deadline: float = math.inf, cancelled: Callable[[], bool] | None = None) -> Any:
        """Read one reply. TimeoutError past `deadline`, also while a reply is still coming in; Died, Cancelled."""
        late = False
        with self._using:
            while (self._size is None and not self._header()) or len(self._unread) < (self._size or 0):
                if late:
                    raise TimeoutError
                self._wait(self._out, select.POLLIN, deadline, cancelled)
                piece = os.read(self._out, 1 << 16)
                if not piece:
                    raise Died(self._cause())
                self._unread += piece
                late = time.monotonic() > deadline
        body = self._unread[: self._size]
        del self._unread[: self._size]
        self._size = None
        try:
            return self._codec.decode(body)
        except (ValueError, RecursionError) as error:
            raise Died(f"sent a reply that is not {self._codec.name}: {bytes(body[:80])!r}") from error

    def _header(self) -> bool:
        """Read the size of the next reply; False where its first line is incomplete. Died: it is not a reply."""
        header, newline, _ = self._unread[:_HEADER].partition(b"\n")
        if not newline and len(header) < _HEADER:
            return False
        nonce, _, size = header.partition(b" ")
        if nonce != self._nonce or not size.isdigit():
            raise Died(f"wrote to the pipe that is reserved for replies: {bytes(header)!r}")
        most = self._codec.most_bytes
        if most is not None and int(size) > most:
            raise Died(f"sent a reply of {int(size) / 1e6:.1f} MB; the limit for a reply is {most / 1e6:.0f} MB")
        self._size = int(size)
        del self._unread[: len(header) + 1]
        return True

    @property
    def ended(self) -> bool:
        """Whether the child is gone."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """End the child and all of its children now."""
        self._end.detach()
        _kill(self.process, self._using)

    def close(self) -> None:
        """Let the child end by itself, for a second at most, and end it. Also from another thread during a call."""
        self._end()

    def _wait(self, fd: int, event: int, deadline: float, cancelled: Callable[[], bool] | None) -> None:
        if self.process.stdout.closed:  # type: ignore[union-attr]
            raise Died("was ended")
        poll = select.poll()
        poll.register(fd, event)
        while cancelled is None or not cancelled():
            left = deadline - time.monotonic()
            if poll.poll(1000 * max(0.0, min(left, _NOTICE))):
                return
            if left <= 0:
                raise TimeoutError
        raise Cancelled("was cancelled")

    def _cause(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)
        code = self.process.returncode
        if code is None:
            return "closed its output"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def has_one_thread() -> bool:
    """Whether this process can be forked safely. The system's threads count: libraries start some of their own."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _interpreter(module: str, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # The child finds modules exactly where the parent does, in the same order.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": path, **environ},
        start_new_session=True,
    )


class _Fork:
    """A fork of this process in which `main()` of a module runs, with the parts of `subprocess.Popen` used here."""

    def __init__(self, module: str, environ: Mapping[str, str]) -> None:
        _flush()  # or the fork would write what is buffered once more
        theirs_in, mine_in = os.pipe()
        mine_out, theirs_out = os.pipe()
        self.returncode: int | None = None
        self._polling = threading.Lock()
        # Ctrl-C during a fork would be lost in one of Python's own callbacks, so it has to wait.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                os.dup2(theirs_in, 0)
                os.dup2(theirs_out, 1)
                for end in (theirs_in, mine_in, mine_out, theirs_out):
                    os.close(end)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.environ.update(environ)
                importlib.import_module(module).main()
                status = 0
            except BaseException:  # noqa: BLE001 - nothing of the parent's may run here, whatever happens
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    _flush()
                os._exit(status)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(mine_in, "wb", 0), os.fdopen(mine_out, "rb", 0)

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # reaped by something else, or SIGCHLD is ignored: as Popen has it
                    self.returncode = 0
                else:
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"the fork {self.pid}", timeout)
            time.sleep(0.001)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


Process = subprocess.Popen[bytes] | _Fork


def _end(process: Process, nonce: bytes, using: threading.RLock, owner: int) -> None:
    if os.getpid() != owner:  # in a fork, which does not own the child
        return
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.write(process.stdin.fileno(), nonce + b" 0\n")  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    _kill(process, using)


def _kill(process: Process, using: threading.RLock) -> None:
    """Have the keeper end everything. If it does not (the user's code has stopped it), the child ends with it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KEEPER_GRACE)
        process.send_signal(signal.SIGKILL)
    process.wait()
    with using:  # a call in another thread notices the end first
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
