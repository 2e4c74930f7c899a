"""Shared parts of `novarl dpo` and `novarl rm`: training on pairs or labelled answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from novarl.compose.lora import keep_base
from novarl.compose.offline import SHOWN_TOKENS, OfflineTraining
from novarl.compose.pair_rows import Answers, preference_rows, recall_reference, record_reference
from novarl.compose.preference_plan import PreferencePlan
from novarl.config.preference import DPOConfig, RMConfig
from novarl.core.types import Batch
from novarl.data.pairs import Labelled, Pair, pack_labelled, pack_pairs
from novarl.data.rows import Rows
from novarl.learn.reward_model import RewardScorer, rewards_of
from novarl.loops.evaluate import Evaluation
from novarl.loops.evaluate_rewards import RewardEvaluation, evaluate_rewards
from novarl.run.lifecycle import Machine
from novarl.run.session import Session


class PreferenceTraining(OfflineTraining):
    """`scored` returns the reward [S] of each answer of a batch; each command provides its learner."""

    settings: DPOConfig | RMConfig
    scored: RewardScorer

    def __init__(self, config: DPOConfig | RMConfig, plan: PreferencePlan, machine: Machine) -> None:
        self.plan = plan
        super().__init__(config, plan.lr, machine, SHOWN_TOKENS)
        if self.state is not None and plan.reference:
            self.rows = recall_reference(self.rows, machine.opened.rundir.path / "reference")
        self.plain = all(isinstance(row, Labelled) and row.plain for row in self.rows.train)

    def read_rows(self) -> Rows[Answers]:
        return preference_rows(self.settings, self.plan, self.policy)

    @staticmethod
    def pack(rows: list[Answers]) -> Batch:
        pairs = [row for row in rows if isinstance(row, Pair)]
        return pack_pairs(pairs) if pairs else pack_labelled([row for row in rows if isinstance(row, Labelled)])

    def manifest(self) -> Mapping[str, Any]:
        return {"loss": self.plan.loss}

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "loss": self.plan.loss}

    def begin(self, session: Session) -> None:
        """Compute the reference's log-probabilities once and keep them in the run directory."""
        folder, ranks = session.rundir.path / "reference", session.ranks
        if self.state is not None:
            return
        implicit = self.settings.kind == "rm" and self.plan.reference
        keep_base(self.settings, self.policy, self.machine.opened, ranks, is_reference=implicit)
        if not self.plan.reference:
            return
        many = f"{len(self.rows.train) + len(self.rows.held_out):,} rows"
        first = f"Computing the reference's log-probabilities of all {many}, once for the whole run"
        session.bus.event("alert", message=first)
        budget = self.settings.micro.max_tokens
        self.rows = record_reference(
            self.rows, lambda batch: self.scorer.logprobs(batch, ranks, budget), folder=folder, ranks=ranks
        )

    @property
    def evaluate(self) -> Callable[[], Evaluation] | None:
        return self.evaluate_rewards if self.rows.held_out else None

    def evaluate_rewards(self) -> RewardEvaluation:
        """How well the rewards separate good answers from bad ones."""
        return evaluate_rewards(self.rows.held_out, self._rewards)

    def _rewards(self, batch: Batch) -> Tensor:
        return rewards_of(self.scored, batch, self.machine.ranks, self.settings.micro.max_tokens)

    def entries(self, session: Session) -> Mapping[str, Any]:
        return {**super().entries(session), "loss": self.plan.loss}
