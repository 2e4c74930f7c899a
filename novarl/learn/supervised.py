"""Learning from rows that are already there, and its simplest case: cross-entropy of the masked tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from novarl.core.types import Batch, Record
from novarl.distributed.ranks import Ranks
from novarl.learn.accumulate import Accumulator, Scoring
from novarl.learn.ledger import Ledger
from novarl.learn.optim import OptimSettings
from novarl.learn.plan import trajectory_of_tokens
from novarl.learn.scorer import Scorer

_LARGEST = 700.0
"""The largest exponent for which exp is finite."""


class OfflineLearner(ABC):
    """Minimises the mean of the losses that subclasses define, by default one for each trajectory."""

    def __init__(self, model: nn.Module, scorer: Scoring, *, optim: OptimSettings, ranks: Ranks, budget: int) -> None:
        self.ranks, self.budget = ranks, budget
        self.accumulator = Accumulator(model, scorer, optim=optim, ranks=ranks, budget=budget)
        self.optimizer = self.accumulator.optimizer

    @abstractmethod
    def losses(self, part: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The losses of a micro-batch, and metrics by name, whose means are reported."""

    def count(self, batch: Batch) -> int:
        """The number of losses of a whole batch, over all ranks, by which their sum is divided."""
        return trajectory_of_tokens(batch)[batch.mask].unique().numel()

    def update(self, batch: Batch) -> Record:
        """One optimiser update on the whole batch; the Record is the same on every rank."""
        count = self.count(batch)

        def backward(part: Batch, _: Tensor, ledger: Ledger) -> None:
            losses, metrics = self.losses(part)
            loss = losses.sum() / count
            loss.backward()
            ledger.count("micro_batches", min(1, part.reward.numel()))
            ledger.sum("loss", loss)
            for name, values in metrics.items():
                ledger.mean(name, values)

        record = self.accumulator.update(batch, backward)
        return record | {"tokens": float(batch.tokens.numel())}

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])


class SupervisedLearner(OfflineLearner):
    """loss = -(1/M) sum_t m_t log pi(token_t), M the number of masked tokens in the whole batch, over all ranks."""

    def __init__(self, model: nn.Module, scorer: Scorer, *, optim: OptimSettings, ranks: Ranks, budget: int) -> None:
        super().__init__(model, scorer, optim=optim, ranks=ranks, budget=budget)
        self.scorer = scorer

    def count(self, batch: Batch) -> int:
        return max(1, int(batch.mask.sum()))

    def losses(self, part: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        logp, entropy, best = self.scorer.read(part, self.scorer.hidden(part))
        metrics = {"entropy": entropy[part.mask], "accuracy": (logp == best)[part.mask].double()}
        return -(logp * part.mask), metrics

    def update(self, batch: Batch) -> Record:
        record = super().update(batch)
        if "loss" in record:  # there was something to learn
            record["perplexity"] = math.exp(min(record["loss"], _LARGEST))
        return record
