"""When a micro-batch does not fit in memory: it is split, and the pass over the batch begins again.

Nothing of a pass that failed is kept, neither gradients nor metrics, so nothing can count twice, wherever in its
backward pass a micro-batch died. The gradient is the same but for rounding: denominators are global. To the bit it is
not, which is why every split is counted, reported and, by the loop, put among the run's events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch

from novarl.core.bus import Bus
from novarl.core.errors import NovaError
from novarl.core.memory import first_line, out_of_memory
from novarl.core.types import Record
from novarl.distributed.shard import FailedElsewhere, Sharding
from novarl.kernels.products import give_up_programs

T = TypeVar("T")

MOST = 10
"""Passes over one batch that may fail."""

SPLIT = "split_micro_batches"
"""The Record's name for how many micro-batches were split; absent where none was."""


@dataclass(slots=True)
class Splits:
    """How many micro-batches were split since somebody last asked."""

    count: int = 0

    def take(self) -> int:
        """The count, which begins anew."""
        taken, self.count = self.count, 0
        return taken


def fitting(
    micro: list[list[int]],
    attempt: Callable[[Iterator[list[int]]], T],
    splits: Splits,
    *,
    undo: Callable[[], object] = lambda: None,
    sharding: Sharding | None = None,
) -> T:
    """What `attempt` returns of the micro-batches `micro`, which it takes one by one.

    Where memory runs out, `undo` takes back what the attempt has done so far, the micro-batch it was at is split into
    halves, and the attempt begins again. NovaError: a trajectory alone does not fit, or `MOST` attempts have failed.

    Where the model is sharded, every rank has the same number of micro-batches, some of which may be empty, and all
    ranks begin again where memory runs out on one.
    """
    for _ in range(MOST):
        at = [0]
        if sharding is not None:
            micro = sharding.padded(micro)
        try:
            with sharding.passes() if sharding is not None else nullcontext():
                return attempt(_counted(micro, at))
        except (MemoryError, OSError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            reason, elsewhere = first_line(error), isinstance(error, FailedElsewhere)
        # Outside the handler: until here the traceback has kept the dead pass's tensors alive.
        undo()
        give_up_programs()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        failed = [] if elsewhere else micro[at[0]]
        stuck = not elsewhere and len(failed) < 2
        if any(sharding.ranks.gather(stuck)) if sharding is not None else stuck:
            raise NovaError(
                f"one trajectory alone does not fit in memory ({reason})",
                where="micro",
                fix="set micro.gradient_checkpointing=true, lower micro.logprob_chunk, or allow fewer tokens",
            )
        if elsewhere:
            continue
        middle = len(failed) // 2
        micro = [*micro[: at[0]], failed[:middle], failed[middle:], *micro[at[0] + 1 :]]
        splits.count += 1
    raise NovaError(
        f"memory ran out {MOST} times in a row in one update ({reason})",
        where="micro.max_tokens",
        fix="lower micro.max_tokens, or set micro.gradient_checkpointing=true",
    )


def joined(record: Record, other: Record) -> Record:
    """Both Records of one update as one: of the numbers that they share the other's, of micro-batches split the sum."""
    split = record.get(SPLIT, 0.0) + other.get(SPLIT, 0.0)
    return record | other | ({SPLIT: split} if split else {})


def report(record: Record, step: int, bus: Bus) -> None:
    """Tell the run's events of micro-batches that were split in the update of `record`, if any were."""
    if record.get(SPLIT):
        bus.event(
            "split_micro_batch",
            step=step,
            count=int(record[SPLIT]),
            message="memory ran out, so micro-batches were split: the gradient is the same but for rounding, and the "
            "run is no longer bit-exact from here",
        )


def _counted(micro: list[list[int]], at: list[int]) -> Iterator[list[int]]:
    """The micro-batches; `at[0]` is the number of the one that was handed out last."""
    for number, trajectories in enumerate(micro):
        at[0] = number
        yield trajectories
