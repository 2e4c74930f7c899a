"""The state of a loop: exactly what the next step depends on, as saved in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from novarl.core.types import Batch, Credit, Record, Scored, Scores
from novarl.data.pack import select
from novarl.data.serial import from_dict, to_dict


@dataclass(slots=True)
class Pending:
    """A rollout in training, with everything computed from it, which is never recomputed."""

    batch: Batch
    scores: Scores
    credit: Credit
    minibatches: list[list[int]]
    record: Record
    used: int = 0
    measured: dict[str, Tensor] | None = None
    """Per-token columns [N] of the first update on each token, for the rollout log; NaN before. None: not logged."""
    _index: Tensor | None = None

    @property
    def used_up(self) -> bool:
        return self.used == len(self.minibatches)

    def next(self) -> tuple[Batch, Scores, Credit]:
        """The next minibatch with its scores and credit."""
        trajectories = self.minibatches[self.used]
        self.used += 1
        self._index = None
        if len(trajectories) == self.batch.reward.numel():
            return self.batch, self.scores, self.credit
        part, self._index = select(self.batch, trajectories)
        index = self._index

        def cut(whole: Scores | Credit) -> dict[str, Any]:
            at = {"bootstrap": torch.tensor(trajectories)}  # the only per-trajectory column
            return {
                name: column if column is None else column[at.get(name, index)]
                for name, column in _columns(whole).items()
            }

        return part, Scores(**cut(self.scores)), Credit(**cut(self.credit))

    def note(self, measured: Mapping[str, Tensor]) -> None:
        """Keep the columns of the minibatch that `next` returned last, where there are none yet."""
        assert self.measured is not None
        for name, column in measured.items():
            whole = self.measured.setdefault(name, torch.full_like(self.batch.behavior_logp, torch.nan))
            index = slice(None) if self._index is None else self._index
            whole[index] = torch.where(whole[index].isnan(), column.to(whole), whole[index])

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch": {name: column for name, column in _columns(self.batch).items() if column is not None},
            "scores": _columns(self.scores),
            "credit": _columns(self.credit),
            "minibatches": self.minibatches,
            "record": self.record,
            "used": self.used,
            "measured": self.measured,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Pending:
        batch = {**state["batch"], "reward_names": tuple(state["batch"]["reward_names"])}
        return cls(
            batch=Batch(**batch),
            scores=Scores(**state["scores"]),
            credit=Credit(**state["credit"]),
            minibatches=[list(part) for part in state["minibatches"]],
            record=dict(state["record"]),
            used=int(state["used"]),
            measured=state.get("measured"),
        )


def _columns(value: Batch | Scores | Credit) -> dict[str, Any]:
    return {name.name: getattr(value, name.name) for name in fields(value)}


@dataclass(frozen=True, slots=True)
class Gathered:
    """The scored rollouts of a step: `version` of the weights, the last prompt's `epoch`, and `stream`, the data
    position."""

    scored: Sequence[Scored]
    stream: dict[str, Any]
    epoch: int
    version: int

    def state_dict(self) -> dict[str, Any]:
        scored = [to_dict(item) for item in self.scored]
        return {"scored": scored, "stream": self.stream, "epoch": self.epoch, "version": self.version}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Gathered:
        scored = [from_dict(Scored, item) for item in state["scored"]]
        return cls(scored, dict(state["stream"]), int(state["epoch"]), int(state["version"]))


@dataclass(slots=True)
class LoopState:
    """The position of a loop. `step` counts finished steps, `update` optimiser updates; `stream` is the data position;
    `ahead` holds the next step's rollouts if they are sampled during training: a checkpoint waits for them."""

    step: int = 0
    update: int = 0
    stream: dict[str, Any] = field(default_factory=dict)
    ema: float | None = None
    pending: Pending | None = None
    ahead: Future[Gathered] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "update": self.update,
            "stream": self.stream,
            "ema": self.ema,
            "pending": self.pending.state_dict() if self.pending else None,
            "ahead": self.ahead.result().state_dict() if self.ahead else None,
            "torch_rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.update, self.ema = int(state["step"]), int(state["update"]), state["ema"]
        self.stream = dict(state["stream"])
        self.pending = Pending.from_state(state["pending"]) if state["pending"] else None
        self.ahead = None
        if state["ahead"]:
            self.ahead = Future()
            self.ahead.set_result(Gathered.from_state(state["ahead"]))
        torch.set_rng_state(state["torch_rng"])
