"""One stream of reports from a run to whatever listens.

Stages publish, sinks and observers listen, and neither knows the other. The bus also keeps the clock: a `span` adds its
seconds to the next record as `time/<name>_s`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from novarl.core.types import Sink


class Bus:
    """Fans reports out to sinks. With no sinks it is silent, which is what ranks other than 0 use."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self.sinks = list(sinks)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a stage; its seconds, summed over entries, join the next record as `time/<name>_s`."""
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
        """Report something that happened: a save, an alert, a skipped row, a failed rollout, a sample of text."""
        for sink in self.sinks:
            sink.event(kind, fields)

    def flush(self) -> None:
        """Bring every sink's files up to date on disk, before a checkpoint notes how long they are."""
        for sink in self.sinks:
            sink.flush()

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
