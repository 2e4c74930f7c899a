"""Supervised fine-tuning: cross-entropy of the masked tokens. The same as a policy gradient with advantage 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from novarl.core.types import Batch, Record
from novarl.distributed.ranks import Ranks
from novarl.learn.accumulate import Accumulator
from novarl.learn.ledger import Ledger
from novarl.learn.optim import OptimSettings
from novarl.learn.scorer import Scorer

_LARGEST = 700.0
"""The largest exponent for which exp is finite."""


class SupervisedLearner:
    """loss = -(1/M) sum_t m_t log pi(token_t), M the number of masked tokens in the whole batch, over all ranks."""

    def __init__(self, model: nn.Module, scorer: Scorer, *, optim: OptimSettings, ranks: Ranks, budget: int) -> None:
        self.scorer = scorer
        self.accumulator = Accumulator(model, scorer, optim=optim, ranks=ranks, budget=budget)
        self.optimizer = self.accumulator.optimizer

    def update(self, batch: Batch) -> Record:
        """One optimiser update on the whole batch; the Record is the same on every rank."""
        count = max(1, int(batch.mask.sum()))

        def backward(part: Batch, _: Tensor, ledger: Ledger) -> None:
            self._backward(part, count, ledger)

        record = self.accumulator.update(batch, backward)
        if "loss" in record:  # there was something to learn
            record["perplexity"] = math.exp(min(record["loss"], _LARGEST))
        return record | {"tokens": float(batch.tokens.numel())}

    def _backward(self, part: Batch, count: int, ledger: Ledger) -> None:
        """Add one micro-batch's gradient."""
        logp, entropy, best = self.scorer.read(part, self.scorer.hidden(part))
        loss = -(logp * part.mask).sum() / count
        loss.backward()
        ledger.count("micro_batches", min(1, part.reward.numel()))
        ledger.sum("loss", loss)
        ledger.mean("entropy", entropy.detach()[part.mask])
        ledger.mean("accuracy", (logp == best)[part.mask].double())

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
