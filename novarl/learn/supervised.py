"""Supervised fine-tuning: cross-entropy of the masked tokens. The same as a policy gradient with advantage 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from novarl.core.types import Batch, Record
from novarl.distributed.ranks import Ranks
from novarl.learn.ledger import Ledger
from novarl.learn.optim import Optimizer, OptimSettings
from novarl.learn.plan import piece, plan
from novarl.learn.scorer import Scorer


class SupervisedLearner:
    """loss = -(1/M) sum_t m_t log pi(token_t), M the number of masked tokens in the whole batch, over all ranks."""

    def __init__(self, model: nn.Module, scorer: Scorer, *, optim: OptimSettings, ranks: Ranks, budget: int) -> None:
        self.scorer, self.ranks, self.budget = scorer, ranks, budget
        self.optimizer = Optimizer(model, optim)

    def update(self, batch: Batch) -> Record:
        """One optimiser update on the whole batch; the Record is the same on every rank."""
        ledger = Ledger()
        count = max(1, int(batch.mask.sum()))
        for trajectories in plan(batch, self.ranks, self.budget):
            part, _ = piece(batch, trajectories, self.scorer.device)
            logp, entropy = self.scorer(part)
            loss = -(logp * part.mask).sum() / count
            loss.backward()
            ledger.sum("loss", loss)
            ledger.mean("entropy", entropy.detach()[part.mask])
        self.ranks.sum_(*self.optimizer.gradients())
        norm, rate = self.optimizer.step()
        return ledger.reduce(self.ranks) | {"grad_norm": norm, "lr": rate, "tokens": float(batch.tokens.numel())}

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
