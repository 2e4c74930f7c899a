"""The gradient of a whole batch, by micro-batches that fit in memory, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from novarl.core.types import Batch
from novarl.distributed.ranks import Ranks
from novarl.distributed.shard import is_sharded
from novarl.kernels.accumulation import fused_accumulation
from novarl.learn.fitting import SPLIT, Splits, fitting
from novarl.learn.ledger import Ledger
from novarl.learn.optim import Optimizer
from novarl.learn.plan import piece, plan


def accumulate(
    batch: Batch,
    backward: Callable[[Batch, Tensor], None],
    ledger: Ledger,
    *,
    optimizer: Optimizer,
    ranks: Ranks,
    budget: int,
    device: torch.device,
    splits: Splits,
    shares: bool,
    apart: Tensor | None = None,
) -> None:
    """Leave the gradient of `batch`, over all ranks, where `optimizer` finds it.

    `backward(part, index)` adds the gradient of one micro-batch on `device`, by `loss.backward()` alone (gradients in
    some weights are added to `.grad` on the way), and reports to `ledger`; `index` [n] says where in the batch its
    tokens are. Where memory runs out both are emptied before the next attempt (`fitting`). The trajectories
    of `apart` [R] bool are in micro-batches of their own. `shares`: the model computes once what sequences begin with
    together.
    """

    def attempt(micro: Iterator[list[int]]) -> None:
        with fused_accumulation():
            for trajectories in micro:
                backward(*piece(batch, trajectories, device))

    def undo() -> None:
        optimizer.drop_gradients()
        ledger.clear()

    micro = plan(batch, ranks, budget, apart=apart, shares=shares)
    fitting(micro, attempt, splits, undo=undo, sharding=optimizer.sharding)
    ledger.count(SPLIT, splits.take())
    ranks.sum_(*(gradient for gradient in optimizer.gradients() if not is_sharded(gradient)))
