"""A user's Python file in a process of its own, which can be killed.

Only a process can be stopped at any moment: a thread that runs `while True: pass` cannot. The worker is started once
and kept; a call that outlives its limit is ended by killing the worker with all its children, and the next call
starts a fresh one. Nothing here blocks the event loop: the waiting is done in one thread per file.
"""

from __future__ import annotations

import asyncio
import difflib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.rewards.pipe import Cancelled, Died, Pipe
from novarl.rewards.verdict import Failure

Call = tuple[Sequence[Any], dict[str, Any]]
"""The positional and the named arguments of one call."""

START_LIMIT = 120.0
"""Seconds in which a file must import (one that loads a model on a busy machine needs many)."""
MOST_HANGS = 3
"""Calls in a row that may run past their limit; then the rest of their batch is given up, not waited for one by one."""
GRACE = 0.4
"""Seconds, past their limit, in which async calls may end themselves and then say which one holds up the others."""


@dataclass(frozen=True, slots=True)
class Function:
    """A callable of the file: its parameters as (name, kind of `inspect.Parameter`, has a default), and file:line."""

    name: str
    parameters: tuple[tuple[str, str, bool], ...]
    is_async: bool
    where: str


class UserProcess:
    """Calls the functions of one Python file in a worker process. `time_limit` is in seconds, for one call.

    Errors, on creation: NovaError for a missing file or one that does not import, with file and line.
    """

    def __init__(self, path: Path, *, time_limit: float) -> None:
        if not path.is_file():
            what = "is a directory, not a Python file" if path.is_dir() else "no such file"
            raise NovaError(what, where=str(path), fix="give the path of a Python file, from the current directory")
        self.path = path
        self.time_limit = time_limit
        self._late = Failure(f"ran past its limit of {time_limit:g} s and was stopped")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"user-file-{path.stem}")
        self._pipe: Pipe | None = None
        self.functions = self._start(threading.Event())

    def function(self, name: str) -> Function:
        """The file's function of this name. NovaError, with the nearest name, where there is none."""
        if name not in self.functions:
            near = difflib.get_close_matches(name, self.functions, n=1)
            own = [one.name for one in self.functions.values() if one.where != str(self.path)]
            fix = f"did you mean {near[0]!r}?" if near else f"its functions are: {', '.join(own) or 'none'}"
            raise NovaError(f"has no function {name!r}", where=str(self.path), fix=fix)
        return self.functions[name]

    async def call(self, function: Function, calls: Sequence[Call]) -> list[Any]:
        """The return value of each call, or a `Failure`. Calls of an async function run at the same time."""
        cancelled = threading.Event()
        running = asyncio.get_running_loop().run_in_executor(self._thread, self._all, function, calls, cancelled)
        try:
            return await running
        finally:
            cancelled.set()  # where the waiting was given up, the thread gives up too

    def close(self) -> None:
        """End the worker. Also happens by itself, at the latest when the interpreter exits."""
        self._thread.shutdown()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _all(self, function: Function, calls: Sequence[Call], cancelled: threading.Event) -> list[Any]:
        results: dict[int, Any] = {}
        everything = list(range(len(calls)))
        hangs = 0
        for wave in [everything] if function.is_async else [[number] for number in everything]:
            while left := [number for number in wave if number not in results]:
                if hangs == MOST_HANGS:
                    why = f"was not called: {hangs} calls before it {self._late.reason}"
                    results |= dict.fromkeys(left, Failure(why))
                    break
                found = self._exchange(function, {number: calls[number] for number in left}, cancelled)
                hangs = hangs + 1 if all(value == self._late for value in found.values()) else 0
                results |= found
        return [results[number] for number in everything]

    def _exchange(self, function: Function, calls: dict[int, Call], cancelled: threading.Event) -> dict[int, Any]:
        """Results of at least one of these calls: of all that answered, and of those to blame if not all did."""
        results: dict[int, Any] = {}
        numbers = list(calls)
        try:
            if self._pipe is None:
                self._start(cancelled)
            deadline = time.monotonic() + self.time_limit + (GRACE if function.is_async else 0.0)
            self._collect(function, calls, results, deadline=deadline, cancelled=cancelled)
        except TimeoutError:
            blamed = self._culprit(numbers, cancelled) if function.is_async else None
            self._kill()
            silent = [number for number in numbers if number not in results]
            results |= {number: self._late for number in ([blamed] if blamed in silent else silent)}
        except (Died, Cancelled, NovaError) as error:
            self._kill()
            reason = Failure("was given up, as the run is stopping" if isinstance(error, Cancelled) else str(error))
            results |= {number: reason for number in numbers if number not in results}
        return results

    def _collect(
        self,
        function: Function,
        calls: dict[int, Call],
        results: dict[int, Any],
        *,
        deadline: float,
        cancelled: threading.Event,
    ) -> None:
        assert self._pipe is not None
        numbers = list(calls)
        request = {"op": "call", "function": function.name, "calls": list(calls.values()), "limit": self.time_limit}
        self._pipe.send(request, deadline=deadline, cancelled=cancelled)
        while len(results) < len(calls):
            reply = self._pipe.receive(deadline=deadline, cancelled=cancelled)
            results[numbers[reply["call"]]] = reply["value"] if "value" in reply else Failure(*reply["error"])

    def _culprit(self, numbers: Sequence[int], cancelled: threading.Event) -> int | None:
        """Which of several async calls computes without ever waiting; None where even that cannot be found out."""
        assert self._pipe is not None
        deadline = time.monotonic() + GRACE
        try:
            self._pipe.send({"op": "running"}, deadline=deadline, cancelled=cancelled)
            while "running" not in (reply := self._pipe.receive(deadline=deadline, cancelled=cancelled)):
                pass
        except (TimeoutError, Died, Cancelled):
            return None
        return None if reply["running"] is None else numbers[reply["running"]]

    def _start(self, cancelled: threading.Event) -> dict[str, Function]:
        self._pipe = Pipe()
        deadline = time.monotonic() + START_LIMIT
        fix = "the file must import on its own, as `python FILE` would"
        try:
            self._pipe.send({"op": "load", "path": str(self.path)}, deadline=deadline, cancelled=cancelled)
            reply = self._pipe.receive(deadline=deadline, cancelled=cancelled)
        except TimeoutError as error:
            self._kill()
            raise NovaError(
                f"importing it took longer than {START_LIMIT:g} s", where=str(self.path), fix=fix
            ) from error
        except Died as death:
            self._kill()
            raise NovaError(f"importing it {death}", where=str(self.path), fix=fix) from death
        if "error" in reply:
            self._kill()
            raise NovaError(**reply["error"])
        return {name: self._described(name, about) for name, about in reply["functions"].items()}

    def _described(self, name: str, about: dict[str, Any]) -> Function:
        where = str(self.path) if about["line"] is None else f"{self.path}:{about['line']}"
        return Function(name, tuple((n, k, d) for n, k, d in about["parameters"]), about["is_async"], where)

    def _kill(self) -> None:
        if self._pipe is not None:
            self._pipe.kill()
            self._pipe = None
