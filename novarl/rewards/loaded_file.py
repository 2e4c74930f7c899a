"""One child process with a user's file in it: started when needed, killed when a call exceeds its time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.processes.child import Cancelled, Child, Died
from novarl.rewards.verdict import Failure

Call = tuple[Sequence[Any], dict[str, Any]]
"""The positional and the named arguments of one call."""

START_LIMIT = 120.0
"""Seconds in which a file must import (one that loads a model on a busy machine needs many)."""
GRACE = 0.4
"""Seconds past their limit in which async calls may end themselves and report which one blocks the others."""
UNANSWERED: Any = object()
"""The result of an async call that was interrupted because another one blocked the event loop."""


@dataclass(frozen=True, slots=True)
class Function:
    """A callable of the file: its parameters as (name, kind of `inspect.Parameter`, has a default), and file:line."""

    name: str
    parameters: tuple[tuple[str, str, bool], ...]
    is_async: bool
    where: str


class LoadedFile:
    """The process that has one file loaded. `time_limit` is in seconds, for one call, `memory` in bytes."""

    def __init__(self, path: Path, *, time_limit: float, memory: int | None = None) -> None:
        self.path, self.time_limit, self.memory = path, time_limit, memory
        self.functions: Mapping[str, Function] = {}
        self.late = Failure(f"timed out after {time_limit:g} s and was stopped")
        self._child: Child | None = None

    def start(self, cancelled: Callable[[], bool] | None = None) -> None:
        """Start the process unless it is there. NovaError, with file and line, where the file does not import, or the
        system has no process left; Cancelled."""
        if self._child is not None:
            if not self._child.ended:
                return
            self.kill()
        try:
            child = Child("novarl.rewards.user_code")
        except OSError as error:
            what, fix = f"cannot start a process: {error.strerror or error}", "lower rollout.reward_workers"
            raise NovaError(what, where=str(self.path), fix=fix) from error
        deadline = time.monotonic() + START_LIMIT
        fix = "check that `python FILE` runs without errors"
        try:
            request = {"op": "load", "path": str(self.path), "memory": self.memory}
            child.send(request, deadline=deadline, cancelled=cancelled)
            reply = child.receive(deadline=deadline, cancelled=cancelled)
            if "error" in reply:
                about = reply["error"]
                raise NovaError(self._with_limit(about["what"]), where=about["where"], fix=about["fix"])
        except BaseException as error:
            child.kill()
            if not isinstance(error, TimeoutError | Died):
                raise
            why = f"the process {error}{self._allowed}"
            why = f"it took longer than {START_LIMIT:g} s" if isinstance(error, TimeoutError) else why
            raise NovaError(f"import failed: {why}", where=str(self.path), fix=fix) from error
        self._child = child
        self.functions = {name: self._described(name, about) for name, about in reply["functions"].items()}

    def ask(self, function: Function, calls: Sequence[Call], cancelled: Callable[[], bool]) -> list[Any]:
        """The result of each call, a `Failure`, or UNANSWERED. Several calls only of an async function: they run at
        the same time. After `start`."""
        assert self._child is not None
        results: list[Any] = [UNANSWERED] * len(calls)
        # Async calls end themselves at their limit. One that computes holds up the others, which get their time later.
        limit = self.time_limit + (GRACE if function.is_async else 0.0)
        deadline = time.monotonic() + limit
        try:
            request = {"op": "call", "function": function.name, "calls": calls, "limit": self.time_limit}
            self._child.send(request, deadline=deadline, cancelled=cancelled)
            for _ in calls:
                self._receive(results, deadline, cancelled)
                deadline = time.monotonic() + limit
        except TimeoutError:
            blocking = self._blocking(results, cancelled) if function.is_async else None
            self.kill()
            if blocking is None:
                _fill(results, self.late)
            else:
                results[blocking] = self.late
        except (Died, Cancelled) as end:
            self.kill()
            _fill(results, Failure(f"{end}{self._allowed if isinstance(end, Died) else ''}"))
        except (TypeError, ValueError, RecursionError) as error:  # nothing was sent
            _fill(results, Failure(f"was not called: its arguments are not JSON: {error}"))
        return results

    def kill(self) -> None:
        """End the process and its children now."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def close(self) -> None:
        """Let the process end by itself, for a second at most."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _receive(self, results: list[Any], deadline: float, cancelled: Callable[[], bool]) -> dict[str, Any]:
        """Read one reply, and note the result of the call that it is about."""
        assert self._child is not None
        reply: dict[str, Any] = self._child.receive(deadline=deadline, cancelled=cancelled)
        if "value" in reply:
            results[reply["call"]] = reply["value"]
        elif "error" in reply:
            reason, trace = reply["error"]
            results[reply["call"]] = Failure(self._with_limit(reason), trace)
        return reply

    def _blocking(self, results: list[Any], cancelled: Callable[[], bool]) -> int | None:
        """Which async call blocks the event loop at this moment; None where that cannot be found out."""
        assert self._child is not None
        deadline = time.monotonic() + GRACE
        try:
            self._child.send({"op": "running"}, deadline=deadline, cancelled=cancelled)
            while "running" not in (reply := self._receive(results, deadline, cancelled)):
                pass
        except (TimeoutError, Died, Cancelled):
            return None
        running: int | None = reply["running"]
        return running if running is not None and results[running] is UNANSWERED else None

    @property
    def _allowed(self) -> str:
        """The memory limit, if there is one: libraries end a process that lacks memory."""
        return "" if self.memory is None else f" (its memory is limited to {self.memory / 1e6:.0f} MB)"

    def _with_limit(self, reason: str) -> str:
        return f"{reason.rstrip(': ')}{self._allowed}" if "MemoryError" in reason else reason

    def _described(self, name: str, about: dict[str, Any]) -> Function:
        where = str(self.path) if about["line"] is None else f"{self.path}:{about['line']}"
        return Function(name, tuple((n, k, d) for n, k, d in about["parameters"]), about["is_async"], where)


def _fill(results: list[Any], failure: Failure) -> None:
    """Let every call that has no result fail."""
    results[:] = [failure if result is UNANSWERED else result for result in results]
