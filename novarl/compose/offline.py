"""What SFT, DPO and reward models share: training on rows that are already there."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from novarl.compose.chat import date_facts, date_notes
from novarl.compose.lora import adapt, adapter_state
from novarl.compose.rows import subject
from novarl.compose.sampling import greedy_sampler
from novarl.compose.weights import optim_settings, read_policy, shard_policy
from novarl.config.notes import without_effect
from novarl.config.preference import DPOConfig, RMConfig
from novarl.config.tree import SFTConfig
from novarl.core.types import Batch
from novarl.data.rows import Rows
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import OfflineLearner
from novarl.loops.offline import OfflineStages, offline
from novarl.loops.state import LoopState
from novarl.run.fingerprint import fingerprint
from novarl.run.lifecycle import Machine, Phase, Training
from novarl.run.session import Session

SHOWN_TOKENS = 256
"""Maximum answer length in samples.md, unless a task sets it."""


class OfflineTraining(Training):
    """Each command provides its rows, its learner, and `pack`, which makes a batch of some rows."""

    def __init__(self, config: SFTConfig | DPOConfig | RMConfig, lr: float, machine: Machine, longest: int) -> None:
        self.settings, self.lr, self.machine, self.longest = config, lr, machine, longest
        self.state = machine.opened.state
        self.policy = policy = read_policy(config, machine.opened, machine.device)
        if isinstance(config, SFTConfig) and config.fsdp:
            shard_policy(policy, machine.ranks, lora=config.lora.rank > 0, compiled=config.compile)
        adapt(config, policy, self.state)
        self.rows = self.read_rows()
        if self.state is not None:
            self.rows.check_same(self.state["facts"], machine.opened.rundir.path)
        count = len(self.rows.train)
        self.steps = config.steps or max(1, math.ceil((config.epochs or 1.0) * count / config.batch_size))
        self.scorer = Scorer(policy.model, chunk=config.micro.logprob_chunk, compute_dtype=policy.compute_dtype)
        self.sampler = greedy_sampler(policy, config, machine.loop, max_tokens=longest)
        self.engine = self.sampler.engine
        self.loop_state = LoopState()

    @abstractmethod
    def read_rows(self) -> Rows[Any]:
        """The training and held-out rows."""

    def fitted(self) -> dict[str, Any]:
        """The keywords that all learners share."""
        config = self.settings
        optim = optim_settings(config.optim, lr=self.lr, total=self.steps)
        return {"optim": optim, "ranks": self.machine.ranks, "budget": config.micro.max_tokens}

    @abstractmethod
    def learner(self) -> OfflineLearner:
        """The learner."""

    @staticmethod
    @abstractmethod
    def pack(rows: list[Any]) -> Batch:
        """A batch of some rows."""

    @property
    def notes(self) -> Sequence[str]:
        config = self.settings
        return [
            *date_notes(self.policy, config, self.state),
            *without_effect(config),
            *self.rows.notes(config.data, config.eval.n),
        ]

    def facts(self) -> Mapping[str, Any]:
        return date_facts(self.policy)

    def phases(self, session: Session) -> Iterator[Phase]:
        config, state, learner = self.settings, self.loop_state, self.learner()
        if self.state is not None:
            state.load_state_dict(self.state["loop"])
            learner.load_state_dict(self.state["learner"])
        stages: OfflineStages[Any] = OfflineStages(
            rows=self.rows.train,
            pack=self.pack,
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

    def entries(self, session: Session) -> Mapping[str, Any]:
        config, state = self.settings, self.loop_state
        return {
            "command": config.kind,
            "task": config.task,
            "lr": self.lr,
            "steps": state.step,
            "updates": state.update,
            **subject(config),
            **{name: session.facts.get(name) for name in ("rows", "before", "after")},
        }

    def close(self) -> None:
        self.engine.close()
