"""Offline steps: which rows, how often, and that a stopped loop goes on where it was."""

from __future__ import annotations

from novarl.core.bus import Bus
from novarl.core.types import Batch, Record
from novarl.data.pack import pack_sequences
from novarl.loops.offline import OfflineStages, offline
from novarl.loops.state import LoopState
from tests.invariance.sharp import lessons

ROWS = list(range(5))


def stages(taken: list[list[int]], seed: int = 0) -> OfflineStages[int]:
    """Rows are numbers, packed as the lessons of these numbers."""

    def pack(rows: list[int]) -> Batch:
        taken.append(rows)
        return pack_sequences([lessons()[row] for row in rows])

    def update(batch: Batch) -> Record:
        return {"tokens": float(batch.tokens.numel())}

    return OfflineStages(rows=ROWS, pack=pack, update=update, bus=Bus(), batch_size=3, seed=seed)


def test_every_epoch_takes_every_row_once() -> None:
    taken: list[list[int]] = []
    state = LoopState()
    records = list(offline(state, stages(taken), steps=5))
    flat = [row for rows in taken for row in rows]
    assert all(sorted(flat[at : at + 5]) == ROWS for at in (0, 5, 10))
    assert flat[:5] != flat[5:10]
    assert [record["epoch"] for record in records] == [1.0, 2.0, 2.0, 3.0, 3.0]
    assert (state.step, state.update) == (5, 5)
    other: list[list[int]] = []
    list(offline(LoopState(), stages(other, seed=1), steps=5))
    assert other != taken


def test_it_goes_on_from_any_yield() -> None:
    whole: list[list[int]] = []
    records = list(offline(LoopState(), stages(whole), steps=5))
    for stop in range(1, 5):
        first: list[list[int]] = []
        state = LoopState()
        for _ in offline(state, stages(first), steps=stop):
            saved = state.state_dict()
        resumed = LoopState()
        resumed.load_state_dict(saved)
        rest: list[list[int]] = []
        assert list(offline(resumed, stages(rest), steps=5)) == records[stop:]
        assert first + rest == whole
