"""Suppliers of credit: what an estimator needs beyond the rewards, and who learns to give it.

PPO and VinePPO differ in nothing but their supplier of values: a critic, or fresh continuations. PRIME's supplies a
reward for every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from novarl.core.types import Batch, Credit, Record, Scored, Scores


class Supplier(Protocol):
    """`supply` runs once a rollout, before credit; `learn` with each of its minibatches, after the policy's update."""

    def supply(self, kept: Sequence[Scored], batch: Batch, scores: Scores, step: int) -> tuple[Scores, Record]: ...
    def learn(self, batch: Batch, scores: Scores, credit: Credit) -> Record: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
