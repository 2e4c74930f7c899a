"""The process that samples one step ahead (`rollout.staleness=1`), started before this one has imported torch.

It needs as long for its imports as this process does, and has a core of its own to do them meanwhile.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from novarl.engines.worker import Worker

if TYPE_CHECKING:
    from novarl.config.tree import RLConfig


def divided_threads(config: RLConfig) -> tuple[int, int]:
    """(threads of this process, threads that sample). Where a second process samples, `threads` is what both have
    together, unless `rollout.threads` gives the second its own; each has one at least."""
    total = config.threads or int(os.environ.get("OMP_NUM_THREADS", "2"))
    if config.rollout.staleness == 0:
        return total, total
    if config.rollout.threads is not None:
        return total, config.rollout.threads
    return max(1, total - total // 2), max(1, total // 2)


def sampling_process(config: RLConfig) -> Worker:
    """The process, which `build.play.FarSampler` gives its part."""
    _, threads = divided_threads(config)
    return Worker(
        what="the sampling process",
        fix="go on from the last checkpoint with resume=auto; if memory was short, with rollout.staleness=0 or "
        "fewer rollout.max_batch",
        imports="novarl.build.play",
        environ={"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
    )
