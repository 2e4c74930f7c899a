"""A user's Python file in child processes, which can be killed.

Only a process can be stopped at any moment: a thread that runs `while True: pass` cannot. Calls wait in one queue. A
worker, a child process that has the file loaded and the thread that waits for it, takes the next call when it is free.
A call that exceeds its time limit is ended by killing its worker with all of the worker's children; the worker then
starts again. Nothing here blocks the event loop.

The first worker starts at once; the others, up to the size of the pool, start when calls of a slow function wait.
Those that are there go on meanwhile. Calls of an async function run at the same time in one worker: it takes all that
wait.

A function that hangs on every call must not cost its limit again and again: after MOST_HANGS calls in a row that timed
out, each begun after the one before it had ended, the calls that still wait fail too. They are taken from different
parts of the queue, so that answers to one prompt do not fail all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.rewards.loaded_file import UNANSWERED, Call, Function, LoadedFile
from novarl.rewards.verdict import Failure

MOST_HANGS = 3
"""Calls in a row that may time out before the waiting ones are given up."""
MOST_WORKERS = 8
"""The size of the pool where none is given, on a machine with as many cores."""
SLOW = 0.02
"""Seconds of a call from which on a function is slow, if two calls in a row took as long. The calls of a slow one are
spread over the pool, and begin while others are sampled. For a quick one neither is worth its wake-ups, which take the
processor from sampling."""


class _Batch:
    """Calls that were asked for together."""

    def __init__(self, function: Function, calls: Sequence[Call]) -> None:
        self.function, self.calls = function, calls
        self.done: Future[list[Any]] = Future()
        self._results: list[Any] = [None] * len(calls)
        self._left = len(calls)

    def answer(self, place: int, result: Any) -> None:
        self._results[place] = result
        self._left -= 1
        if self._left == 0:
            with contextlib.suppress(InvalidStateError):  # cancelled
                self.done.set_result(self._results)


_Job = tuple[_Batch, int]
"""One call of a batch, by its place."""


class UserProcess:
    """Calls the functions of one Python file in child processes.

    time_limit: seconds for one call
    workers:    size of the pool; None: one for each core, at most MOST_WORKERS. With one, calls run in the order in
                which they were asked for
    memory:     bytes for one process; None: no limit

    Errors, on creation: NovaError for a missing file or one that does not import, with file and line.
    """

    def __init__(self, path: Path, *, time_limit: float, workers: int | None = 1, memory: int | None = None) -> None:
        if not path.is_file():
            what = "is a directory, not a Python file" if path.is_dir() else "no such file"
            raise NovaError(what, where=str(path), fix="give the path of a Python file")
        self.path, self.time_limit, self.memory = path, time_limit, memory
        self._fixed = workers is not None
        self._size = workers or min(MOST_WORKERS, os.cpu_count() or 1)
        self._workers = [self._new()]
        self._free = list(self._workers)
        self._waiting: list[_Job] = []
        self._slow_calls: dict[str, int] = {}
        self._hangs = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._workers[0].start()
        self.functions = self._workers[0].functions
        self._threads = ThreadPoolExecutor(self._size, thread_name_prefix=f"user-file-{path.stem}")

    def function(self, name: str) -> Function:
        """The file's function of this name. NovaError, with the nearest name, where there is none."""
        if name not in self.functions:
            near = difflib.get_close_matches(name, self.functions, n=1)
            own = [one.name for one in self.functions.values() if one.where != str(self.path)]
            fix = f"did you mean {near[0]!r}?" if near else f"its functions are: {', '.join(own) or 'none'}"
            raise NovaError(f"has no function {name!r}", where=str(self.path), fix=fix)
        return self.functions[name]

    def begins_early(self, function: Function) -> bool:
        """Whether a rollout is scored while others are still sampled: always in a pool of given size, since the clock
        must not decide the order of calls that a function may remember."""
        return self._fixed or self._is_slow(function)

    async def call(self, function: Function, calls: Sequence[Call]) -> list[Any]:
        """The return value of each call, or a `Failure`. Calls of an async function run at the same time."""
        if not calls:
            return []
        batch = _Batch(function, calls)
        with self._lock:
            self._waiting += [(batch, place) for place in range(len(calls))]
            self._assign()
        try:
            return await asyncio.wrap_future(batch.done)
        finally:
            if batch.done.cancel():  # the caller was cancelled: so are its calls
                with self._lock:
                    self._waiting = [job for job in self._waiting if job[0] is not batch]

    def close(self) -> None:
        """End the workers. Also happens by itself, at the latest when the interpreter exits."""
        self._closed.set()
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()

    def _new(self) -> LoadedFile:
        return LoadedFile(self.path, time_limit=self.time_limit, memory=self.memory)

    def _is_slow(self, function: Function) -> bool:
        return self._slow_calls.get(function.name, 0) > 1

    def _assign(self) -> None:
        """Put workers to work on the calls that wait. Under the lock."""
        if self._closed.is_set():
            self._give_up(Failure("was cancelled"))
        if not self._waiting:
            return
        function = self._waiting[0][0].function
        busy = len(self._workers) - len(self._free)
        most = self._size if self._is_slow(function) and not function.is_async else 1
        for _ in range(min(most, busy + len(self._waiting)) - busy):
            if not self._free:
                self._workers.append(self._new())
                self._free.append(self._workers[-1])
            self._threads.submit(self._work, self._free.pop(0))

    def _work(self, worker: LoadedFile) -> None:
        """In a thread: let one worker take calls until none waits."""
        jobs: list[_Job] = []
        try:
            worker.start(self._closed.is_set)
            while jobs := self._take(worker):
                worker.start(self._closed.is_set)  # again, if it has died
                self._ask(worker, jobs)
        except Exception as error:  # noqa: BLE001 - whatever it is, no call may wait for ever
            self._lose(worker, jobs, Failure(str(error)))

    def _take(self, worker: LoadedFile) -> list[_Job]:
        """The next call, for an async function all that wait; none: the worker is free."""
        with self._lock:
            if not self._waiting:
                self._free.append(worker)
                if len(self._free) == len(self._workers):
                    self._hangs = 0
                return []
            function = self._waiting[0][0].function
            if not function.is_async:
                return [self._waiting.pop(self._hangs * len(self._waiting) // MOST_HANGS)]
            jobs = [job for job in self._waiting if job[0].function == function]
            self._waiting = [job for job in self._waiting if job[0].function != function]
            return jobs

    def _ask(self, worker: LoadedFile, jobs: Sequence[_Job]) -> None:
        """Have a worker run these calls, and note what comes of it."""
        function, before, began = jobs[0][0].function, self._hangs, time.monotonic()
        calls = [batch.calls[place] for batch, place in jobs]
        results = worker.ask(
            function, calls, lambda: self._closed.is_set() or all(batch.done.cancelled() for batch, _ in jobs)
        )
        with self._lock:
            slow = time.monotonic() - began > SLOW
            self._slow_calls[function.name] = slow * (self._slow_calls.get(function.name, 0) + len(jobs))
            self._waiting[:0] = [job for job, result in zip(jobs, results, strict=True) if result is UNANSWERED]
            for (batch, place), result in zip(jobs, results, strict=True):
                if result is not UNANSWERED:
                    batch.answer(place, result)
            if any(result is not worker.late and result is not UNANSWERED for result in results):
                self._hangs = 0
            elif self._hangs == before:
                self._hangs += 1
            if self._hangs == MOST_HANGS:
                self._give_up(skipped(self.time_limit))
            self._assign()

    def _give_up(self, failure: Failure) -> None:
        """Let all calls that wait fail. Under the lock."""
        self._hangs = 0
        waiting, self._waiting = self._waiting, []
        for batch, place in waiting:
            batch.answer(place, failure)

    def _lose(self, worker: LoadedFile, jobs: Sequence[_Job], failure: Failure) -> None:
        """A worker does not start. Others do its work, and no more are started: the file may use something that only
        one process can have. Where there is no other, the calls fail."""
        with self._lock:
            self._waiting[:0] = jobs
            if len(self._workers) > 1:
                self._workers.remove(worker)
                self._size = len(self._workers)
            else:
                self._free.append(worker)
                self._give_up(failure)
            self._assign()


def skipped(time_limit: float) -> Failure:
    """The result of a call that was given up."""
    return Failure(f"was skipped: calls before it timed out after {time_limit:g} s")
