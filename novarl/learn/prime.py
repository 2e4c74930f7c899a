"""PRIME's process rewards (https://arxiv.org/abs/2502.01456): per-token rewards learned from outcomes only.

The reward model is a language model phi with token rewards r_t = beta (log phi - log ref); their sum over an answer is
trained with cross-entropy to predict whether the answer is right. It is initialised as the reference, or is a trained
reward model with its own reference; if all its weights are frozen, it only provides rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from novarl.algos.implicit_prm import token_rewards
from novarl.algos.reward_modeling import implicit_ce
from novarl.core.types import Batch, Credit, Record, Scored, Scores
from novarl.distributed.ranks import Ranks
from novarl.learn.accumulate import Accumulator
from novarl.learn.fitting import SPLIT
from novarl.learn.ledger import Ledger
from novarl.learn.optim import OptimSettings, put_weights, weights_of
from novarl.learn.plan import per_trajectory
from novarl.learn.scorer import Scorer


class ProcessRewards:
    """A supplier of token rewards: one update on a rollout's outcomes, then rewards from the updated model. `beta`
    scales the rewards; an outcome is right from `threshold` on. `reference`: that of phi, if it is not that of the
    policy."""

    def __init__(
        self,
        scorer: Scorer,
        *,
        beta: float,
        threshold: float,
        optim: OptimSettings,
        ranks: Ranks,
        budget: int,
        reference: Scorer | None = None,
    ) -> None:
        self.scorer, self.ranks, self.budget, self.reference = scorer, ranks, budget, reference
        self.beta, self.threshold = beta, threshold
        learns = any(parameter.requires_grad for parameter in scorer.model.parameters())
        self.accumulator = (
            Accumulator(scorer.model, scorer, optim=optim, ranks=ranks, budget=budget) if learns else None
        )
        self.optimizer = self.accumulator.optimizer if self.accumulator else None
        self._split: Record = {}

    def supply(self, kept: Sequence[Scored], batch: Batch, scores: Scores, step: int) -> tuple[Scores, Record]:
        """The scores with a reward for each trained token."""
        assert scores.ref_logp is not None
        ref_logp = scores.ref_logp
        if self.reference is not None:
            ref_logp = self.reference.logprobs(batch, self.ranks, self.budget).to(ref_logp)
        record = {} if self.accumulator is None else self._update(batch, ref_logp, self.accumulator)
        self._split = {SPLIT: record.pop(SPLIT)} if SPLIT in record else {}
        logp = self.scorer.logprobs(batch, self.ranks, self.budget).to(ref_logp)
        rewards = token_rewards(logp, ref_logp, batch.mask, beta=self.beta)
        record["process_reward_mean"] = rewards[batch.mask].double().mean().item()
        record["process_reward_std"] = rewards[batch.mask].double().std(unbiased=False).item()
        return replace(scores, token_reward=rewards.to(batch.behavior_logp)), record

    def _update(self, batch: Batch, ref_logp: Tensor, accumulator: Accumulator) -> Record:
        """One update of cross-entropy on the outcomes, the mean over all trained trajectories."""
        count = max(1, int((~batch.baseline).sum()))

        def backward(part: Batch, index: Tensor, ledger: Ledger) -> None:
            self._backward(part, ref_logp[index], count, ledger)

        record = accumulator.update(batch, backward, prefix="process_")
        del record["process_lr"]
        return record

    def _backward(self, part: Batch, reference: Tensor, count: int, ledger: Ledger) -> None:
        """Add one micro-batch's gradient."""
        logp, _ = self.scorer(part)
        reference, trained = reference.to(logp), ~part.baseline
        gain = per_trajectory(part, logp - reference)
        label = (part.reward >= self.threshold).to(logp.dtype)
        losses = implicit_ce(gain, torch.zeros_like(gain), label, beta=self.beta)[trained]
        (losses.sum() / count).backward()
        right = ((gain > 0) == label.bool())[trained]
        ledger.mean("process_loss", losses)
        ledger.mean("process_accuracy", right.double())

    def learn(self, batch: Batch, scores: Scores, credit: Credit) -> Record:
        """Only report the split micro-batches of `supply`, with the first minibatch."""
        split, self._split = self._split, {}
        return split

    def state_dict(self) -> dict[str, Any]:
        if self.optimizer is None:
            return {}
        return {"model": weights_of(self.scorer.model), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.optimizer is None:
            return
        put_weights(self.scorer.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
