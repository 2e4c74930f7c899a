"""Compute advantages from rewards: the first of an algorithm's five axes, identical on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from novarl.algos import advantages
from novarl.algos.axes import ESTIMATORS, Estimator, estimator
from novarl.algos.surrogates import gpg_alpha
from novarl.core.errors import NovaError
from novarl.core.types import Batch, Credit, Record, Scores
from novarl.learn.objective import kl_per_token
from novarl.learn.plan import per_trajectory, trajectory_of_tokens


@dataclass(frozen=True, slots=True)
class CreditRule:
    """How rewards become advantages.

    `estimator` is a row of `algos.axes.ESTIMATORS` by name, and `options` are the keywords of its function. `own`
    (rewards [S], group [S] -> advantage [S]) is used instead. `kl_type` "reward" subtracts beta * KL_t from the reward
    of each token, "advantage" from its advantage; `kl_clamp` is the largest k3 of a token. `gpg` multiplies the
    advantages of a rollout by `surrogates.gpg_alpha`, 1 for estimators that give groups of equal rewards a gradient all
    the same.
    """

    estimator: str
    options: Mapping[str, Any] = field(default_factory=dict)
    whiten: bool = False
    kl_type: str | None = None
    kl_estimator: str = "k1"
    kl_clamp: float | None = None
    kl_coef: float = 0.0
    gpg: bool = False
    own: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(
        self,
        batch: Batch,
        scores: Scores,
        ema: float | None,
        *,
        reward: Tensor | None = None,
        kl_coef: float | None = None,
    ) -> tuple[Credit, Record, float | None]:
        """(credit, metrics, the new moving average of rewards). `reward` [R] replaces the batch's rewards if several
        objectives are combined, `kl_coef` the rule's own if a controller adapts it."""
        if self.own is None and self.estimator not in ESTIMATORS:
            raise NovaError(f"unknown estimator {self.estimator!r}", where="adv.estimator")
        row = estimator(self.estimator)
        reward = batch.reward if reward is None else reward
        record: Record = {}
        penalty = torch.zeros_like(batch.behavior_logp)
        if self.kl_type in ("reward", "advantage"):
            coef = self.kl_coef if kl_coef is None else kl_coef
            penalty = coef * self._kl(scores) * batch.mask
            record |= {"kl_penalty": penalty[batch.mask].mean().item(), "kl_coef": coef}
        in_reward = penalty if self.kl_type == "reward" else torch.zeros_like(penalty)
        returns: Tensor | None = None
        if row.temporal:
            advantage, returns = self._temporal(row, batch, scores, reward, in_reward)
        elif "process" in row.needs:
            advantage = self._prime(batch, scores, reward - per_trajectory(batch, in_reward.to(reward.dtype)))
        else:
            reward = reward - per_trajectory(batch, in_reward.to(reward.dtype))
            of_answer, ema = self._baseline(row, batch, reward, ema)
            if self.gpg:
                trained, compared = ~batch.baseline, "group" in row.needs
                alpha = gpg_alpha(reward[trained], batch.group[trained]) if compared else reward.new_ones(())
                of_answer, record["gpg_alpha"] = alpha * of_answer, alpha.item()
            advantage = of_answer[trajectory_of_tokens(batch)] * batch.mask
        if self.kl_type == "advantage":
            advantage = advantage - penalty
        if self.whiten:
            advantage = advantages.whiten(advantage, batch.mask)
        chosen = advantage[batch.mask].double()
        record |= {"advantage_mean": chosen.mean().item(), "advantage_std": chosen.std(unbiased=False).item()}
        return Credit(advantage=advantage, returns=returns), record, ema

    def _kl(self, scores: Scores) -> Tensor:
        """KL_t between the sampling policy and the reference, [N]."""
        if scores.old_logp is None or scores.ref_logp is None:
            raise NovaError(
                "a KL penalty requires a reference", where="kl", fix="set kl.type=null or kl.coef > 0 with a reference"
            )
        return kl_per_token(self.kl_estimator, scores.old_logp, scores.ref_logp, self.kl_clamp)

    def _baseline(self, row: Estimator, batch: Batch, reward: Tensor, ema: float | None) -> tuple[Tensor, float | None]:
        """One advantage for each trajectory [R], 0 for those that only serve as a baseline."""
        trained = ~batch.baseline
        result = torch.zeros_like(reward)
        own, groups = reward[trained], batch.group[trained]
        if self.own is not None:
            result[trained] = self.own(own, groups)
            return result, ema
        inputs: dict[str, Callable[[], Any]] = {
            "group": lambda: groups,
            "lengths": lambda: torch.bincount(trajectory_of_tokens(batch)[batch.mask], minlength=len(reward))[trained],
            "greedy": lambda: _greedy(batch, reward)[trained],
            "ema": lambda: ema,
        }
        found = getattr(advantages, row.function)(own, **{name: inputs[name]() for name in row.takes}, **self.options)
        result[trained], ema = found if "ema" in row.takes else (found, ema)
        return result, ema

    def _temporal(
        self, row: Estimator, batch: Batch, scores: Scores, reward: Tensor, penalty: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(advantage [N], returns [N]) of an estimator over time, on the trained tokens of each trajectory in a row."""
        rows = Rows.of(batch)
        values = rows.spread(scores.values if scores.values is not None else torch.zeros_like(penalty))
        per_token = rows.spread(-penalty if scores.token_reward is None else scores.token_reward - penalty)
        per_token = per_token + rows.last * reward[:, None]
        known: dict[str, Any] = {
            "rewards": per_token,
            "values": values,
            "mask": rows.mask,
            "bootstrap": scores.bootstrap if scores.bootstrap is not None else torch.zeros_like(reward),
            **self.options,
        }
        if "old_logp" in row.needs:
            assert scores.old_logp is not None
            known |= {"logp": rows.spread(scores.old_logp), "behavior_logp": rows.spread(batch.behavior_logp)}
        if scores.segment is not None:
            advantage, returns = advantages.segment_gae(segment=rows.spread(scores.segment), **known)
        else:
            advantage, returns = getattr(advantages, row.function)(**known)
        if row.returns is not None:
            _, returns = getattr(advantages, row.returns)(**known)
        return rows.flat(advantage), rows.flat(returns)

    def _prime(self, batch: Batch, scores: Scores, reward: Tensor) -> Tensor:
        """PRIME's advantage [N], as in the paper: leave-one-out on the outcomes, plus the returns of process rewards
        minus their baseline, the mean over the other answers to the prompt of their mean token reward.

        Baseline rollouts (greedy answers) are not among the K samples and are excluded from both means.
        """
        assert scores.token_reward is not None
        rows, trained = Rows.of(batch), ~batch.baseline
        process = rows.spread(scores.token_reward)
        advantage = torch.zeros_like(process)
        advantage[trained] = advantages.prime(
            process[trained], rows.mask[trained], reward[trained], batch.group[trained], **self.options
        )
        return rows.flat(advantage)


def _greedy(batch: Batch, reward: Tensor) -> Tensor:
    """The reward of each trajectory's greedy twin [R], matched by group."""
    _, compact = batch.group.unique(return_inverse=True)
    twin = torch.full((int(compact.max()) + 1,), float("nan"), dtype=reward.dtype)
    twin[compact[batch.baseline]] = reward[batch.baseline]
    return twin[compact]


@dataclass(frozen=True, slots=True)
class Rows:
    """The trained tokens of each trajectory as right-padded rows [R, T].

    Tokens that the policy did not choose (prompts, environment turns) have no column. `index` [R, T] is the flat
    position, `mask` marks tokens, `last` the last token of each row (which gets the reward).
    """

    index: Tensor
    mask: Tensor
    last: Tensor
    size: int

    @classmethod
    def of(cls, batch: Batch) -> Rows:
        owner = trajectory_of_tokens(batch)
        flat = batch.mask.nonzero().flatten()
        flat = flat[torch.argsort(owner[flat], stable=True)]
        count = torch.bincount(owner[flat], minlength=batch.reward.numel())
        columns = torch.arange(int(count.max()))
        mask = columns[None, :] < count[:, None]
        index = torch.zeros(mask.shape, dtype=torch.int64)
        index[mask] = flat
        return cls(index, mask, mask & (columns[None, :] == count[:, None] - 1), batch.tokens.numel())

    def spread(self, flat: Tensor) -> Tensor:
        """A per-token tensor [N] as [R, T], padded with 0."""
        return torch.where(self.mask, flat[self.index], torch.zeros((), dtype=flat.dtype))

    def flat(self, rows: Tensor) -> Tensor:
        """The inverse: [R, T] as [N], 0 outside the mask."""
        return rows.new_zeros(self.size).index_copy(0, self.index[self.mask], rows[self.mask])
