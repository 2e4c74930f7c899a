"""The loss of a policy update: four of an algorithm's five axes, combined per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from novarl.algos import kl, off_policy
from novarl.core.types import Batch, Scores
from novarl.learn.plan import trajectory_of_tokens

KL_ESTIMATORS = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}


def kl_per_token(name: str, logp: Tensor, ref_logp: Tensor, most: float | None) -> Tensor:
    """The per-token estimate [N]; `most` is the maximum of k3, None for no limit."""
    return KL_ESTIMATORS[name](logp, ref_logp) if most is None else kl.k3(logp, ref_logp, most=most)


Surrogate = Callable[..., tuple[Tensor, Mapping[str, Tensor]]]
"""(logp, old_logp, advantage, mask), each [N] -> (per-token loss to be minimised [N], per-token statistics)."""

Correction = Callable[..., Tensor]
"""(old_logp, behavior_logp, mask), each [N] -> the weight of each token [N], without a gradient."""


@dataclass(frozen=True, slots=True)
class Objective:
    """loss = sum_t w_t * (c_t * surrogate_t + kl_loss_coef * KL_t - entropy_coef * H_t)

    with w from the aggregation and c the off-policy correction (1 without one). Functions named in `by_sequence`
    ("surrogate", "correction") also take the keyword `sequence`, the trajectory of each token. `kl_clamp`: the maximum
    k3 of a token. `proportional`: the surrogate's gradient is 0 where the advantage is 0.
    """

    surrogate: Surrogate
    aggregation: str
    constant: float
    kl_loss_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_clamp: float | None = None
    kl_corrected: bool = False
    entropy_coef: float = 0.0
    correction: Correction | None = None
    by_sequence: frozenset[str] = frozenset()
    proportional: bool = False

    @property
    def follows_advantage(self) -> bool:
        """Whether the gradient depends only on advantages, so it is zero without them."""
        return self.proportional and not self.kl_loss_coef and not self.entropy_coef

    def losses(
        self, part: Batch, logp: Tensor, entropy: Tensor, *, scores: Scores, advantage: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Per-token losses by name (`policy`, and `kl` and `entropy` if enabled), and statistics, each [N]. Without
        recorded `old_logp` the data is on-policy: the ratio is 1, and the gradient is the policy gradient."""
        old = logp.detach() if scores.old_logp is None else scores.old_logp
        surrogate, stats = self.surrogate(logp, old, advantage, part.mask, **self._sequence(part, "surrogate"))
        if self.correction is not None:
            weight = self.weight(part, old)
            surrogate = surrogate * weight
            stats = {**stats, "correction": weight}
        losses = {"policy": surrogate}
        if self.kl_loss_coef and scores.ref_logp is not None:
            losses["kl"] = kl_per_token(self.kl_estimator, logp, scores.ref_logp, self.kl_clamp)
            if self.kl_corrected:
                losses["kl"] = kl.corrected(losses["kl"], logp, old)
        if self.entropy_coef:
            losses["entropy"] = entropy
        return losses, {**stats, "ratio": (logp.detach() - old).exp()}

    def weight(self, part: Batch, old_logp: Tensor) -> Tensor:
        """The importance weight pi_old / mu of each token [N]: the correction's weight, or the plain ratio without a
        correction; 0 outside the mask, without gradient."""
        correction = self.correction or partial(off_policy.truncated_weight, maximum=math.inf)
        return correction(old_logp, part.behavior_logp, part.mask, **self._sequence(part, "correction"))

    def coefficient(self, name: str) -> float:
        """The coefficient of a loss of `losses` in the sum."""
        return {"policy": 1.0, "kl": self.kl_loss_coef, "entropy": -self.entropy_coef}[name]

    def _sequence(self, part: Batch, name: str) -> dict[str, Tensor]:
        return {"sequence": trajectory_of_tokens(part)} if name in self.by_sequence else {}
