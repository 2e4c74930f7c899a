"""A reward function that is a Python object. It runs in this process, with the rules of a function from a file.

An error fails its own rollout (for TRL's form: the batch), with the line of the user's code. So does a call that times
out, but a thread cannot be stopped: it goes on in the background. A function in a file (`file.py:name`) runs in a
process of its own, which can be stopped.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

from novarl.core.errors import NovaError
from novarl.rewards.loaded_file import Call, Function
from novarl.rewards.services import Services
from novarl.rewards.user_code import failure, is_async, plain
from novarl.rewards.user_process import MOST_HANGS, skipped
from novarl.rewards.verdict import Failure


class InProcess:
    """Calls one function; has the methods of a `UserProcess` that `user_file.FileReward` uses."""

    def __init__(self, function: Callable[..., Any], *, time_limit: float) -> None:
        self.time_limit = time_limit
        self._function = function
        late = f"timed out after {time_limit:g} s, and cannot be stopped because it runs in the training process"
        self.late = Failure(f"{late}; move it to a file (reward='file.py:name') to have it stopped")

    def describe(self) -> Function:
        """The function as its parameters say. NovaError where they cannot be read."""
        name = getattr(self._function, "__name__", type(self._function).__name__)
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except (TypeError, ValueError) as error:
            raise NovaError(
                f"{name} has no readable signature", where="reward", fix="wrap it in a function with named parameters"
            ) from error
        code = getattr(inspect.unwrap(self._function), "__code__", None)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else name
        described = tuple((one.name, one.kind.name, one.default is not one.empty) for one in parameters)
        return Function(name, described, is_async(self._function), where)

    async def call(self, function: Function, calls: Sequence[Call]) -> list[Any]:
        """What each call returned, or its `Failure`."""
        if function.is_async:
            return list(await asyncio.gather(*(self._awaited(*call) for call in calls)))
        results = [skipped(self.time_limit)] * len(calls)
        left, hangs = list(range(len(calls))), 0
        while left and hangs < MOST_HANGS:
            begin = hangs * len(left) // MOST_HANGS  # as UserProcess does
            order = left[begin:] + left[:begin]
            found = await self._in_thread([calls[place] for place in order])
            for place, result in zip(order, found, strict=False):
                results[place] = result
            left, hangs = sorted(order[len(found) :]), (hangs if len(found) == 1 else 0) + 1
        return results

    def begins_early(self, function: Function) -> bool:
        """Never while others are sampled: a thread would take the interpreter from the sampler."""
        return False

    def close(self) -> None: ...

    async def _awaited(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            services = Services(kwargs)
            async with asyncio.timeout(self.time_limit) as clock:
                return plain(services.reply(await self._function(*args, **kwargs)))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
                raise
            return self.late if isinstance(error, TimeoutError) and clock.expired() else Failure(*failure(error))

    async def _in_thread(self, calls: Sequence[Call]) -> list[Any]:
        """The results of these calls, one after the other in a thread, up to the first that is late."""
        loop, left = asyncio.get_running_loop(), threading.Event()
        said: asyncio.Queue[Any] = asyncio.Queue()

        def work() -> None:
            for args, kwargs in calls:
                try:
                    services = Services(kwargs)
                    result = plain(services.reply(self._function(*args, **kwargs)))
                except BaseException as error:  # noqa: BLE001 - any error, SystemExit included, is this call's failure
                    result = Failure(*failure(error))
                if left.is_set():
                    return
                loop.call_soon_threadsafe(said.put_nowait, result)

        threading.Thread(target=work, name="novarl-reward", daemon=True).start()
        results: list[Any] = []
        try:
            while len(results) < len(calls):
                results.append(await asyncio.wait_for(said.get(), self.time_limit))
        except TimeoutError:
            results.append(self.late)
        finally:
            left.set()
        return results
