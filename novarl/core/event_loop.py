"""The asyncio event loop of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """One loop for the whole run, so that whatever belongs to a loop (tasks, connections of a client) lives as long.

    A coroutine runs in the calling thread. Where a loop runs there already (Jupyter, an async function), it runs in a
    second thread, which `prepare` is called in first, while the caller waits.
    """

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._runner = asyncio.Runner()
        self._prepare = prepare
        self._thread: ThreadPoolExecutor | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of the coroutine."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(coroutine)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="novarl-loop", initializer=self._prepare)
        return self._thread.submit(self._runner.run, coroutine).result()

    def close(self) -> None:
        """Cancel what still runs. A closed loop runs nothing more."""
        if self._thread is None:
            self._runner.close()
        else:
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()
