"""The child process in which a user's file runs: `python -m novarl.rewards.user_code`, JSON in and out.

A thread reads the requests, so that one can be answered while the user's code runs.

    {"op": "load", "path": P, "memory": bytes | null}    -> {"functions": {name: {...}}}
                                                         | {"error": {what, where, fix}}
    {"op": "call", "function": F, "calls": [[args, kwargs], ...], "limit": seconds}
                                                         -> for each call {"call": i, "value": V}
                                                            or {"call": i, "error": [reason, traceback]}
    {"op": "running"}                                    -> {"running": i | null}, the call that blocks the loop
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import queue
import resource
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsFloat

from novarl.processes.channel import Channel, TooLarge
from novarl.rewards.services import Services

if TYPE_CHECKING:
    import asyncio

Request = dict[str, Any]

MOST_CHARACTERS = 20_000
"""Of an error's message, and of the end of its traceback."""


class UserCode:
    """Loads one file and calls its functions, several at once where they are async."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.waiting: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.module: ModuleType | None = None

    def serve(self) -> None:
        """Answer requests until told to stop. The event loop lives on between calls, as async clients expect."""
        threading.Thread(target=self._read, daemon=True).start()
        while (request := self.waiting.get()) is not None:
            if request["op"] == "load":
                self.reply(self.load(Path(request["path"]), request.get("memory")))
            else:
                self.call(request)

    def reply(self, message: dict[str, Any]) -> None:
        try:
            self.channel.reply(message)
        except TooLarge as error:
            self.channel.reply({"call": message["call"], "error": [f"returned a value of {error}", ""]})

    def load(self, path: Path, memory: int | None = None) -> dict[str, Any]:
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        sys.dont_write_bytecode = True  # a run leaves no __pycache__ beside the user's files
        folder = str(path.parent.resolve())
        sys.path.insert(0, folder)  # as `python FILE` does, so that it may import its neighbours
        try:
            self.module = _import(path)
        except BaseException as error:  # noqa: BLE001 - a file may raise anything, SystemExit included; all of it is reported
            return {"error": _import_error(path, error)}
        functions = {name: thing for name, thing in vars(self.module).items() if callable(thing)}
        if any(map(is_async, functions.values())):
            # This is more than half of the time of a start, and most files do not need it. The user's folder, which may
            # hold a selectors.py, is left out of the search.
            theirs, sys.path = sys.path, [place for place in sys.path if place != folder]
            importlib.import_module("asyncio")
            sys.path = theirs
        return {"functions": {name: _describe(path, thing) for name, thing in functions.items()}}

    def call(self, request: Request) -> None:
        function: Callable[..., Any] = getattr(self.module, request["function"])
        calls: list[Any] = request["calls"]
        if is_async(function):
            self._call_all(function, calls, request["limit"])
            return
        for index, (args, kwargs) in enumerate(calls):
            try:
                services = Services(kwargs)
                value = plain(services.reply(function(*args, **kwargs)))
                self.reply({"call": index, "value": value})
            except BaseException as error:  # noqa: BLE001 - any error, SystemExit included, is this call's failure
                self.reply({"call": index, "error": failure(error)})

    def _call_all(self, function: Callable[..., Coroutine[Any, Any, Any]], calls: list[Any], limit: float) -> None:
        import asyncio

        async def one(index: int, args: list[Any], kwargs: dict[str, Any]) -> None:
            try:
                services = Services(kwargs)
                async with asyncio.timeout(limit) as clock:
                    value = plain(services.reply(await function(*args, **kwargs)))
                self.reply({"call": index, "value": value})
            except BaseException as error:  # noqa: BLE001 - as above
                late = isinstance(error, TimeoutError) and clock.expired()
                reason = [f"timed out after {limit:g} s", ""] if late else failure(error)
                self.reply({"call": index, "error": reason})

        async def every() -> None:
            tasks = [asyncio.create_task(one(index, *call), name=str(index)) for index, call in enumerate(calls)]
            await asyncio.gather(*tasks)

        self.loop = self.loop or asyncio.new_event_loop()
        self.loop.run_until_complete(every())

    def _read(self) -> None:
        for request in self.channel:
            if request["op"] == "running":
                self.reply({"running": self._running()})
            else:
                self.waiting.put(request)
        self.waiting.put(None)

    def _running(self) -> int | None:
        """Which async call computes at this moment."""
        if self.loop is None or not self.loop.is_running():
            return None
        from asyncio import current_task

        task = current_task(self.loop)
        name = task.get_name() if task is not None else ""
        return int(name) if name.isdigit() else None


class NoJSON(Exception):
    """A return value that cannot be sent."""


def plain(value: Any) -> Any:
    """A user's return value as JSON: numbers and arrays of any library become floats and lists. NoJSON otherwise."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(part) for key, part in value.items()}
    if hasattr(value, "tolist") and getattr(value, "ndim", None):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, SupportsFloat):
        return float(value)
    raise NoJSON(f"returned {value!r:.80} of type {type(value).__name__}")


def _import(path: Path) -> ModuleType:
    name = path.stem if path.stem not in sys.modules else f"user_{path.stem}"  # a user's json.py must not become ours
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by name
    spec.loader.exec_module(module)
    return module


def _name(path: Path) -> str:
    """The file's name in Python's code objects and tracebacks, however the user wrote its path."""
    return str(path.absolute())


def _import_error(path: Path, error: BaseException) -> dict[str, str]:
    """Where in the user's file an import went wrong, as one line."""
    if isinstance(error, SyntaxError) and error.filename == _name(path):
        return {
            "what": f"{type(error).__name__}: {error.msg}",
            "where": f"{path}:{error.lineno}",
            "fix": "correct the file",
        }
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _name(path)]
    where = f"{path}:{lines[-1]}" if lines else str(path)
    what = f"import failed with {type(error).__name__}: {_short(error)}"
    return {"what": what, "where": where, "fix": "check that `python FILE` runs without errors"}


def _describe(path: Path, thing: Any) -> dict[str, Any]:
    """A callable as the parent needs it to recognise its form, without importing the file itself."""
    try:
        parameters = list(inspect.signature(thing).parameters.values())
    except (TypeError, ValueError):  # some C callables have no signature
        parameters = []
    code = getattr(inspect.unwrap(thing), "__code__", None)
    return {
        "parameters": [[p.name, p.kind.name, p.default is not p.empty] for p in parameters],
        "is_async": is_async(thing),
        "line": code.co_firstlineno if code is not None and code.co_filename == _name(path) else None,
    }


def is_async(thing: Any) -> bool:
    """Whether calling it returns a coroutine."""
    return inspect.iscoroutinefunction(thing) or inspect.iscoroutinefunction(getattr(thing, "__call__", None))  # noqa: B004


def failure(error: BaseException) -> list[str]:
    """[reason, traceback] of an error that a user's function raised."""
    if isinstance(error, NoJSON):
        return [str(error), ""]
    trace = "".join(traceback.format_exception(error)).strip()
    return [f"raised {type(error).__name__}: {_short(error)}", trace[-MOST_CHARACTERS:]]


def _short(error: BaseException) -> str:
    """An error's message, which may quote the whole text that it is about."""
    text = str(error)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def main() -> None:
    UserCode(Channel()).serve()


if __name__ == "__main__":
    main()
