"""Gradient accumulation over micro-batches that fit in memory, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from novarl.core.types import Batch
from novarl.distributed.ranks import Ranks
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
    """Accumulate the gradient of `batch` over all ranks for `optimizer`.

    `backward(part, index)` adds the gradient of one micro-batch on `device`, using only `loss.backward()` (some weight
    gradients are added to `.grad` directly), and reports to `ledger`; `index` [n] are the positions of its tokens in
    the batch. If memory runs out, gradients and ledger are cleared before the next attempt (`fitting`). The
    trajectories of `apart` [R] bool get separate micro-batches. `shares`: the model computes shared prefixes once.
    """

    def attempt(micro: Iterator[list[int]]) -> None:
        with fused_accumulation():
            for trajectories in micro:
                backward(*piece(batch, trajectories, device))

    def undo() -> None:
        optimizer.drop_gradients()
        ledger.clear()

    fitting(plan(batch, ranks, budget, apart=apart, shares=shares), attempt, splits, undo=undo)
    ledger.count(SPLIT, splits.take())
    ranks.sum_(*optimizer.gradients())
