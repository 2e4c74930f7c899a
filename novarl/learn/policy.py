"""The policy learner: one call, one optimiser update, with the gradient of the whole minibatch.

Every denominator is global and known before the first backward (`algos.aggregate.weights` runs on the whole minibatch),
so micro-batch size, packing and the number of ranks never change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from novarl.algos import aggregate, kl, off_policy
from novarl.core.types import Batch, Credit, Record, Scores
from novarl.distributed.ranks import Ranks
from novarl.learn.ledger import Ledger
from novarl.learn.optim import Optimizer, OptimSettings
from novarl.learn.plan import piece, plan, trajectory_of_tokens
from novarl.learn.scorer import Scorer

Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Mapping[str, Tensor]]]
"""(logp, old_logp, advantage, mask), each [N] -> (per-token loss to be minimised [N], per-token statistics)."""

KL_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


@dataclass(frozen=True, slots=True)
class Objective:
    """What an update minimises: surrogate, correction, regularizers and aggregation.

    loss = sum_t w_t * (c_t * surrogate_t + kl_coef * KL_t - entropy_coef * H_t), with w from the aggregation and c the
    truncated importance weight min(pi_old / mu, correction_max) where a correction is on.
    """

    surrogate: Surrogate
    aggregation: str
    constant: float
    kl_loss_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    correction_max: float | None = None


def token_losses(
    objective: Objective, part: Batch, logp: Tensor, entropy: Tensor, *, scores: Scores, advantage: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Per-token losses by name (`policy`; `kl` and `entropy` where they are on), and per-token statistics, each [N].

    Without recorded `old_logp` the data is on-policy: the old policy is the current one, its ratio 1, its gradient the
    policy gradient.
    """
    old = logp.detach() if scores.old_logp is None else scores.old_logp
    surrogate, stats = objective.surrogate(logp, old, advantage, part.mask)
    if objective.correction_max is not None:
        weight = off_policy.truncated_weight(old, part.behavior_logp, part.mask, maximum=objective.correction_max)
        surrogate = surrogate * weight
        stats = {**stats, "correction": weight}
    losses = {"policy": surrogate}
    if objective.kl_loss_coef and scores.ref_logp is not None:
        losses["kl"] = KL_ESTIMATORS[objective.kl_estimator](logp, scores.ref_logp)
    if objective.entropy_coef:
        losses["entropy"] = entropy
    return losses, {**stats, "ratio": (logp.detach() - old).exp()}


class PolicyLearner:
    """Updates a policy from credit. Implements `core.types.Learner`."""

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        *,
        objective: Objective,
        optim: OptimSettings,
        ranks: Ranks,
        budget: int,
        reference: Scorer | None = None,
        needs_old_logp: bool = False,
    ) -> None:
        self.model, self.scorer, self.reference = model, scorer, reference
        self.objective, self.ranks, self.budget = objective, ranks, budget
        self.needs_old_logp = needs_old_logp
        self.optimizer = Optimizer(model, optim)

    def score(self, batch: Batch) -> Scores:
        """What the update needs to know of the batch before the weights move."""
        old = self.scorer.logprobs(batch, self.ranks, self.budget) if self.needs_old_logp else None
        reference = self.reference.logprobs(batch, self.ranks, self.budget) if self.reference is not None else None
        return Scores(old_logp=old, ref_logp=reference)

    def update(self, batch: Batch, scores: Scores, credit: Credit) -> Record:
        """One optimiser update on the whole minibatch; the Record is the same on every rank."""
        ledger = Ledger()
        micro = plan(batch, self.ranks, self.budget)
        weight = aggregate.weights(
            batch.mask,
            trajectory_of_tokens(batch),
            how=self.objective.aggregation,
            constant=self.objective.constant,
            trajectories=int((~batch.baseline).sum()),
            dtype=batch.reward.dtype,
        )
        before: Tensor | None = None
        for number, trajectories in enumerate(micro):
            part, index = piece(batch, trajectories, self.scorer.device)
            logp = self._backward(part, index, weight=weight, scores=scores, credit=credit, ledger=ledger)
            before = logp if number == 0 else before
        self.ranks.sum_(*self.optimizer.gradients())
        norm, rate = self.optimizer.step()
        if before is not None:
            self._measure_move(batch, micro[0], before, ledger)
        record = ledger.reduce(self.ranks)
        record |= {"grad_norm": norm, "lr": rate, "kl_coef": self.objective.kl_loss_coef}
        return record

    def _backward(
        self, part: Batch, index: Tensor, *, weight: Tensor, scores: Scores, credit: Credit, ledger: Ledger
    ) -> Tensor:
        """Add one micro-batch's gradient; returns its log-probabilities before the update."""
        device = self.scorer.device

        def local(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[index].to(device)

        weight, advantage = weight[index].to(device), credit.advantage[index].to(device)
        logp, entropy = self.scorer(part)
        here = Scores(old_logp=local(scores.old_logp), ref_logp=local(scores.ref_logp))
        losses, stats = token_losses(self.objective, part, logp, entropy, scores=here, advantage=advantage)
        sums = {name: (loss * weight).sum() for name, loss in losses.items()}
        coefficients = {"policy": 1.0, "kl": self.objective.kl_loss_coef, "entropy": -self.objective.entropy_coef}
        total = torch.stack([coefficients[name] * value for name, value in sums.items()]).sum()
        total.backward()
        self._report(part, ledger, logp=logp.detach(), entropy=entropy.detach(), sums=sums, stats=stats, scores=here)
        ledger.sum("total_loss", total)
        ledger.sum("policy_objective", (stats["ratio"] * advantage * weight).sum())
        return logp.detach()

    def _report(
        self,
        part: Batch,
        ledger: Ledger,
        *,
        logp: Tensor,
        entropy: Tensor,
        sums: Mapping[str, Tensor],
        stats: Mapping[str, Tensor],
        scores: Scores,
    ) -> None:
        mask = part.mask
        ledger.sum("policy_loss", sums["policy"])
        ledger.mean("entropy", entropy[mask])
        for name, values in stats.items():
            ledger.mean(name if name.endswith("fraction") else f"{name}_mean", values[mask].double())
        ledger.max("ratio_max", stats["ratio"][mask])
        old = logp if scores.old_logp is None else scores.old_logp
        difference = (old - part.behavior_logp)[mask].abs()
        ledger.mean("mismatch_mean", difference)
        ledger.max("mismatch_max", difference)
        if scores.ref_logp is not None:
            ledger.moments("kl", KL_ESTIMATORS["k3"](logp, scores.ref_logp)[mask])
            ledger.mean("kl_to_ref", KL_ESTIMATORS["k1"](logp, scores.ref_logp)[mask])
        kl_loss = sums.get("kl", torch.zeros(()))
        ledger.sum("kl_loss", kl_loss)
        ledger.sum("kl_penalty", self.objective.kl_loss_coef * kl_loss)

    @torch.no_grad()
    def _measure_move(self, batch: Batch, trajectories: list[int], before: Tensor, ledger: Ledger) -> None:
        """KL(before || after) per token, k3 on each rank's first micro-batch; after the step, never clamped."""
        part, _ = piece(batch, trajectories, self.scorer.device)
        after, _ = self.scorer(part)
        moved = KL_ESTIMATORS["k3"](before, after)[part.mask]
        ledger.mean("kl", moved)
        if self.reference is None:  # the nearest thing to a reference is the policy before the update
            ledger.moments("kl", moved)
            ledger.mean("kl_to_ref", KL_ESTIMATORS["k1"](after, before)[part.mask])

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
