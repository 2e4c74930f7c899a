"""Gradient accumulation over micro-batches that fit in memory, with the same result on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from novarl.core.types import Batch, Record
from novarl.distributed.ranks import Ranks
from novarl.distributed.shard import is_sharded
from novarl.kernels.accumulation import fused_accumulation
from novarl.learn.fitting import SPLIT, Splits, fitting
from novarl.learn.ledger import Ledger
from novarl.learn.optim import Optimizer, OptimSettings
from novarl.learn.plan import piece, plan

Backward = Callable[[Batch, Tensor, Ledger], None]
"""(part, index, ledger): add the gradient of one micro-batch, by `loss.backward()` alone (gradients in some weights are
added to `.grad` on the way), and report to `ledger`; `index` [n] says where in the batch its tokens are."""


class Scoring(Protocol):
    """Where a model computes, whether shared prefixes are computed once, and who counts split micro-batches."""

    @property
    def device(self) -> torch.device: ...
    @property
    def shares(self) -> bool: ...
    @property
    def splits(self) -> Splits: ...


class Accumulator:
    """A model's optimiser, and the passes over whole batches that give it gradients. `scorer` is what runs the model,
    `budget` the most tokens of a micro-batch."""

    def __init__(self, model: nn.Module, scorer: Scoring, *, optim: OptimSettings, ranks: Ranks, budget: int) -> None:
        self.scorer, self.ranks, self.budget = scorer, ranks, budget
        self.optimizer = Optimizer(model, optim)

    def gradient(self, batch: Batch, backward: Backward, *, apart: Tensor | None = None) -> Ledger:
        """Leave the gradient of `batch`, over all ranks, where the optimiser finds it; returns the reports. The
        trajectories of `apart` [R] bool are in micro-batches of their own."""
        ledger, device = Ledger(), self.scorer.device

        def attempt(micro: Iterator[list[int]]) -> None:
            with fused_accumulation():
                for trajectories in micro:
                    backward(*piece(batch, trajectories, device), ledger)

        def undo() -> None:
            self.optimizer.drop_gradients()
            ledger.clear()

        micro = plan(batch, self.ranks, self.budget, apart=apart, shares=self.scorer.shares)
        fitting(micro, attempt, self.scorer.splits, undo=undo, sharding=self.optimizer.sharding)
        ledger.count(SPLIT, self.scorer.splits.take())
        self.ranks.sum_(*(gradient for gradient in self.optimizer.gradients() if not is_sharded(gradient)))
        return ledger

    def update(self, batch: Batch, backward: Backward, *, prefix: str = "") -> Record:
        """One optimiser update on the whole batch; the Record is the same on every rank. `prefix`: of `grad_norm` and
        `lr`."""
        ledger = self.gradient(batch, backward)
        norm, rate = self.optimizer.step()
        return ledger.reduce(self.ranks) | {f"{prefix}grad_norm": norm, f"{prefix}lr": rate}
