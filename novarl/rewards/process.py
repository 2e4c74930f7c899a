"""A user's Python file in a process of its own, which can be killed.

Only a process can be stopped at any moment: a thread that runs `while True: pass` cannot. The worker is started once
and kept; a call that outlives its limit is ended by killing the worker with all its children, and the next call
starts a fresh one. Nothing here blocks the event loop: the waiting is done in one thread per file.

A function that hangs on every call must not cost its limit again and again. So where the first call of a batch is
slower than any before it, a second worker tries the batch's last call beside it. If both run past their limit the
rest of the batch is given up, after one limit and not many; if either answers the function is slow, not stuck, and
nobody is failed for another's sake.
"""

from __future__ import annotations

import asyncio
import difflib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.rewards.lane import Call, Exchange, Function, Lane
from novarl.rewards.pipe import Cancelled
from novarl.rewards.verdict import Failure

MOST_HANGS = 3
"""Calls in a row that may run past their limit; then the rest of their batch is given up, not waited for one by one."""
PATIENCE = 0.3
"""Seconds of silence after which a batch's last call is tried beside its first; more where slower answers are known."""
_GLANCE = 0.05
"""Seconds between looks at the one worker and at the other."""


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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"user-file-{path.stem}")
        self._lane = Lane(path, time_limit=time_limit)
        self._slowest: dict[str, float] = {}
        self.functions = self._lane.start(threading.Event())

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
        self._lane.close()

    def _all(self, function: Function, calls: Sequence[Call], cancelled: threading.Event) -> list[Any]:
        everything = dict(enumerate(calls))
        results: dict[int, Any] = {}
        hangs = 0
        while left := {number: call for number, call in everything.items() if number not in results}:
            if hangs >= MOST_HANGS:
                results |= dict.fromkeys(left, Failure(f"was given up: other calls before it {self._lane.late.reason}"))
                break
            wave = left if function.is_async else dict([next(iter(left.items()))])
            exchange = self._lane.begin(function, wave, cancelled)
            # Until something of this batch has answered, the function may be stuck for good.
            last = {} if results or len(calls) == 1 else self._try_last(exchange, calls, cancelled)
            found = self._lane.finish(exchange, cancelled)
            if not self._stuck(found):
                hangs = 0
                self._slowest[function.name] = max(exchange.waited, self._slowest.get(function.name, 0.0))
                found = found if self._stuck(last) else last | found  # a last call that was late gets its turn alone
            else:
                hangs = MOST_HANGS if last and self._stuck(last) else hangs + 1
                found = last | found
            results |= found
        return [results[number] for number in everything]

    def _stuck(self, found: dict[int, Any]) -> bool:
        return all(value == self._lane.late for value in found.values())

    def _try_last(self, exchange: Exchange, calls: Sequence[Call], cancelled: threading.Event) -> dict[int, Any]:
        """What the batch's last call does in a worker of its own, where its first is silent for suspiciously long;
        nothing where that one answers meanwhile, or no second worker starts."""
        function, number = exchange.function, len(calls) - 1
        patience = max(PATIENCE, 2 * self._slowest.get(function.name, 0.0))
        if patience >= self.time_limit or self._lane.watch(exchange, cancelled, seconds=patience):
            return {}
        if function.is_async and self._lane.running(exchange, cancelled) is None:
            return {}  # all of them wait, as async functions should: they end themselves at their limit
        spare = Lane(self.path, time_limit=self.time_limit)
        try:
            spare.start(cancelled, within=max(0.0, exchange.deadline - time.monotonic()))
            trial = spare.begin(function, {number: calls[-1]}, cancelled)
            while trial.silent and time.monotonic() < trial.deadline:
                if self._lane.watch(exchange, cancelled, seconds=0.0):
                    return {}
                spare.watch(trial, cancelled, seconds=_GLANCE)
            return trial.results or {number: spare.late}
        except (NovaError, Cancelled):
            return {}
        finally:
            spare.kill()
