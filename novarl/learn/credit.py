"""Compute advantages from rewards: the first of an algorithm's five axes, identical on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from novarl.algos import advantages
from novarl.algos.named import COMPARING, OFF_POLICY, TEMPORAL
from novarl.algos.surrogates import gpg_alpha
from novarl.core.errors import NovaError
from novarl.core.types import Batch, Credit, Record, Scores
from novarl.learn.objective import kl_per_token
from novarl.learn.plan import per_trajectory, trajectory_of_tokens


@dataclass(frozen=True, slots=True)
class CreditRule:
    """How rewards become advantages.

    `estimator`: the name of a function in `algos.advantages`. Trajectory estimators compare a reward with its group
    ("group", "leave_one_out", "reinforce_pp", "opo"), the batch ("mean"), a moving average ("ema"), a number
    ("constant"), the greedy answer ("scst") or nothing ("none"). TEMPORAL ones use the values in the Scores, "prime"
    the token rewards. `own` (rewards [S], group [S] -> advantage [S]) is a user-defined replacement. `options` are
    keywords of the estimator. `kl_type` "reward" subtracts beta * KL_t from the reward of each token, "advantage" from
    its advantage; `kl_clamp` is the maximum k3 of a token. `gpg` multiplies the advantages of a rollout by
    `surrogates.gpg_alpha`, which compensates for groups of equal rewards, unless the estimator gives them a gradient.
    """

    estimator: str
    norm_std: bool = False
    ema_beta: float = 0.9
    constant: float = 0.0
    whiten: bool = False
    kl_type: str | None = None
    kl_estimator: str = "k1"
    kl_clamp: float | None = None
    kl_coef: float = 0.0
    gpg: bool = False
    options: tuple[tuple[str, Any], ...] = ()
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
        """(credit, metrics, the new moving average of rewards).

        `reward` [R] replaces the batch's rewards if several objectives are combined, `kl_coef` the rule's own if a
        controller adapts it.
        """
        reward = batch.reward if reward is None else reward
        record: Record = {}
        penalty = torch.zeros_like(batch.behavior_logp)
        if self.kl_type in ("reward", "advantage"):
            coef = self.kl_coef if kl_coef is None else kl_coef
            penalty = coef * self._kl(scores) * batch.mask
            record |= {"kl_penalty": penalty[batch.mask].mean().item(), "kl_coef": coef}
        in_reward = penalty if self.kl_type == "reward" else torch.zeros_like(penalty)
        returns: Tensor | None = None
        if self.estimator in TEMPORAL:
            advantage, returns = self._temporal(batch, scores, reward, in_reward)
        elif self.estimator == "prime":
            advantage = self._prime(batch, scores, reward - per_trajectory(batch, in_reward.to(reward.dtype)))
        else:
            reward = reward - per_trajectory(batch, in_reward.to(reward.dtype))
            of_answer, ema = self._baseline(batch, reward, ema)
            if self.gpg:
                alpha = self._gpg_alpha(batch, reward)
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

    def _baseline(self, batch: Batch, reward: Tensor, ema: float | None) -> tuple[Tensor, float | None]:
        """The advantage of each trajectory [R], 0 for baseline rollouts."""
        trained = ~batch.baseline
        result = torch.zeros_like(reward)
        own, groups = reward[trained], batch.group[trained]
        if self.own is not None:
            result[trained] = self.own(own, groups)
        elif self.estimator == "group":
            result[trained] = advantages.group(own, groups, norm_std=self.norm_std)
        elif self.estimator == "leave_one_out":
            result[trained] = advantages.leave_one_out(own, groups)
        elif self.estimator == "reinforce_pp":
            result[trained] = advantages.reinforce_pp(own, groups)
        elif self.estimator == "opo":
            lengths = torch.bincount(trajectory_of_tokens(batch)[batch.mask], minlength=len(reward))
            result[trained] = advantages.opo(own, groups, lengths=lengths[trained])
        elif self.estimator == "mean":
            result[trained] = advantages.batch(own, groups)
        elif self.estimator == "ema":
            result[trained], ema = advantages.ema_baseline(own, ema, beta=self.ema_beta)
        elif self.estimator == "scst":
            result[trained] = advantages.scst(own, self._greedy(batch, reward)[trained])
        elif self.estimator in ("none", "constant"):
            result[trained] = advantages.constant_baseline(own, self.constant)
        else:
            raise NovaError(f"unknown estimator {self.estimator!r}", where="adv.estimator")
        return result, ema

    def _gpg_alpha(self, batch: Batch, reward: Tensor) -> Tensor:
        """B / (B - M) over the trained groups, 0-d."""
        if self.estimator not in COMPARING:
            return reward.new_ones(())
        return gpg_alpha(reward[~batch.baseline], batch.group[~batch.baseline])

    def _temporal(self, batch: Batch, scores: Scores, reward: Tensor, penalty: Tensor) -> tuple[Tensor, Tensor]:
        """(advantage [N], returns [N]) of a temporal estimator, over the trained tokens of each trajectory."""
        rows = Rows.of(batch)
        values = rows.spread(scores.values if scores.values is not None else torch.zeros_like(penalty))
        per_token = rows.spread(-penalty if scores.token_reward is None else scores.token_reward - penalty)
        per_token = per_token + rows.last * reward[:, None]
        known: dict[str, Any] = {
            "rewards": per_token,
            "values": values,
            "mask": rows.mask,
            "bootstrap": scores.bootstrap if scores.bootstrap is not None else torch.zeros_like(reward),
            **dict(self.options),
        }
        if self.estimator in OFF_POLICY:
            assert scores.old_logp is not None
            known |= {"logp": rows.spread(scores.old_logp), "behavior_logp": rows.spread(batch.behavior_logp)}
        if scores.segment is not None:
            advantage, returns = advantages.segment_gae(segment=rows.spread(scores.segment), **known)
        else:
            advantage, returns = getattr(advantages, self.estimator)(**known)
        if self.estimator == "retrace":
            # Retrace returns estimate Q of the chosen token, and a state critic fitted to them would learn the mean of
            # Q under the sampler. Use the V-trace target for V; on-policy both are equal.
            _, returns = advantages.vtrace(**known)
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
            process[trained], rows.mask[trained], reward[trained], batch.group[trained], **dict(self.options)
        )
        return rows.flat(advantage)

    @staticmethod
    def _greedy(batch: Batch, reward: Tensor) -> Tensor:
        """The reward of the greedy rollout of each trajectory's group."""
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
