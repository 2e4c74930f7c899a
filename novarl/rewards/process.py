"""A user's Python file in a process of its own, which can be killed.

Only a process can be stopped at any moment: a thread that runs `while True: pass` cannot. The worker is started once
and kept; a call that outlives its limit is ended by killing the worker with all its children, and the next call
starts a fresh one. Nothing here blocks the event loop: the waiting is done in one thread per worker.

A function that hangs on every call must not cost its limit again and again. So where the first call of a batch is
slower than any before it, a second worker tries the batch's last call beside it. If both run past their limit the
rest of the batch is given up, after one limit and not many; if either answers the function is slow, not stuck. Then
calls that hang fail alone, unless as many as `MOST_HANGS` do so in a row: those are taken from different parts of the
batch, so that it is not one prompt that they share.

With several `workers` the calls of a batch go to them in turn, each with its own copy of the file: a function that
waits (for a server, a compiler) then waits for many calls at a time. Batches may be given while others are under way:
each takes the workers that have least to do. Where nobody says how many workers, they are as many as a slow function
has use for and the machine has room for; what a function returns must then not depend on the calls before it. Calls
that are quicker than the start of another process do not wait for one: those that are there take them in turn, and the
others will be there for the next batch.
"""

from __future__ import annotations

import asyncio
import difflib
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.processes.pipe import Cancelled
from novarl.rewards.crew import Crew, Worker
from novarl.rewards.lane import Call, Exchange, Function, Lane
from novarl.rewards.verdict import Failure

MOST_HANGS = 3
"""Calls in a row, of all parts of a batch, that may run past their limit; then the rest of the batch is given up, not
waited for one by one."""
PATIENCE = 0.3
"""Seconds of silence after which a batch's last call is tried beside its first; more where slower answers are known."""
SLOW = 0.02
"""Seconds of a call from which on more workers than one are worth their start."""
COMPUTES = 0.1
"""The share of a long call that is the CPU's, from which on it counts as computing."""
MOST_WORKERS = 64
"""Where nobody says how many."""
MEMORY = 2**30
"""Bytes of their own that they may have together then; a file that loads a model is not loaded often."""
DISTURBS = 0.002
"""Seconds by which a call delays what the run itself computes meanwhile, where that has all cores: a thread and a
process wake twice, and every time a core that others wait for is not theirs."""
LATELY = 4
"""Slow calls of which the one that took the CPU least says whether a function computes: one that does computes in
each, and a busy machine adds to some."""
_GLANCE = 0.05
"""Seconds between looks at the one worker and at the other."""


