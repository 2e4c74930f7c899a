"""The workers that share the calls of one file: more of them while there is need, and who takes which calls."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from novarl.core.errors import NovaError
from novarl.processes.pipe import Cancelled
from novarl.rewards.lane import Function, Lane

RESERVE = 4
"""Of so many workers that are lacking one more is started than that: the next batch may be larger."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker, the thread that waits for it, and how many calls the two were given and have not finished. `lost`: it
    does not start, where another one did: the file may hold what only one process can have."""

    lane: Lane
    thread: ThreadPoolExecutor
    calls: int = 0
    lost: bool = False
    starting: Future[bool] | None = None

    def ended(self, calls: int, _: object) -> None:
        self.calls -= calls


class Crew:
    """The workers of one file, whose first is started here. `time_limit` is in seconds, for one call, `memory` in
    bytes, for one worker.

    Errors: NovaError for a file that does not import, with file and line.
    """

    def __init__(self, path: Path, *, time_limit: float, memory: int | None = None) -> None:
        self.path, self.time_limit, self.memory = path, time_limit, memory
        self._closed = threading.Event()
        self.first = self._new()
        self._workers = [self.first]
        began = time.monotonic()
        self.functions: dict[str, Function] = self.first.lane.start(self._closed)
        self._start = time.monotonic() - began

    def room(self, most: int, usual: float) -> int:
        """How many of up to `most` workers could begin with a call at once: those that are there and have nothing to
        do, and where a call takes longer than a start, those that would be started."""
        able = self._able[:most]
        idle = [worker for worker in able if worker.calls == 0]
        if usual > self._start:
            return len(idle) + (most - len(able)) * self._may_grow
        return sum(worker.lane.started for worker in idle)

    @property
    def _able(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.lost]

    @property
    def _may_grow(self) -> bool:
        return not any(worker.lost for worker in self._workers)

    def hands(self, count: int, *, most: int, usual: float | None) -> list[Worker]:
        """The workers, up to `most`, that `count` calls are divided among, those with least to do first. `usual`: the
        seconds that a call takes, where that is known.

        Where there are too few, more are started. The calls wait for those only if the others would take longer.
        """
        able, new = self._able[:most], list[Worker]()
        if self._may_grow:
            lacking = max(0, count - sum(worker.calls == 0 for worker in able))
            new = [self._new() for _ in range(min(lacking + lacking // RESERVE, most - len(able)))]
            self._workers += new
            able += new
        hands = sorted(able, key=lambda worker: (worker.calls, not worker.lane.started))[:count]
        for worker in [*hands, *new]:
            if not worker.lane.started and (worker.starting is None or worker.starting.done()):
                worker.starting = worker.thread.submit(self.ready, worker, self._closed)
        there = sorted((worker for worker in able if worker.lane.started), key=lambda worker: worker.calls)
        there = ([worker for worker in there if worker.calls == 0] or there)[:count]
        if there and usual is not None:
            wait = usual * (there[-1].calls + -(-count // len(there)) - 1)
            absent = sum(not worker.lane.started for worker in hands)
            if wait < self._start * max(1.0, absent / (os.cpu_count() or 1)):
                return there
        return hands

    def ready(self, worker: Worker, cancelled: threading.Event) -> bool:
        """In the worker's thread: whether its process is there, started now if need be. The first is never lost: what
        its calls say is then what is wrong with the file."""
        if not worker.lane.started and not worker.lost:
            try:
                worker.lane.start(cancelled)
            except NovaError:
                worker.lost = worker is not self.first
            except Cancelled:
                pass  # its calls will say so
        return not worker.lost

    def close(self) -> None:
        """End the workers, those that are still starting too."""
        self._closed.set()
        for worker in self._workers:
            worker.thread.shutdown()
            worker.lane.close()

    def _new(self) -> Worker:
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"user-file-{self.path.stem}")
        return Worker(Lane(self.path, time_limit=self.time_limit, memory=self.memory), thread)
