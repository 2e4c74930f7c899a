"""Suppliers of credit: provide what an estimator needs besides rewards, and train the models for it.

PPO and VinePPO differ only in the supplier of values: a critic, or new continuations. PRIME's gives per-token rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from novarl.core.types import Batch, Credit, Record, Scored, Scores


class Supplier(Protocol):
    """`supply` is called once per rollout, before credit; `learn` for each minibatch, after the policy update. A
    supplier without a model of its own learns nothing and has no state."""

    def supply(self, kept: Sequence[Scored], batch: Batch, scores: Scores, step: int) -> tuple[Scores, Record]: ...

    def learn(self, batch: Batch, scores: Scores, credit: Credit) -> Record:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return