class UserProcess:
    """Calls the functions of one Python file in worker processes. `time_limit` is in seconds, for one call, `memory` in
    bytes, for one process (None: no limit).

    `workers`: None: by need. All but the first start when a batch first needs them. Calls of an async function, which
    run at the same time anyway, go to the first.

    Errors, on creation: NovaError for a missing file or one that does not import, with file and line.
    """

    def __init__(self, path: Path, *, time_limit: float, workers: int | None = 1, memory: int | None = None) -> None:
        if not path.is_file():
            what = "is a directory, not a Python file" if path.is_dir() else "no such file"
            raise NovaError(what, where=str(path), fix="give the path of a Python file, from the current directory")
        self.path = path
        self.time_limit = time_limit
        self.workers, self.memory = workers, memory
        self._slowest: dict[str, float] = {}
        self._usual: dict[str, float] = {}
        self._loads: defaultdict[str, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=LATELY))
        self._crew = Crew(path, time_limit=time_limit, memory=memory)
        self.functions = self._crew.functions

    def function(self, name: str) -> Function:
        """The file's function of this name. NovaError, with the nearest name, where there is none."""
        if name not in self.functions:
            near = difflib.get_close_matches(name, self.functions, n=1)
            own = [one.name for one in self.functions.values() if one.where != str(self.path)]
            fix = f"did you mean {near[0]!r}?" if near else f"its functions are: {', '.join(own) or 'none'}"
            raise NovaError(f"has no function {name!r}", where=str(self.path), fix=fix)
        return self.functions[name]

    def has_answered(self, function: Function) -> bool:
        """Whether some call of the function ended within its limit."""
        return function.name in self._usual

    def hurries(self, function: Function) -> bool:
        """Whether a call is better begun at once than kept until there are many. Of the time that calls take together,
        divided among the workers, one that is begun beside sampling saves its share, and DISTURBS that. Where somebody
        says how many workers, always: one that remembers its calls must not be asked in an order that the clock
        decides."""
        if not self.has_answered(function):
            return False
        if self.workers is not None:
            return True
        return self._usual[function.name] / (MOST_WORKERS if function.is_async else self._useful(function)) > DISTURBS

    def room(self, function: Function) -> int:
        """How many workers have nothing to do and could begin with a call of the function at once."""
        if function.is_async or not self.has_answered(function):
            return 0
        return self._crew.room(self._useful(function), self._usual[function.name])

    async def call(self, function: Function, calls: Sequence[Call]) -> list[Any]:
        """The return value of each call, or a `Failure`. Calls of an async function run at the same time."""
        cancelled = threading.Event()
        try:
            if self.workers == 1 or function.is_async:
                return await self._divided(function, calls, 1, cancelled)
            if self.has_answered(function) or len(calls) <= 2:
                return await self._divided(function, calls, self._useful(function), cancelled)
            # Of a function nothing is known of the first and the last come first: the others are divided by what they
            # took, and neighbours, answers to one prompt, may hang for a reason of their own.
            ends = await self._divided(function, [calls[0], calls[-1]], self._useful(function), cancelled)
            if all(result == (late := self._crew.first.lane.late) for result in ends):
                rest: list[Any] = [_given_up(late)] * (len(calls) - 2)
            else:
                rest = await self._divided(function, calls[1:-1], self._useful(function), cancelled)
            return [ends[0], *rest, ends[1]]
        finally:
            cancelled.set()  # where the waiting was given up, the threads give up too

    async def _divided(
        self, function: Function, calls: Sequence[Call], workers: int, cancelled: threading.Event
    ) -> list[Any]:
        """The results of calls that up to `workers` of them take in turn."""
        loop = asyncio.get_running_loop()
        running: list[asyncio.Future[list[Any] | None]] = []
        usual = self._usual.get(function.name)
        hands = self._crew.hands(len(calls), most=workers, usual=usual)
        for first, worker in enumerate(hands):
            part = calls[first :: len(hands)]
            running.append(
                loop.run_in_executor(worker.thread, self._part, worker, function, part, cancelled, first == 0)
            )
            worker.calls += len(part)
            running[-1].add_done_callback(partial(worker.ended, len(part)))
        results: list[Any] = [None] * len(calls)
        left: list[int] = []
        for first, found in enumerate(await asyncio.gather(*running)):
            places = range(first, len(calls), len(hands))
            if found is None:
                left += places
            else:
                for place, result in zip(places, found, strict=True):
                    results[place] = result
        if left:
            again = await self._divided(function, [calls[place] for place in left], workers, cancelled)
            for place, result in zip(left, again, strict=True):
                results[place] = result
        return results

    def _part(
        self, worker: Worker, function: Function, calls: Sequence[Call], cancelled: threading.Event, samples: bool
    ) -> list[Any] | None:
        """The results of a worker's calls; None where it does not start, and others are to take them."""
        if not self._crew.ready(worker, cancelled):
            return None
        return self._all(worker.lane, function, calls, cancelled, samples)

    def _useful(self, function: Function) -> int:
        """How many workers a batch may have: those asked for, or one while calls are quick; as many as there is memory
        for where they mostly wait, and no more than half of the cores where they compute."""
        if self.workers is not None:
            return self.workers
        usual = self._usual.get(function.name, 0.0)
        loads = tuple(self._loads[function.name])  # threads append to it
        if usual < SLOW or not loads:
            return 1
        memory, computed = loads[-1][0], min(computed for _, computed in loads)
        room = min(MOST_WORKERS, max(1, MEMORY // max(1, memory)))
        waits = computed < max(SLOW, COMPUTES * usual)  # the second, since on a busy machine computing waits too
        return room if waits else min(room, max(1, (os.cpu_count() or 1) // 2))

    def close(self) -> None:
        """End the workers. Also happens by itself, at the latest when the interpreter exits."""
        self._crew.close()

    def _all(
        self, lane: Lane, function: Function, calls: Sequence[Call], cancelled: threading.Event, samples: bool
    ) -> list[Any]:
        """`samples`: of the workers that share a batch, the one whose load stands for all of theirs."""
        everything = dict(enumerate(calls))
        results: dict[int, Any] = {}
        hangs = 0
        while left := {number: call for number, call in everything.items() if number not in results}:
            if hangs >= MOST_HANGS:
                results |= dict.fromkeys(left, _given_up(lane.late))
                break
            # After one that hangs the next comes from elsewhere: its neighbours may be answers to the same prompt.
            number = list(left)[hangs * len(left) // MOST_HANGS]
            wave = left if function.is_async else {number: left[number]}
            # Asking costs as much as a quick call, and many that ask at once stand in each other's way.
            weighs = self._usual.get(function.name, SLOW) >= SLOW
            weighs = weighs and (samples or len(self._loads[function.name]) < LATELY)
            exchange = lane.begin(function, wave, cancelled, weigh=weighs)
            # Until something of this batch has answered, the function may be stuck for good.
            doubtful = exchange.silent and not results and len(calls) > 1
            last = self._try_last(lane, exchange, calls, cancelled) if doubtful else {}
            found = lane.finish(exchange, cancelled)
            late = _stuck(lane, last)
            if not _stuck(lane, found):
                hangs = 0
                if exchange.answered:
                    self._note(function, exchange.waited)
                    if weighs and exchange.waited >= SLOW and (load := lane.load()) is not None:
                        self._loads[function.name].append(load)
                last = {} if late else last  # a last call that was late gets its turn alone
            else:
                hangs = MOST_HANGS if last and late else hangs + 1
            # One worker may remember its calls: what another said of the last is not what it will say.
            results |= found if self.workers == 1 and not late else last | found
        return [results[number] for number in everything]

    def _note(self, function: Function, seconds: float) -> None:
        """A call has answered."""
        self._slowest[function.name] = max(seconds, self._slowest.get(function.name, 0.0))
        self._usual[function.name] = seconds

    def _try_last(
        self, lane: Lane, exchange: Exchange, calls: Sequence[Call], cancelled: threading.Event
    ) -> dict[int, Any]:
        """What the batch's last call does in a worker of its own, where its first is silent for suspiciously long;
        nothing where that one answers meanwhile, or no second worker starts."""
        function, number = exchange.function, len(calls) - 1
        patience = max(PATIENCE, 2 * self._slowest.get(function.name, 0.0))
        if patience >= self.time_limit or lane.watch(exchange, cancelled, seconds=patience):
            return {}
        if function.is_async and lane.running(exchange, cancelled) is None:
            return {}  # all of them wait, as async functions should: they end themselves at their limit
        spare = Lane(self.path, time_limit=self.time_limit, memory=self.memory)
        try:
            spare.start(cancelled, within=max(0.0, exchange.deadline - time.monotonic()))
            trial = spare.begin(function, {number: calls[-1]}, cancelled)
            while trial.silent and time.monotonic() < trial.deadline:
                if lane.watch(exchange, cancelled, seconds=0.0):
                    return {}
                spare.watch(trial, cancelled, seconds=_GLANCE)
            return trial.results or {number: spare.late}
        except (NovaError, Cancelled):
            return {}
        finally:
            spare.kill()


def _given_up(late: Failure) -> Failure:
    return Failure(f"was given up: other calls before it {late.reason}")


def _stuck(lane: Lane, found: dict[int, Any]) -> bool:
    return all(value == lane.late for value in found.values())
