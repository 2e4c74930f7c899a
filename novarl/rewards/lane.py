"""One worker process with a user's file in it: started when it is needed, killed when a call outlives its limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.processes.pipe import Cancelled, Died, Pipe
from novarl.rewards.verdict import Failure

Call = tuple[Sequence[Any], dict[str, Any]]
"""The positional and the named arguments of one call."""

START_LIMIT = 120.0
"""Seconds in which a file must import (one that loads a model on a busy machine needs many)."""
GRACE = 0.4
"""Seconds, past their limit, in which async calls may end themselves and then say which one holds up the others."""


@dataclass(frozen=True, slots=True)
class Function:
    """A callable of the file: its parameters as (name, kind of `inspect.Parameter`, has a default), and file:line."""

    name: str
    parameters: tuple[tuple[str, str, bool], ...]
    is_async: bool
    where: str


class Exchange:
    """Calls that were handed to a worker: which of them answered, until when the others may, and how many seconds the
    first answer took, if one came."""

    def __init__(self, function: Function, calls: dict[int, Call], *, deadline: float) -> None:
        self.function, self.calls, self.deadline = function, calls, deadline
        self.results: dict[int, Any] = {}
        self.waited, self.answered = 0.0, False

    @property
    def silent(self) -> list[int]:
        return [number for number in self.calls if number not in self.results]


class Lane:
    """The worker that runs one file. `time_limit` is in seconds, for one call, `memory` in bytes. Calls of an async
    function run at the same time, others one after another and each handed over alone."""

    def __init__(self, path: Path, *, time_limit: float, memory: int | None = None) -> None:
        self.path, self.time_limit, self.memory = path, time_limit, memory
        self.late = Failure(f"ran past its limit of {time_limit:g} s and was stopped")
        self._pipe: Pipe | None = None
        self._begun: tuple[int, float] | None = None

    def start(self, cancelled: threading.Event, *, within: float = START_LIMIT) -> dict[str, Function]:
        """Start the worker; the functions of the file. NovaError, with file and line, where it does not import, or the
        system has no process left."""
        try:
            pipe = Pipe("novarl.rewards.worker")
        except OSError as error:
            what, fix = f"no process could be started: {error.strerror or error}", "lower rollout.reward_workers"
            raise NovaError(what, where=str(self.path), fix=fix) from error
        deadline = time.monotonic() + within
        fix = "the file must import on its own, as `python FILE` would"
        try:
            request = {"op": "load", "path": str(self.path), "memory": self.memory}
            pipe.send(request, deadline=deadline, cancelled=cancelled)
            reply = pipe.receive(deadline=deadline, cancelled=cancelled)
        except TimeoutError as error:
            pipe.kill()
            raise NovaError(f"importing it took longer than {within:g} s", where=str(self.path), fix=fix) from error
        except Died as death:
            pipe.kill()
            raise NovaError(f"importing it {death}{self._allowed}", where=str(self.path), fix=fix) from death
        except Cancelled:
            pipe.kill()
            raise
        if "error" in reply:
            pipe.kill()
            about = reply["error"]
            raise NovaError(self._with_limit(about["what"]), where=about["where"], fix=about["fix"])
        self._pipe = pipe
        return {name: self._described(name, about) for name, about in reply["functions"].items()}

    @property
    def started(self) -> bool:
        """Whether the worker is there, its file imported."""
        return self._pipe is not None

    def begin(
        self, function: Function, calls: dict[int, Call], cancelled: threading.Event, *, weigh: bool = False
    ) -> Exchange:
        """Hand calls over, starting the worker if need be; `weigh`: `load` will be asked."""
        exchange = Exchange(function, calls, deadline=time.monotonic() + self.time_limit)
        try:
            if cancelled.is_set():
                raise Cancelled
            if self._pipe is not None and self._pipe.ended:
                self.kill()  # it died since its last call, of which these are innocent
            if self._pipe is None:
                self.start(cancelled)
            exchange.deadline = time.monotonic() + self.time_limit
            self._begun = self._pipe.used() if weigh and self._pipe is not None else None
            request = {"op": "call", "function": function.name, "calls": list(calls.values()), "limit": self.time_limit}
            assert self._pipe is not None
            self._pipe.send(request, deadline=exchange.deadline, cancelled=cancelled)
        except (TimeoutError, Died, Cancelled, NovaError) as error:
            self._fail(exchange, error)
        return exchange

    def watch(self, exchange: Exchange, cancelled: threading.Event, *, seconds: float) -> bool:
        """Wait for answers, for some seconds at most; whether one has come."""
        try:
            self._receive(exchange, min(exchange.deadline, time.monotonic() + seconds), cancelled)
        except TimeoutError:
            return bool(exchange.results)
        except (Died, Cancelled) as error:
            self._fail(exchange, error)
        return True

    def finish(self, exchange: Exchange, cancelled: threading.Event) -> dict[int, Any]:
        """Results of at least one of the calls: of all that answered, and of those to blame if not all did."""
        asynchronous = exchange.function.is_async
        try:
            while exchange.silent:
                self._receive(exchange, exchange.deadline + (GRACE if asynchronous else 0.0), cancelled)
                if asynchronous:  # one that computes holds up those beside it, which have their time yet
                    exchange.deadline = time.monotonic() + self.time_limit
        except TimeoutError:
            blamed = self.running(exchange, cancelled) if asynchronous else None
            self.kill()
            silent = exchange.silent
            exchange.results |= {number: self.late for number in ([blamed] if blamed in silent else silent)}
        except (Died, Cancelled) as error:
            self._fail(exchange, error)
        return exchange.results

    def running(self, exchange: Exchange, cancelled: threading.Event) -> int | None:
        """Which of several async calls computes without waiting at this moment; None where it cannot be found out."""
        if self._pipe is None:
            return None
        deadline = time.monotonic() + GRACE
        try:
            self._pipe.send({"op": "running"}, deadline=deadline, cancelled=cancelled)
            while "running" not in (reply := self._pipe.receive(deadline=deadline, cancelled=cancelled)):
                self._note(exchange, reply)
        except (TimeoutError, Died, Cancelled):
            return None
        return None if reply["running"] is None else list(exchange.calls)[reply["running"]]

    def load(self) -> tuple[int, float] | None:
        """(resident bytes that are the worker's own, CPU seconds of its last call); None where the system does not say,
        or the call was not to be weighed."""
        if self._pipe is None or self._begun is None or (used := self._pipe.used()) is None:
            return None
        return used[0], used[1] - self._begun[1]

    def kill(self) -> None:
        """End the worker and its children now; the next call starts a fresh one."""
        if self._pipe is not None:
            self._pipe.kill()
            self._pipe = None

    def close(self) -> None:
        """Let the worker end itself, for a second at most."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _receive(self, exchange: Exchange, deadline: float, cancelled: threading.Event) -> None:
        assert self._pipe is not None
        while "call" not in (reply := self._pipe.receive(deadline=deadline, cancelled=cancelled)):
            pass  # which call was running, said too late for whoever had asked
        self._note(exchange, reply)

    def _note(self, exchange: Exchange, reply: dict[str, Any]) -> None:
        if not exchange.results:
            exchange.waited, exchange.answered = self.time_limit - (exchange.deadline - time.monotonic()), True
        number = list(exchange.calls)[reply["call"]]
        if "value" in reply:
            exchange.results[number] = reply["value"]
        else:
            reason, trace = reply["error"]
            exchange.results[number] = Failure(self._with_limit(reason), trace)

    def _fail(self, exchange: Exchange, error: Exception) -> None:
        self.kill()
        reason = "was given up, as the run is stopping" if isinstance(error, Cancelled) else str(error)
        reason += self._allowed if isinstance(error, Died) else ""
        failure = self.late if isinstance(error, TimeoutError) else Failure(reason)
        exchange.results |= dict.fromkeys(exchange.silent, failure)

    @property
    def _allowed(self) -> str:
        """The memory that the worker may have, where that is limited: libraries end a process that lacks it."""
        return "" if self.memory is None else f" (its memory is limited to {self.memory / 1e6:.0f} MB)"

    def _with_limit(self, reason: str) -> str:
        lacked = "raised MemoryError" in reason and self.memory is not None
        return f"{reason.rstrip(': ')}{self._allowed}" if lacked else reason

    def _described(self, name: str, about: dict[str, Any]) -> Function:
        where = str(self.path) if about["line"] is None else f"{self.path}:{about['line']}"
        return Function(name, tuple((n, k, d) for n, k, d in about["parameters"]), about["is_async"], where)
