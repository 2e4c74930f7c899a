"""The asyncio event loop of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """One loop for the whole run, so that objects bound to it (tasks, client connections) live as long. Coroutines run
    in the calling thread; if a loop runs there already (Jupyter), in a second one, in which `prepare` is called
    first."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._runner = asyncio.Runner()
        self._prepare = prepare
        self._thread: ThreadPoolExecutor | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine and return its result."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._runner.run(coroutine)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="novarl-loop", initializer=self._prepare)
        return self._thread.submit(self._runner.run, coroutine).result()

    def close(self) -> None:
        """Cancel all running tasks and close the loop."""
        if self._thread is None:
            self._runner.close()
        else:
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()
