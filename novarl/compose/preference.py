"""Shared parts of `novarl dpo` and `novarl rm`: training on pairs or labelled answers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from novarl.compose.chat import date_facts, date_notes
from novarl.compose.lora import adapt, adapter_state, keep_base
from novarl.compose.pair_rows import Answers, preference_rows, recall_reference, record_reference
from novarl.compose.preference_plan import PreferencePlan
from novarl.compose.rows import subject
from novarl.compose.sampling import greedy_sampler
from novarl.compose.weights import read_policy
from novarl.config.preference import DPOConfig, RMConfig
from novarl.config.unread import without_effect
from novarl.core.types import Batch, Record
from novarl.data.pairs import Labelled, Pair, pack_labelled, pack_pairs
from novarl.data.rows import Rows
from novarl.learn.reward_model import RewardScorer, rewards_of
from novarl.learn.scorer import Scorer
from novarl.loops.evaluate import Evaluation
from novarl.loops.evaluate_rewards import RewardEvaluation, evaluate_rewards
from novarl.loops.offline import OfflineStages, offline
from novarl.loops.state import LoopState
from novarl.run.fingerprint import fingerprint
from novarl.run.lifecycle import Machine, Phase, Training
from novarl.run.session import Session

SHOWN_TOKENS = 256
"""Maximum answer length in samples.md."""


class RowLearner(Protocol):
    """Trains on batches of rows, one optimizer update per call."""

    def update(self, batch: Batch) -> Record: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PreferenceTraining(Training):
    """Loads and checks everything; nothing is written yet. `scored` returns the reward [S] of each answer of a batch,
    for the evaluation; each command provides its learner."""

    scored: RewardScorer

    def __init__(self, config: DPOConfig | RMConfig, plan: PreferencePlan, machine: Machine) -> None:
        self.settings, self.plan, self.machine = config, plan, machine
        self.state = machine.opened.state
        self.policy = policy = read_policy(config, machine.opened, machine.device)
        adapt(config, policy, self.state)
        self.rows: Rows[Answers] = preference_rows(config, plan, policy)
        if self.state is not None:
            self.rows.check_same(self.state["facts"], machine.opened.rundir.path)
            if plan.reference:
                self.rows = recall_reference(self.rows, machine.opened.rundir.path / "reference")
        rows = self.rows.train
        self.steps = config.steps or max(1, math.ceil((config.epochs or 1.0) * len(rows) / config.batch_size))
        self.scorer = Scorer(policy.model, chunk=config.micro.logprob_chunk, compute_dtype=policy.compute_dtype)
        self.plain = all(isinstance(row, Labelled) and row.plain for row in rows)
        self.sampler = greedy_sampler(policy, config, machine.loop, max_tokens=SHOWN_TOKENS)
        self.engine, self.longest = self.sampler.engine, SHOWN_TOKENS
        self.loop_state = LoopState()

    @abstractmethod
    def learner(self) -> RowLearner:
        """The learner."""

    @property
    def notes(self) -> Sequence[str]:
        config = self.settings
        return [
            *date_notes(self.policy, config, self.state),
            *without_effect(config),
            *self.rows.notes(config.data, config.eval.n),
        ]

    def manifest(self) -> Mapping[str, Any]:
        return {"loss": self.plan.loss}

    def facts(self) -> Mapping[str, Any]:
        return {**date_facts(self.policy), "loss": self.plan.loss}

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

    def phases(self, session: Session) -> Iterator[Phase]:
        config, state, learner = self.settings, self.loop_state, self.learner()
        if self.state is not None:
            state.load_state_dict(self.state["loop"])
            learner.load_state_dict(self.state["learner"])
        stages: OfflineStages[Answers] = OfflineStages(
            rows=self.rows.train,
            pack=_pack,
            update=learner.update,
            bus=session.bus,
            batch_size=config.batch_size,
            seed=config.seed,
        )

        def snapshot() -> dict[str, Any]:
            return {
                "model": fingerprint(self.policy),
                "loop": state.state_dict(),
                "learner": learner.state_dict(),
                **adapter_state(config, self.policy),
            }

        yield Phase(config.kind, offline(state, stages, steps=self.steps), state, self.steps, snapshot)

    @property
    def evaluate(self) -> Callable[[], Evaluation] | None:
        return self.evaluate_rewards if self.rows.held_out else None

    def evaluate_rewards(self) -> RewardEvaluation:
        """How well the rewards separate good answers from bad ones."""
        return evaluate_rewards(self.rows.held_out, self._rewards)

    def _rewards(self, batch: Batch) -> Tensor:
        return rewards_of(self.scored, batch, self.machine.ranks, self.settings.micro.max_tokens)

    def entries(self, session: Session) -> Mapping[str, Any]:
        config, state = self.settings, self.loop_state
        return {
            "command": config.kind,
            "task": config.task,
            "loss": self.plan.loss,
            "lr": self.plan.lr,
            "steps": state.step,
            "updates": state.update,
            **subject(config),
            **{name: session.facts.get(name) for name in ("rows", "before", "after")},
        }

    def close(self) -> None:
        self.engine.close()


def _pack(rows: list[Answers]) -> Batch:
    pairs = [row for row in rows if isinstance(row, Pair)]
    return pack_pairs(pairs) if pairs else pack_labelled([row for row in rows if isinstance(row, Labelled)])
