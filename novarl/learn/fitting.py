"""If a micro-batch does not fit in memory, it is split and the pass over the batch restarts.

Gradients and metrics of a failed pass are discarded. The gradient is the same up to rounding, but not bit-identical, so
every split is counted, reported, and logged as an event by the loop.
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
"""The maximum number of failed passes over one batch."""

SPLIT = "split_micro_batches"
"""The metric that counts split micro-batches; absent if there were none."""


@dataclass(slots=True)
class Splits:
    """Counts split micro-batches."""

    count: int = 0

    def take(self) -> int:
        """Return the count and reset it."""
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
    """Call `attempt` on the micro-batches `micro`, which it consumes one by one, and return its result.

    Where memory runs out, `undo` takes back what the attempt has done so far, the micro-batch it was at is split into
    halves, and the attempt begins again; of a sharded model, on all ranks, which all have the same number of
    micro-batches. NovaError: a trajectory alone does not fit, or `MOST` attempts have failed.
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
                f"a single trajectory does not fit in memory ({reason})",
                where="micro",
                fix="set micro.gradient_checkpointing=true, lower micro.logprob_chunk, or reduce max_tokens",
            )
        if elsewhere:
            continue
        middle = len(failed) // 2
        micro = [*micro[: at[0]], failed[:middle], failed[middle:], *micro[at[0] + 1 :]]
        splits.count += 1
    raise NovaError(
        f"out of memory {MOST} times in a row in one update ({reason})",
        where="micro.max_tokens",
        fix="lower micro.max_tokens, or set micro.gradient_checkpointing=true",
    )


def joined(record: Record, other: Record) -> Record:
    """Merge both Records of one update: `other` takes precedence, and split counts are summed."""
    split = record.get(SPLIT, 0.0) + other.get(SPLIT, 0.0)
    return record | other | ({SPLIT: split} if split else {})


def report(record: Record, step: int, bus: Bus) -> None:
    """Emit an event if micro-batches were split in the update of `record`."""
    if record.get(SPLIT):
        bus.event(
            "split_micro_batch",
            step=step,
            count=int(record[SPLIT]),
            message="out of memory: micro-batches were split; the gradient is the same up to rounding, but the "
            "run is not bit-reproducible from here on",
        )


def _counted(micro: list[list[int]], at: list[int]) -> Iterator[list[int]]:
    """Iterate over the micro-batches; `at[0]` is the index of the last one."""
    for number, trajectories in enumerate(micro):
        at[0] = number
        yield trajectories
