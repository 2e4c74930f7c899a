"""A part of a run in a process of its own, spoken to through one socket.

`Worker(...)` starts the process; `make(function, *args)` calls `function(*args)` there and keeps what it returns;
`call(name, *args)` then runs one method of it. While this process has a single thread, the other is a fork of it, which
has all that was imported; afterwards it is a fresh interpreter, `python -m novarl.processes.worker`, since a fork lacks
the threads that torch believes to have. It is no part of the terminal's process group, so Ctrl-C is the parent's to
obey, and it ends itself the moment the parent is gone, whatever it is doing; the parent knows at once when it is gone.
Weights do not pass through the socket but through memory that both see (`SharedWeights`).
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from novarl.core import collector
from novarl.core.errors import NovaError

GRACE = 2.0
"""Seconds in which the process may end by itself when it is told to."""
STOP = b"stop"
"""What tells it; every other message is a pickle."""


class Worker:
    """The parent's end. One call at a time; `close` may come from another thread, and ends a call that is under way.

    what:    what the process does, as errors name it ("the sampling process")
    fix:     what a user can do where it is gone
    environ: variables that it has and the parent does not

    Errors, of every call: those that were raised there, with their traceback as a note, and NovaError where the process
    ended. What `make`'s function raises comes with the first call.
    """

    def __init__(self, *, what: str, fix: str, environ: Mapping[str, str] | None = None) -> None:
        self.what, self.fix = what, fix
        mine, theirs = socket.socketpair()
        start = _Fork if _has_one_thread() else _fresh
        with theirs:
            self.process = start(what, mine, theirs, environ or {})
        self._connection = Connection(mine.detach())
        self._end = weakref.finalize(self, _end, self.process, self._connection)
        self._made = False

    def make(self, function: Callable[..., Any], *args: Any) -> None:
        """What the process is for; to be said once, before the first call."""
        with contextlib.suppress(OSError):  # a process that is gone already says so at the first call
            self._connection.send((function, args))

    def call(self, name: str, *args: Any) -> Any:
        """Run one method in the process, and wait for what it returns."""
        try:
            if not self._made:
                self._receive()
                self._made = True
            self._connection.send((name, args))
            return self._receive()
        except (EOFError, OSError) as error:
            raise NovaError(f"{self.what} ended before its time{self._obituary()}", fix=self.fix) from error

    def close(self) -> None:
        """End the process: by its own `close` where it is idle, and in any case within GRACE seconds."""
        self._end()

    def _receive(self) -> Any:
        good, value = self._connection.recv()
        if good:
            return value
        raise value

    def _obituary(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE)
        code = self.process.returncode
        if code is None:
            return ""
        return f", killed by {signal.Signals(-code).name}" if code < 0 else f", with exit code {code}"


def _has_one_thread() -> bool:
    """Whether a fork would be whole. What counts are the system's threads: libraries have more than Python knows of."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _fresh(
    what: str, mine: socket.socket, theirs: socket.socket, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # The child finds modules exactly where the parent does, in the same order.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "novarl.processes.worker", str(theirs.fileno()), what],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, **environ},
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
    )


class _Fork:
    """This process once more, with as much of `subprocess.Popen` as a Worker needs."""

    def __init__(self, what: str, mine: socket.socket, theirs: socket.socket, environ: Mapping[str, str]) -> None:
        _flush()  # or the child would have what waits there too
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        # A Ctrl-C in the middle of a fork would be lost in one of Python's own callbacks: it waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                mine.close()  # else the parent's end would never close
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.environ.update(environ)
                _serve(theirs.detach(), what)
                status = 0
            except BaseException:  # noqa: BLE001 - nothing of the parent's may run here, whatever happens
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    _flush()
                os._exit(status)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        with self._waiting:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has asked, or nobody may: as Popen has it
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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _end(process: subprocess.Popen[bytes] | _Fork, connection: Connection) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(STOP)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Served:
    """The child's end: a thread reads, so that the end of the parent is noticed in the middle of a call."""

    def __init__(self, connection: Connection, what: str) -> None:
        self.connection, self.what = connection, what
        self.waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def serve(self) -> None:
        """Make the part, and run its methods, until told to stop."""
        threading.Thread(target=self._read, daemon=True).start()
        part = self._made(self.waiting.get())
        try:
            while part is not None and (request := self.waiting.get()) is not None:
                self._called(part, request)
        finally:
            if hasattr(part, "close"):
                part.close()

    def _made(self, request: bytes | None) -> Any:
        """What the first request makes; None where that raised, or there was none."""
        if request is None:
            return None
        try:
            function, args = pickle.loads(request)
            part = function(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the parent's to raise
            self.connection.send((False, _portable(error, self.what)))
            return None
        collector.started()
        self.connection.send((True, None))
        return part

    def _called(self, part: Any, request: bytes) -> None:
        try:
            name, args = pickle.loads(request)
            reply = (True, getattr(part, name)(*args))
        except Exception as error:  # noqa: BLE001 - as above
            reply = (False, _portable(error, self.what))
        self.connection.send(reply)

    def _read(self) -> None:
        try:
            while (request := self.connection.recv_bytes()) != STOP:
                self.waiting.put(request)
        except (EOFError, OSError):
            print(f"novarl: {self.what} ends, as the run that it belongs to is gone", file=sys.stderr, flush=True)
            os._exit(0)
        self.waiting.put(None)
        last = threading.Timer(GRACE / 2, os._exit, (0,))  # in the middle of a call, whose end nobody awaits
        last.daemon = True
        last.start()


def _portable(error: Exception, what: str) -> Exception:
    """The error as it can be sent, with its traceback as a note (a user's mistake needs none)."""
    trace = "".join(traceback.format_exception(error)).strip()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - classes that cannot be made anew from their arguments fail in many ways
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, NovaError):
        error.add_note(f"raised in {what}:\n{trace}")
    return error


def _serve(number: int, what: str) -> None:
    os.set_inheritable(number, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))  # which a fork begins with
    with collector.resting():
        _Served(Connection(number), what).serve()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
