"""Quantities that adapt during a run: controlled coefficients, constraint multipliers, objective weights.

All are plain numbers, equal on every rank and saved in checkpoints; they change once per step, after its last update.
Entropy is measured in this update, and so is KL if a step has one update; otherwise on all answers, before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from novarl.control.constraints import Constraint
from novarl.control.controller import Controller
from novarl.control.objectives import Objectives, combine
from novarl.core.errors import NovaError
from novarl.core.types import Batch, Record, Scores
from novarl.learn.objective import KL_ESTIMATORS
from novarl.learn.plan import per_trajectory
from novarl.learn.policy import PolicyLearner

DERIVED = ("kl", "entropy", "length")
"""Objectives that are not rewards: a trajectory's sum of log pi_old - log pi_ref, of -log pi_old, and its length."""


@dataclass(slots=True)
class Governor:
    """`kl` and `entropy` are the coefficients, to which constraint multipliers are added. `unit`: KL per token
    (`..kl_mean`) or per trajectory (`..kl_sequence`). `in_loss`: whether the KL coefficient is used by the learner or
    by credit."""

    kl: Controller
    entropy: Controller
    in_loss: bool
    unit: Literal["token", "sequence"] = "token"
    constraints: dict[Literal["kl", "entropy"], Constraint] = field(default_factory=dict)
    objectives: Objectives | None = None

    @property
    def kl_coef(self) -> float:
        return self.kl.coef + (self.constraints["kl"].coef if "kl" in self.constraints else 0.0)

    @property
    def entropy_coef(self) -> float:
        return self.entropy.coef + (self.constraints["entropy"].coef if "entropy" in self.constraints else 0.0)

    def rule(self, learner: PolicyLearner) -> None:
        """Set the learner's coefficients for its next update."""
        kl = self.kl_coef if self.in_loss else 0.0
        learner.objective = replace(learner.objective, kl_loss_coef=kl, entropy_coef=self.entropy_coef)

    def weigh(self, batch: Batch, scores: Scores) -> tuple[Tensor | None, Record]:
        """(the weighted reward of each trajectory [R], None without objectives; metrics). Every estimator without
        `norm_std` is linear in the reward, so this is equivalent to weighting separate advantages."""
        record = self._distance(batch, scores)
        if self.objectives is None:
            return None, record
        columns = torch.stack([self._column(name, batch, scores) for name in self.objectives.names])
        trained = columns[:, ~batch.baseline].double()
        means = trained.mean(1).tolist()
        weights = self.objectives.observe(means, trained.std(1, unbiased=False).tolist())
        for name, mean, weight in zip(self.objectives.names, means, weights, strict=True):
            record |= {f"objective/{name}_mean": mean, f"objective/{name}_weight": weight}
        return combine(columns, torch.tensor(weights, dtype=torch.float64)), record

    @staticmethod
    def _distance(batch: Batch, scores: Scores) -> Record:
        """KL of the sampling policy to the reference on all answers, by k1; empty if either is unknown. k3 has a heavy
        tail once the policy avoids what the reference prefers: most steps would measure too little, and KL would grow.
        """
        if scores.old_logp is None or scores.ref_logp is None:
            return {}
        k1 = KL_ESTIMATORS["k1"](scores.old_logp, scores.ref_logp).double()
        kl, tokens = (per_trajectory(batch, each)[~batch.baseline] for each in (k1, torch.ones_like(k1)))
        return {
            "rollout_kl_mean": (kl.sum() / tokens.sum().clamp(min=1.0)).item(),
            "rollout_kl_sequence": kl.mean().item(),
        }

    def _column(self, name: str, batch: Batch, scores: Scores) -> Tensor:
        """The value of one objective for each trajectory [R]."""
        if name in batch.reward_names:
            found = batch.rewards[:, batch.reward_names.index(name)]
            if bool(found[~batch.baseline].isnan().any()):
                raise NovaError(
                    "some rollouts of the step have no value for it",
                    where=f"multi_objective.objectives.{name}",
                    fix="return every part of the reward for every rollout",
                )
            return found
        if name == "reward":
            return batch.reward
        if name not in DERIVED:
            raise NovaError(
                f"no reward returned it; the rewards are {', '.join(batch.reward_names) or 'none'}",
                where=f"multi_objective.objectives.{name}",
                fix="name the parts of a reward that returns several",
            )
        if name == "length":
            per_token = torch.ones_like(batch.behavior_logp)
        else:
            assert scores.old_logp is not None
            per_token = -scores.old_logp
            if name == "kl":
                assert scores.ref_logp is not None
                per_token = KL_ESTIMATORS["k1"](scores.old_logp, scores.ref_logp)
        return per_trajectory(batch, per_token.to(batch.reward.dtype))

    def observe(self, record: Record) -> Record:
        """Adapt to the Record of a step's last update. Returns metrics."""
        if "entropy" not in record:  # the actor was frozen and not measured
            return {}
        n, measured = int(record["episodes"]), {"entropy": record["entropy"]}
        if "kl_sequence" in record:  # there is a reference
            name = "kl_sequence" if self.unit == "sequence" else "kl_mean"
            measured["kl"] = record.get(f"rollout_{name}", record[name])
            self.kl.update(measured["kl"], n)
        self.entropy.update(measured["entropy"], n)
        found: Record = {}
        for bound, constraint in self.constraints.items():
            constraint.update(measured[bound], n)
            found |= {f"{bound}_multiplier": constraint.coef, f"{bound}_violation": constraint.violation}
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(),
            "constraints": {name: constraint.state_dict() for name, constraint in self.constraints.items()},
            "objectives": None if self.objectives is None else self.objectives.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kl.load_state_dict(state["kl"])
        self.entropy.load_state_dict(state["entropy"])
        for name, constraint in self.constraints.items():
            constraint.load_state_dict(state["constraints"][name])
        if self.objectives is not None:
            self.objectives.load_state_dict(state["objectives"])
