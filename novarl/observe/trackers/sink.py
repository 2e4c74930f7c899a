"""A sink that hands everything to a tracker in a thread of its own, through a bounded queue.

The run only appends to the queue. If it is full, because the tracker is slow or hangs, the record is dropped and
counted. At the end the sink waits for the tracker, but leaves it if one call takes longer than its limit.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from novarl.core.errors import visible
from novarl.observe.sinks.tensorboard import PREFIXES
from novarl.observe.trackers import exits
from novarl.observe.trackers.redact import redacted
from novarl.observe.trackers.tracker import About, Tracker

CAPACITY = 1000
"""Records that may wait."""
LIMIT = 30.0
"""Seconds that one call of a tracker may take, counted from its beginning, before the end of a run stops waiting."""
START = 2
"""How many times as long the first call may take, which imports the library."""
ARTIFACT_LIMIT = 600.0
"""The same for storing files."""
TRIES = 3
"""Failures in a row after which a tracker receives nothing more."""
SYSTEM_EVERY = 10.0
"""Seconds between two records of the machine's load."""
SAMPLES = 500
"""The most recent samples that the table of samples holds."""
COLUMNS = ("step", "prompt", "answer", "expected", "reward")

Job = Callable[[], None]


class TrackerSink:
    """Feeds `tracker`, which is called `name` in messages. `artifacts`: store the final model at the end."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        about: About,
        *,
        artifacts: bool = False,
        capacity: int = CAPACITY,
        limit: float = LIMIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.tracker, self.about, self.artifacts = name, tracker, about, artifacts
        self.capacity, self.limit, self.clock = capacity, limit, clock
        self.received = self.dropped = self.stored = 0
        self.error: str | None = None
        self._jobs: deque[tuple[Job, float]] = deque()
        self._ready = threading.Condition()
        self._prefix, self._step, self._status = "", 0, "failed"
        self._samples: deque[tuple[Any, ...]] = deque(maxlen=SAMPLES)
        self._deadline: float | None = None
        self._in_a_row = 0
        self._exits: list[Callable[[], Any]] = []
        self._ending = self._concluded = False
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def step(self, step: int, record: Mapping[str, float]) -> None:
        self._step = step
        values = {self._prefix + name: float(value) for name, value in record.items() if name != "step"}
        self._put(lambda: self.tracker.log(step, values))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "phase":
            self._prefix, self._step = PREFIXES.get(str(fields["name"]), ""), int(fields.get("done", 0))
        elif kind == "eval":
            self._score(fields)
        elif kind == "sample":
            row = (self._step, fields.get("prompt"), fields.get("text"), fields.get("answer"), fields.get("reward"))
            self._samples.append(tuple(redacted(row)))
        elif kind == "summary":
            self._status = str(fields.get("status", "done"))
            self._store(fields.get("paths") or {})

    def _score(self, fields: Mapping[str, Any]) -> None:
        """The held-out scores before and after training, which are in no record."""
        if isinstance(score := fields.get("score"), int | float):
            step, values = self._step, {f"{fields.get('name', 'eval')}/score": float(score)}
            self._put(lambda: self.tracker.log(step, values))

    def _store(self, paths: Mapping[str, Any]) -> None:
        if rows := list(self._samples):
            self.table("samples", COLUMNS, rows)
        for name in ("model", "weights", "samples") if self.artifacts else ():
            path = Path(str(paths[name])) if name in paths else None
            if path is not None and path.exists():
                self.artifact(path, name)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Hand over a table whose rows hold no secrets."""
        self._put(lambda: self.tracker.table(name, columns, rows))

    def artifact(self, path: Path, name: str) -> None:
        """Hand over a file or folder."""
        self._put(lambda: self.tracker.artifact(path, name), limit=ARTIFACT_LIMIT)

    def flush(self) -> None:
        """Nothing waits for a tracker."""

    def close(self) -> None:
        """End the tracker's run, and print what went wrong."""
        if not self._concluded and (said := self.conclude()):
            with suppress(OSError):
                print(f"novarl: {visible(said)}", file=sys.stderr)

    def conclude(self) -> str | None:
        """Wait until the tracker has everything, or a call exceeds its limit. Returns a sentence if something is
        missing."""
        if self._concluded:
            return None
        self._concluded = True
        with self._ready:
            self._ending = True
            self._ready.notify()
        left = False
        while self._thread.is_alive() and not left:
            self._thread.join(0.02)
            deadline = self._deadline
            left = deadline is not None and self.clock() > deadline
        if not left:
            exits.register(self._exits)
        return self._report(left=left)

    def _report(self, *, left: bool) -> str | None:
        missing = self.received - self.stored
        if not missing and not left and self.error is None:
            return None
        why = [f"it failed ({self.error})"] if self.error else []
        if left:
            why.append("it did not answer in time, and the run ended without it")
        elif self.dropped:
            why.append("it was too slow")
        of = f"{missing:,} of {self.received:,} records" if missing else "no records"
        return f"Tracker {self.name}: {of} are missing there: {' and '.join(why)}. metrics.jsonl has all of them"

    def _put(self, job: Job, *, limit: float | None = None) -> None:
        with self._ready:
            self.received += 1
            if len(self._jobs) >= self.capacity:
                self.dropped += 1
                return
            self._jobs.append((job, self.limit if limit is None else limit))
            self._ready.notify()

    def _work(self) -> None:
        with exits.held_back(self._exits):
            self._everything()

    def _everything(self) -> None:
        """What the thread does: all jobs in order, and the machine's load in between."""
        started = self._call(lambda: self.tracker.start(self.about), START * self.limit)
        next_system = self.clock() + SYSTEM_EVERY
        while (job := self._next()) is not None:
            usable = started and self._in_a_row < TRIES
            if usable and self.clock() >= next_system:
                next_system = self.clock() + SYSTEM_EVERY
                self._call(self.tracker.system, self.limit)
            if job is not _IDLE and usable:
                self.stored += self._call(*job)
        if started:
            self._call(lambda: self.tracker.finish(self._status), self.limit)

    def _next(self) -> tuple[Job, float] | None:
        """The next job; `_IDLE` if there is none for a while, None at the end."""
        with self._ready:
            if not self._jobs and not self._ending:
                self._ready.wait(SYSTEM_EVERY)
            if self._jobs:
                return self._jobs.popleft()
            return None if self._ending else _IDLE

    def _call(self, job: Job, limit: float) -> bool:
        """Whether it succeeded."""
        self._deadline = self.clock() + limit
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - whatever a library raises, also SystemExit
            self.error = self.error or _words(error)
            self._in_a_row += 1
            return False
        finally:
            self._deadline = None
        self._in_a_row = 0
        return True


_IDLE: tuple[Job, float] = (lambda: None, 0.0)


def _words(error: BaseException) -> str:
    """The first line of an error, without secrets."""
    first = str(error).strip().partition("\n")[0]
    return str(redacted(f"{type(error).__name__}: {first}"[:300]))
