"""Credit from rewards: the first of an algorithm's five axes, on whole trajectories and identical on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from novarl.algos import advantages, kl
from novarl.core.errors import NovaError
from novarl.core.types import Batch, Credit, Record, Scores
from novarl.learn.plan import trajectory_of_tokens


@dataclass(frozen=True, slots=True)
class CreditRule:
    """How rewards become advantages.

    `estimator`: "group" and "leave_one_out" compare a trajectory with its group; "none", "mean", "ema" and "scst" are
    REINFORCE's baselines. `kl_type` "reward" subtracts beta * sum_t KL_t from the trajectory's reward before the
    baseline, "advantage" subtracts beta * KL_t from each token's advantage.
    """

    estimator: str
    norm_std: bool = False
    ema_beta: float = 0.9
    whiten: bool = False
    kl_type: str | None = None
    kl_estimator: str = "k1"
    kl_coef: float = 0.0

    def __call__(self, batch: Batch, scores: Scores, ema: float | None) -> tuple[Credit, Record, float | None]:
        """(credit, what there is to report, the new moving average of rewards)."""
        owner = trajectory_of_tokens(batch)
        reward = batch.reward.clone()
        record: Record = {}
        penalty: Tensor | None = None
        if self.kl_type in ("reward", "advantage"):
            penalty = self._penalty(batch, scores)
            record |= {"kl_penalty": penalty[batch.mask].mean().item(), "kl_coef": self.kl_coef}
        if penalty is not None and self.kl_type == "reward":
            reward = reward - torch.zeros_like(reward).index_add(0, owner, penalty.to(reward.dtype))
        per_trajectory, ema = self._baseline(batch, reward, ema)
        advantage = per_trajectory[owner] * batch.mask
        if penalty is not None and self.kl_type == "advantage":
            advantage = advantage - penalty
        if self.whiten:
            advantage = advantages.whiten(advantage, batch.mask)
        chosen = advantage[batch.mask].double()
        record |= {"advantage_mean": chosen.mean().item(), "advantage_std": chosen.std(unbiased=False).item()}
        return Credit(advantage=advantage), record, ema

    def _penalty(self, batch: Batch, scores: Scores) -> Tensor:
        """beta * KL_t, 0 outside the mask."""
        if scores.old_logp is None or scores.ref_logp is None:
            raise NovaError(
                "a KL penalty needs a reference", where="kl", fix="set kl.type=null or kl.coef > 0 with a reference"
            )
        estimator = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}[self.kl_estimator]
        return self.kl_coef * estimator(scores.old_logp, scores.ref_logp) * batch.mask

    def _baseline(self, batch: Batch, reward: Tensor, ema: float | None) -> tuple[Tensor, float | None]:
        trained = ~batch.baseline
        result = torch.zeros_like(reward)
        own, groups = reward[trained], batch.group[trained]
        if self.estimator == "group":
            result[trained] = advantages.group(own, groups, norm_std=self.norm_std)
        elif self.estimator == "leave_one_out":
            result[trained] = advantages.leave_one_out(own, groups)
        elif self.estimator == "mean":
            result[trained] = advantages.batch_mean(own)
        elif self.estimator == "ema":
            result[trained], ema = advantages.ema_baseline(own, ema, beta=self.ema_beta)
        elif self.estimator == "scst":
            result[trained] = advantages.scst(own, self._greedy(batch, reward)[trained])
        elif self.estimator == "none":
            result[trained] = own
        else:
            raise NovaError(f"unknown estimator {self.estimator!r}", where="adv.estimator")
        return result, ema

    @staticmethod
    def _greedy(batch: Batch, reward: Tensor) -> Tensor:
        """The reward of each trajectory's greedy twin, matched by group."""
        _, compact = batch.group.unique(return_inverse=True)
        twin = torch.full((int(compact.max()) + 1,), float("nan"), dtype=reward.dtype)
        twin[compact[batch.baseline]] = reward[batch.baseline]
        return twin[compact]
