"""An object in a child process, whose methods are called from here.

`RemoteObject(...)` starts the process; `make(function, *args)` calls `function(*args)` there and keeps what it returns;
`call(name, *args)` then runs one method of it. While this process has a single thread, the child is a fork of it, with
everything imported; otherwise it is a new interpreter, since threads do not survive a fork. The child is in a session
of its own, so Ctrl-C reaches only the parent. Weights are not sent as messages: both map the same memory
(`SharedWeights`).
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from novarl.core import collector
from novarl.core.errors import NovaError
from novarl.processes.channel import PICKLE, Channel
from novarl.processes.child import Child, Died, has_one_thread


class RemoteObject:
    """The parent's end. One call at a time; `close` may come from another thread, and ends a call that is under way.

    what:    what the process does, as errors name it ("the sampling process")
    fix:     what a user can do when it has died
    environ: variables that only the child has
    fork:    whether the child is a fork; None: where this process has a single thread

    Errors, of every call: those raised in the child, with their traceback as a note, and NovaError where the child
    ended. What `make`'s function raises comes with the first call.
    """

    def __init__(
        self, *, what: str, fix: str, environ: Mapping[str, str] | None = None, fork: bool | None = None
    ) -> None:
        self.what, self.fix = what, fix
        fork = has_one_thread() if fork is None else fork
        self._child = Child("novarl.processes.remote", codec=PICKLE, environ=environ, fork=fork)
        self._made = False
        with contextlib.suppress(Died):  # the first call reports it
            self._child.send(what)

    def make(self, function: Callable[..., Any], *args: Any) -> None:
        """Make the object; to be called once, before the first `call`."""
        with contextlib.suppress(Died):
            self._child.send((function, args))

    def call(self, name: str, *args: Any) -> Any:
        """Run one method of the object, and wait for what it returns."""
        try:
            if not self._made:
                self._receive()
                self._made = True
            self._child.send((name, args))
            return self._receive()
        except Died as error:
            raise NovaError(f"{self.what} died unexpectedly: it {error}", fix=self.fix) from error

    def close(self) -> None:
        """End the process: by the object's own `close` where it is idle, and in any case within seconds."""
        self._child.close()

    def _receive(self) -> Any:
        good, value = self._child.receive()
        if good:
            return value
        raise value


def main() -> None:
    """In the child: make the object and run its methods until told to stop."""
    channel = Channel(PICKLE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = iter(channel)
    what: str = next(requests)
    with collector.resting():
        try:
            function, args = next(requests)
            made = function(*args)
        except Exception as error:  # noqa: BLE001 - it is raised in the parent, whatever it is
            channel.reply((False, _portable(error, what)))
            return
        collector.started()
        channel.reply((True, None))
        try:
            for name, args in requests:
                try:
                    reply = (True, getattr(made, name)(*args))
                except Exception as error:  # noqa: BLE001 - as above
                    reply = (False, _portable(error, what))
                channel.reply(reply)
        finally:
            if hasattr(made, "close"):
                made.close()


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


if __name__ == "__main__":
    main()
