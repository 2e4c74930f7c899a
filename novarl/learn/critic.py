"""The critic: a model of the expected return, trained alongside the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from novarl.algos.values import explained_variance, value_loss
from novarl.core.types import Batch, Credit, Record, Scored, Scores
from novarl.data.pack import minibatches, select
from novarl.distributed.ranks import Ranks
from novarl.distributed.shard import sharding_of
from novarl.learn.accumulate import Accumulator
from novarl.learn.fitting import Splits, fitting, joined
from novarl.learn.ledger import Ledger
from novarl.learn.optim import OptimSettings, put_weights, weights_of
from novarl.learn.plan import piece, plan, trajectory_of_tokens
from novarl.learn.supplier import Supplier
from novarl.models.forward import Layout, shares
from novarl.models.heads import ValueModel, token_values


@dataclass(frozen=True, slots=True)
class HeadReader:
    """A model with a scalar head, and how it runs; the counterpart of `Scorer` for such models."""

    model: ValueModel
    layout: Layout = "auto"
    compute_dtype: torch.dtype = torch.float32
    splits: Splits = field(default_factory=Splits, compare=False)
    """Split counts of the passes here and in the learner."""

    @property
    def device(self) -> torch.device:
        return self.model.head.weight.device

    @property
    def shares(self) -> bool:
        """Whether shared prefixes are computed once."""
        return shares(self.model.model, self.layout)

    def read(self, batch: Batch, positions: Tensor) -> Tensor:
        """The scalars [M] at the flat `positions` [M]."""
        return token_values(
            self.model, batch, positions=positions, layout=self.layout, compute_dtype=self.compute_dtype
        )


class ValueScorer(HeadReader):
    """Computes values of a batch."""

    __slots__ = ()

    def __call__(self, batch: Batch, positions: Tensor) -> Tensor:
        """V [M] of the states at the flat `positions` [M]."""
        return self.read(batch, positions)

    @torch.no_grad()
    def values(self, batch: Batch, ranks: Ranks, budget: int, *, bootstrap: bool) -> tuple[Tensor, Tensor]:
        """(V before each trained token [N], 0 elsewhere; V after each trajectory's last token [R], 0 unless `bootstrap`
        and the trajectory was truncated by a limit), on the CPU, the same on every rank."""
        before = torch.zeros_like(batch.behavior_logp)
        after = torch.zeros_like(batch.reward)

        def attempt(micro: Iterator[list[int]]) -> None:
            for trajectories in micro:
                part, index = piece(batch, trajectories, self.device)
                chosen = part.mask.nonzero().flatten()
                cut = part.truncated if bootstrap else torch.zeros_like(part.truncated)
                owner = trajectory_of_tokens(part)
                last = torch.zeros_like(part.group).scatter_reduce(
                    0, owner, torch.arange(owner.numel(), device=owner.device), "amax", include_self=False
                )
                found = self(part, torch.cat([part.prev[chosen], last])).to(before)
                before[index[chosen.cpu()]] = found[: chosen.numel()]
                after[torch.tensor(trajectories)] = found[chosen.numel() :] * cut.cpu()

        micro = plan(batch, ranks, budget, shares=self.shares)
        fitting(micro, attempt, self.splits, sharding=sharding_of(self.model))
        ranks.sum_(before)
        ranks.sum_(after)
        return before, after


class Critic:
    """A separate value model with its own optimiser; a supplier of values.

    `passes`: the number of critic updates per policy minibatch. `clip`: see `value_loss`. `bootstrap`: use the value at
    the end of a truncated trajectory; otherwise the limit is part of the task.
    """

    def __init__(
        self,
        scorer: ValueScorer,
        *,
        optim: OptimSettings,
        ranks: Ranks,
        budget: int,
        passes: int = 1,
        clip: float | None = None,
        bootstrap: bool = False,
    ) -> None:
        self.scorer, self.ranks, self.budget = scorer, ranks, budget
        self.passes, self.clip, self.bootstrap = passes, clip, bootstrap
        self.accumulator = Accumulator(scorer.model, scorer, optim=optim, ranks=ranks, budget=budget)
        self.optimizer = self.accumulator.optimizer

    def supply(self, kept: Sequence[Scored], batch: Batch, scores: Scores, step: int) -> tuple[Scores, Record]:
        """The scores with values."""
        values, bootstrap = self.scorer.values(batch, self.ranks, self.budget, bootstrap=self.bootstrap)
        return replace(scores, values=values, bootstrap=bootstrap), {}

    def learn(self, batch: Batch, scores: Scores, credit: Credit) -> Record:
        """Make `passes` updates towards the returns on disjoint parts of the minibatch. Returns the last Record."""
        assert scores.values is not None and credit.returns is not None
        record = {
            "explained_variance": explained_variance(scores.values, credit.returns, batch.mask).item(),
            "value_mean": scores.values[batch.mask].mean().item(),
            "return_mean": credit.returns[batch.mask].mean().item(),
        }
        for trajectories in minibatches(batch.group.tolist(), self.passes, seed=self.optimizer.update):
            part, index = select(batch, trajectories)
            record = joined(record, self._update(part, scores.values[index], credit.returns[index]))
        return record

    def _update(self, batch: Batch, old: Tensor, returns: Tensor) -> Record:
        count = max(1, int(batch.mask.sum()))

        def backward(part: Batch, index: Tensor, ledger: Ledger) -> None:
            self._backward(part, old[index], returns[index], count, ledger)

        return self.accumulator.update(batch, backward, prefix="critic_")

    def _backward(self, part: Batch, old: Tensor, returns: Tensor, count: int, ledger: Ledger) -> None:
        """Add one micro-batch's gradient."""
        chosen = part.mask.nonzero().flatten()
        here = chosen.cpu()
        values = self.scorer(part, part.prev[chosen])
        everywhere = torch.ones_like(chosen, dtype=torch.bool)
        losses, stats = value_loss(values, old[here].to(values), returns[here].to(values), everywhere, clip=self.clip)
        (losses.sum() / count).backward()
        ledger.mean("value_loss", losses)
        ledger.mean("value_clip_fraction", stats["value_clip_fraction"].double())

    def state_dict(self) -> dict[str, Any]:
        return {"model": weights_of(self.scorer.model), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        put_weights(self.scorer.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class SharedCritic(Supplier):
    """A value head on the policy's trunk, trained by `PolicyLearner`, whose state has it; a supplier of values."""

    def __init__(self, scorer: ValueScorer, *, bootstrap: bool, ranks: Ranks, budget: int) -> None:
        self.scorer, self.bootstrap, self.ranks, self.budget = scorer, bootstrap, ranks, budget

    def supply(self, kept: Sequence[Scored], batch: Batch, scores: Scores, step: int) -> tuple[Scores, Record]:
        """The scores with values."""
        values, bootstrap = self.scorer.values(batch, self.ranks, self.budget, bootstrap=self.bootstrap)
        return replace(scores, values=values, bootstrap=bootstrap), {}

    def learn(self, batch: Batch, scores: Scores, credit: Credit) -> Record:
        """Only report metrics: the policy learner has trained the head."""
        assert scores.values is not None and credit.returns is not None
        return {
            "explained_variance": explained_variance(scores.values, credit.returns, batch.mask).item(),
            "return_mean": credit.returns[batch.mask].mean().item(),
        }
