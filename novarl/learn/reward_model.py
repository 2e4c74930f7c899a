"""Train reward models on pairs or labelled answers, with a scalar head or as the log-ratio of a language model.

The losses of `novarl rm loss=`:

    bt             pairs              head       Bradley and Terry
    bce            labelled answers   head       cross-entropy of the label
    implicit_dpo   pairs              log-ratio  Bradley and Terry
    implicit_ce    labelled answers   log-ratio  cross-entropy of the label
    implicit_kto   labelled answers   log-ratio  `learn.preference.KTOLearner`, on rows of `unpaired`
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from novarl.algos import implicit_prm, reward_modeling
from novarl.core.types import Batch
from novarl.distributed.ranks import Ranks
from novarl.learn.accumulate import Scoring
from novarl.learn.critic import HeadReader
from novarl.learn.fitting import Splits
from novarl.learn.optim import OptimSettings
from novarl.learn.plan import piece, plan
from novarl.learn.preference import answer_sums, check_reference, pair_metrics, sequences_apart
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import OfflineLearner
from novarl.models.heads import RewardOutput, last_positions

PAIRED = frozenset({"bt", "implicit_dpo"})
"""Losses on pairs."""
LABELLED = frozenset({"bce", "implicit_ce"})
"""Losses on labelled answers."""


class RewardScorer(Scoring, Protocol):
    """The rewards of a batch's sequences, differentiable."""

    def __call__(self, batch: Batch) -> RewardOutput: ...


class HeadScorer(HeadReader):
    """The scalar at the last token of each sequence."""

    __slots__ = ()

    def __call__(self, batch: Batch) -> RewardOutput:
        return RewardOutput(self.read(batch, last_positions(batch)))


@dataclass(frozen=True, slots=True)
class RatioScorer:
    """beta (log phi(y | x) - log ref(y | x)), token by token (https://arxiv.org/abs/2412.01981). Raises ValueError if
    the reference is not recorded (`learn.preference.with_reference`). Without a `reference`: beta times the mean
    log-probability of an answer's tokens."""

    scorer: Scorer
    beta: float
    reference: bool = True

    @property
    def device(self) -> torch.device:
        return self.scorer.device

    @property
    def shares(self) -> bool:
        return self.scorer.shares

    @property
    def splits(self) -> Splits:
        return self.scorer.splits

    def __call__(self, batch: Batch) -> RewardOutput:
        if not self.reference:
            logp = self.beta * self.scorer(batch)[0]
            return RewardOutput(answer_sums(batch, logp) / answer_sums(batch, batch.mask.to(logp.dtype)))
        check_reference(batch)
        logp, _ = self.scorer(batch)
        token = implicit_prm.token_rewards(logp, batch.behavior_logp, batch.mask, beta=self.beta)
        return RewardOutput(answer_sums(batch, token), token)


class RewardModelLearner(OfflineLearner):
    """Updates a reward model: `bt` or `implicit_dpo` on batches of `pack_pairs`, whose reward is the margin; `bce` or
    `implicit_ce` on those of `pack_labelled`, whose reward is the label."""

    def __init__(
        self,
        model: nn.Module,
        scorer: RewardScorer,
        *,
        loss: str,
        optim: OptimSettings,
        ranks: Ranks,
        budget: int,
        centring: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(model, scorer, optim=optim, ranks=ranks, budget=budget)
        if loss not in PAIRED | LABELLED:
            raise ValueError(f"unknown reward-model loss '{loss}'")
        if isinstance(scorer, RatioScorer) != loss.startswith("implicit"):
            raise ValueError(f"{loss} is not a loss for {type(scorer).__name__}")
        if centring and loss in LABELLED:
            raise ValueError(f"{loss} does not support centring: its labels fix the level of rewards")
        self.scorer, self.paired = scorer, loss in PAIRED
        self.centring, self.label_smoothing = centring, label_smoothing

    def losses(self, part: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        rewards = self.scorer(part).sequence
        smoothing = self.label_smoothing
        if self.paired:
            chosen, rejected = rewards[0::2], rewards[1::2]
            losses = reward_modeling.bt(
                chosen, rejected, margin=part.reward, centring=self.centring, label_smoothing=smoothing
            )
            return losses, pair_metrics(chosen.detach(), rejected.detach())
        losses = reward_modeling.bce(rewards, part.reward, label_smoothing=smoothing)
        found, good = rewards.detach(), part.reward > 0.5
        return losses, {
            "label_accuracy": torch.where(good, found > 0, found < 0).to(found.dtype),
            "reward_chosen_mean": found[good],
            "reward_rejected_mean": found[~good],
        }


@torch.no_grad()
def rewards_of(scorer: RewardScorer, batch: Batch, ranks: Ranks, budget: int) -> Tensor:
    """The rewards [S] of a batch's sequences, on the CPU, the same on every rank, computed in parallel; 0 for a
    sequence without trained tokens. `rewards[0::2]` and `rewards[1::2]` are those of pairs."""
    each = sequences_apart(batch)
    whole = torch.zeros(each.reward.shape, dtype=each.reward.dtype)
    for trajectories in plan(each, ranks, budget, shares=scorer.shares):
        part, _ = piece(each, trajectories, scorer.device)
        whole[trajectories] = scorer(part).sequence.to(whole)
    ranks.sum_(whole)
    return whole
