"""The event bus of a run: a single stream of reports to all sinks.

Stages publish and sinks subscribe, without knowing each other. The bus also measures time: a `span` adds its seconds to
the next record as `time/<name>_s`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from novarl.core.types import Sink


class Bus:
    """Forwards reports to all sinks. Ranks other than 0 have no sinks."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = list(sinks)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a stage. Its total seconds are added to the next record as `time/<name>_s`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def take_times(self) -> dict[str, float]:
        """The seconds of each span since the last call, as `time/<name>_s`."""
        taken = {f"time/{name}_s": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return taken

    def step(self, step: int, record: Mapping[str, float]) -> None:
        """Report the metrics of one optimiser update."""
        for sink in self.sinks:
            sink.step(step, record)

    def event(self, kind: str, **fields: Any) -> None:
        """Report an event: a save, an alert, a skipped row, a failed rollout, a text sample."""
        for sink in self.sinks:
            sink.event(kind, fields)

    def flush(self) -> None:
        """Flush every sink's files to disk, before a checkpoint records their sizes."""
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
