"""The training loop for all offline objectives; the learner is passed in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from novarl.core.bus import Bus
from novarl.core.seeds import derive
from novarl.core.types import Batch, Record
from novarl.data.stream import Stream
from novarl.learn import fitting
from novarl.loops.state import LoopState

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class OfflineStages(Generic[Row]):
    """`rows` of any kind, `pack` to make a batch of some of them, `update` to train on it."""

    rows: Sequence[Row]
    pack: Callable[[list[Row]], Batch]
    update: Callable[[Batch], Record]
    bus: Bus
    batch_size: int
    seed: int


def offline(state: LoopState, stages: OfflineStages[Row], *, steps: int) -> Iterator[Record]:
    """Run until step `steps`, with one optimiser update per step, yielding after each."""
    while state.step < steps:
        stream = Stream(len(stages.rows), derive(stages.seed, "rows"))
        if state.stream:
            stream.load_state_dict(state.stream)
        picked = stream.take(stages.batch_size)
        state.stream = stream.state_dict()
        with stages.bus.span("update"):
            record = stages.update(stages.pack([stages.rows[index] for _, index in picked]))
        state.step += 1
        fitting.report(record, state.step, stages.bus)
        state.update += 1
        yield record | {"epoch": float(picked[-1][0] + 1)}
