"""The event bus of a run: a single stream of reports to all sinks.

Stages publish and sinks subscribe, without knowing each other. The bus also measures time: a `span` adds its seconds to
the next record as `time/<name>_s`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from novarl.core.errors import visible

if TYPE_CHECKING:
    from novarl.core.types import Sink


class Bus:
    """Fans reports out to sinks; with none (ranks other than 0) it is silent. A sink that raises is reported and
    detached, unless it is `essential`, as the run's own record is: then its error ends the run."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = list(sinks)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str, **tags: Any) -> Iterator[None]:
        """Time a stage; its seconds, summed over entries, join the next record as `time/<name>_s`. Sinks with a method
        `span(name, start, seconds, tags)` hear of every entry; `start` is on the clock of `time.perf_counter`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            for sink in self.sinks:
                if hasattr(sink, "span"):
                    self._tell(sink, "span", name, start, seconds, tags)

    def take_times(self) -> dict[str, float]:
        """The seconds of each span since the last call, as `time/<name>_s`."""
        taken = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return taken

    def step(self, step: int, record: Mapping[str, float]) -> None:
        """Report the metrics of one optimiser update."""
        for sink in list(self.sinks):
            self._tell(sink, "step", step, record)

    def event(self, kind: str, **fields: Any) -> None:
        """Report something that happened: a save, an alert, a skipped row, a failed rollout, a sample of text."""
        for sink in list(self.sinks):
            self._tell(sink, "event", kind, fields)

    def flush(self) -> None:
        """Bring every sink's files up to date on disk, before a checkpoint notes how long they are."""
        for sink in list(self.sinks):
            self._tell(sink, "flush")

    def close(self) -> None:
        for sink in list(self.sinks):
            self._tell(sink, "close")

    def _tell(self, sink: Sink, method: str, *arguments: Any) -> None:
        try:
            getattr(sink, method)(*arguments)
        except Exception as error:
            if getattr(sink, "essential", False):
                raise
            self.sinks = [other for other in self.sinks if other is not sink]
            with suppress(Exception):
                sink.close()
            name = type(sink).__name__
            message = f"{name} failed and receives no further reports ({type(error).__name__}: {error})"
            with suppress(OSError):
                print(f"novarl: {visible(message)}", file=sys.stderr)
            self.event("alert", message=message)
