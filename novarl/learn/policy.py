"""The policy learner: one optimiser update per call, with the gradient of the whole minibatch.

Every denominator is global and known before the first backward (`algos.aggregate.weights` runs on the whole minibatch),
so micro-batch size, packing and the number of ranks never change the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from novarl.algos import aggregate, off_policy
from novarl.algos.values import value_loss
from novarl.core.errors import NotFinite
from novarl.core.types import Batch, Credit, Record, Scores
from novarl.distributed.ranks import Ranks
from novarl.distributed.shard import full
from novarl.learn.accumulate import Accumulator
from novarl.learn.guard import StepGuard
from novarl.learn.ledger import Ledger
from novarl.learn.objective import KL_ESTIMATORS, Objective
from novarl.learn.optim import OptimSettings, put_weights, weights_of
from novarl.learn.origin import find_origin
from novarl.learn.plan import per_trajectory, piece, trajectory_of_tokens
from novarl.learn.scorer import Scorer
from novarl.models.forward import predicted

PROBE_SHARE, PROBE_LEAST, PROBE_MOST = 1 / 32, 64, 256
"""The fraction of a minibatch's trained tokens on which the size of an update is measured (about 1 % of the training
cost), and its minimum and maximum. A guard measures all tokens."""


@dataclass(frozen=True, slots=True)
class SharedValue:
    """A value head [D] -> 1 on the policy's trunk, trained with it: loss + coef * value loss."""

    head: nn.Module
    coef: float
    clip: float | None


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
        reference_decay: float | None = None,
        needs_old_logp: bool = False,
        value: SharedValue | None = None,
        guard: StepGuard | None = None,
    ) -> None:
        self.model, self.scorer, self.reference = model, scorer, reference
        self.reference_decay = reference_decay
        self.objective, self.ranks, self.budget = objective, ranks, budget
        self.needs_old_logp, self.value, self.guard = needs_old_logp, value, guard
        learnt = model if value is None else nn.ModuleList([model, value.head])
        self.accumulator = Accumulator(learnt, scorer, optim=optim, ranks=ranks, budget=budget)
        self.optimizer = self.accumulator.optimizer

    def score(self, batch: Batch) -> Scores:
        """The log-probabilities that updates need from before the weights change."""
        old = self.scorer.logprobs(batch, self.ranks, self.budget) if self.needs_old_logp else None
        reference = self.reference.logprobs(batch, self.ranks, self.budget) if self.reference is not None else None
        return Scores(old_logp=old, ref_logp=reference)

    def update(
        self, batch: Batch, scores: Scores, credit: Credit, *, measured: dict[str, Tensor] | None = None
    ) -> Record:
        """One optimiser update on the whole minibatch; the Record is the same on every rank.

        `measured` receives what the update computed for each token before the weights changed, [N], 0 outside the mask,
        for the rollout log: `logp` (log-probability), `entropy`, and `loss` (the token's term of the loss; the terms of
        all tokens sum to `total_loss` without a value loss).
        """
        weight = aggregate.weights(
            batch.mask,
            trajectory_of_tokens(batch),
            how=self.objective.aggregation,
            constant=self.objective.constant,
            trajectories=int((~batch.baseline).sum()),
            dtype=batch.reward.dtype,
        )
        before = torch.zeros_like(batch.behavior_logp)
        columns = {"logp": before}
        if measured is not None:
            columns |= {name: torch.zeros_like(before) for name in ("entropy", "loss")}

        def backward(part: Batch, index: Tensor, ledger: Ledger) -> None:
            found = self._backward(part, index, weight=weight, scores=scores, credit=credit, ledger=ledger)
            for name, column in columns.items():
                column[index] = found[name].to(column)

        ledger = self.accumulator.gradient(batch, backward, apart=self._without_gradient(batch, credit.advantage))
        for column in columns.values():
            self.ranks.sum_(column)
        if measured is not None:
            measured |= columns
        old = before if scores.old_logp is None else scores.old_logp
        try:
            record = self._step(batch, old)
        except NotFinite as error:
            inputs = {"the advantage": credit.advantage, "old_logp": scores.old_logp, "ref_logp": scores.ref_logp}
            gradients = dict(zip(self.optimizer.parameters, self.optimizer.gradients(), strict=True))
            error.add(find_origin(self.scorer, batch, inputs, gradients))
            raise
        if scores.old_logp is not None or self.objective.correction is not None:
            weights = self.objective.weight(batch, old)
            record["effective_sample_size"] = off_policy.effective_sample_size(weights, batch.mask).item()
        return ledger.reduce(self.ranks) | record | self._move(batch, before)

    @property
    def _follows_advantage(self) -> bool:
        return self.objective.follows_advantage and self.value is None

    def _without_gradient(self, batch: Batch, advantage: Tensor) -> Tensor | None:
        """The trajectories [R] without a gradient, such as a group of right answers. They need only a forward pass, a
        third of the work. None if the gradient does not depend only on advantages."""
        if not self._follows_advantage:
            return None
        owner = trajectory_of_tokens(batch)
        rests = torch.ones(batch.reward.numel(), dtype=torch.bool)
        rests[owner[batch.mask & (advantage != 0)]] = False
        return rests

    def _backward(
        self, part: Batch, index: Tensor, *, weight: Tensor, scores: Scores, credit: Credit, ledger: Ledger
    ) -> dict[str, Tensor]:
        """Add one micro-batch's gradient; returns `logp`, `entropy` and `loss` of its tokens before the update."""
        device = self.scorer.device

        def local(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[index].to(device)

        weight, advantage = weight[index].to(device), credit.advantage[index].to(device)
        at_rest = self._follows_advantage and not advantage[part.mask].any()
        if self._follows_advantage and self.optimizer.sharding is not None:  # a backward pass is for all ranks or none
            at_rest = not self.optimizer.sharding.any(not at_rest)
        with torch.set_grad_enabled(not at_rest):
            hidden = self.scorer.hidden(part)
            logp, entropy, _ = self.scorer.read(part, hidden)
            here = Scores(old_logp=local(scores.old_logp), ref_logp=local(scores.ref_logp))
            losses, stats = self.objective.losses(part, logp, entropy, scores=here, advantage=advantage)
            terms = {name: loss * weight for name, loss in losses.items()}
            sums = {name: term.sum() for name, term in terms.items()}
            total = torch.stack([self.objective.coefficient(name) * value for name, value in sums.items()]).sum()
            if self.value is not None:
                total = total + self._value(part, hidden, local(scores.values), local(credit.returns), weight, ledger)
        if not at_rest:
            total.backward()
        self._report(part, ledger, logp=logp.detach(), entropy=entropy.detach(), sums=sums, stats=stats, scores=here)
        ledger.sum("total_loss", total)
        ledger.sum("policy_objective", (stats["ratio"] * advantage * weight).sum())
        loss = torch.stack([self.objective.coefficient(name) * term.detach() for name, term in terms.items()]).sum(0)
        return {"logp": logp.detach(), "entropy": entropy.detach(), "loss": loss}

    def _value(
        self, part: Batch, hidden: Tensor, old: Tensor | None, returns: Tensor | None, weight: Tensor, ledger: Ledger
    ) -> Tensor:
        """The value loss on the shared trunk, with the policy's token weights."""
        assert self.value is not None and old is not None and returns is not None
        head = self.value.head
        read = head(hidden.to(next(head.parameters()).dtype)).squeeze(-1)
        values = read.new_zeros(part.mask.shape).index_copy(0, predicted(part, part.mask), read)
        losses, stats = value_loss(values, old, returns, part.mask, clip=self.value.clip)
        ledger.mean("value_loss", losses[part.mask])
        ledger.mean("value_mean", values[part.mask])
        ledger.mean("value_clip_fraction", stats["value_clip_fraction"][part.mask].double())
        return self.value.coef * (losses * weight).sum()

    def _step(self, batch: Batch, old: Tensor) -> Record:
        """Update the weights, with the guard if there is one."""
        if self.guard is None:
            norm, rate = self.optimizer.step()
            guarded: Record = {}
        else:

            def distance() -> float:
                now = self.scorer.logprobs(batch, self.ranks, self.budget)
                return KL_ESTIMATORS["k3"](old, now)[batch.mask].double().mean().item()

            norm, rate, guarded = self.guard.around(self.optimizer, distance)
        coefficients = {"kl_coef": self.objective.kl_loss_coef, "entropy_coef": self.objective.entropy_coef}
        return {"grad_norm": norm, "lr": rate, **coefficients, **guarded}

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
        ledger.count("micro_batches", min(1, part.reward.numel()))
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
            k3 = KL_ESTIMATORS["k3"](logp, scores.ref_logp)
            ledger.moments("kl", k3[mask])
            ledger.mean("kl_to_ref", KL_ESTIMATORS["k1"](logp, scores.ref_logp)[mask])
            ledger.mean("kl_sequence", per_trajectory(part, k3)[~part.baseline])
        kl_loss = sums.get("kl", torch.zeros(()))
        ledger.sum("kl_loss", kl_loss)
        ledger.sum("kl_penalty", self.objective.kl_loss_coef * kl_loss)

    def _move(self, batch: Batch, before: Tensor) -> Record:
        """The size of this update: KL(before || after) per token, with k3, after the step, never clamped. Measured on
        the first trajectories that contain PROBE_SHARE of the minibatch's tokens, within PROBE_LEAST and PROBE_MOST."""
        probe = self._probe(batch)
        part, index = piece(batch, probe, torch.device("cpu"))
        after, mask = self.scorer.logprobs(part, self.ranks, self.budget), part.mask
        if not mask.any():
            return {}
        moved = KL_ESTIMATORS["k3"](before[index], after)[mask].double()
        record = {"kl": moved.mean().item()}
        if self.reference is None:  # use the policy before the update as the reference
            back = KL_ESTIMATORS["k1"](after, before[index])[mask].double().mean().item()
            record |= {"kl_mean": record["kl"], "kl_std": moved.std(unbiased=False).item(), "kl_to_ref": back}
        return record

    @staticmethod
    def _probe(batch: Batch) -> list[int]:
        owner = trajectory_of_tokens(batch)
        chosen = torch.bincount(owner[batch.mask], minlength=batch.reward.numel())
        trained = (chosen > 0).nonzero().flatten()
        wanted = min(max(PROBE_SHARE * int(chosen.sum()), PROBE_LEAST), PROBE_MOST)
        enough = int((chosen[trained].cumsum(0) < wanted).sum()) + 1
        return trained[:enough].tolist()

    @torch.no_grad()
    def end_step(self) -> None:
        """After a rollout's last update: move an EMA reference towards the policy."""
        if self.reference is None or self.reference_decay is None:
            return
        pairs = zip(self.reference.model.parameters(), self.model.parameters(), strict=True)
        for mine, policy in pairs:
            mine.lerp_(full(policy.detach()).to(mine), 1.0 - self.reference_decay)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        for name, module in self._kept().items():
            state[name] = weights_of(module)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        for name, module in self._kept().items():
            put_weights(module, state[name])

    def _kept(self) -> dict[str, nn.Module]:
        """The learner's modules that change and are not part of the policy."""
        kept: dict[str, nn.Module] = {}
        if self.value is not None:
            kept["value_head"] = self.value.head
        if self.reference is not None and self.reference_decay is not None:
            kept["reference"] = self.reference.model
        return kept
