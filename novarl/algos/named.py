"""The table of algorithms: each is a value on five axes, and no code anywhere asks for its name.

    credit        `estimator`, `norm_std`                      what the reward is compared with      (advantages)
    surrogate     `surrogate`, `clip_low`, `clip_high`         how far the policy may move           (surrogates)
    correction    of the sampler's distribution: a setting of the run, not of the algorithm          (off_policy)
    regularizer   `kl_type`, `kl_estimator`, `kl_coef`, `entropy_coef`                               (kl)
    aggregation   `aggregation`, `constant`                    what is averaged over what            (aggregate)

A run changes single axes with `dataclasses.replace`. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Estimator = Literal["none", "mean", "ema", "scst", "group", "leave_one_out"]
SurrogateName = Literal["reinforce", "ppo_clip"]
KLType = Literal["loss", "reward", "advantage"]
KLEstimator = Literal["k1", "k2", "k3"]
AggregationName = Literal["token", "sequence", "constant"]
Need = Literal["group", "greedy", "reference", "old_logp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: where to read about it, and its place on the five axes.

    `clip_low`, `clip_high` bound pi / pi_old for "ppo_clip" and mean nothing for "reinforce". `constant` is what
    "constant" aggregation divides each trajectory's sum by: 1 ("one") or the run's longest answer ("max_tokens").
    `updates_per_rollout` is into how many optimiser updates one rollout phase goes. `dynamic_sampling` replaces groups
    of equal rewards, which have no gradient, by groups of other prompts.
    """

    name: str
    summary: str
    paper: str
    estimator: Estimator
    norm_std: bool = False
    surrogate: SurrogateName = "reinforce"
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_type: KLType | None = None
    kl_estimator: KLEstimator = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: AggregationName = "constant"
    constant: Literal["one", "max_tokens"] = "one"
    updates_per_rollout: int = 1
    dynamic_sampling: bool = False

    @property
    def needs(self) -> frozenset[Need]:
        """What must be there beside the rollouts and their rewards.

        "group": several samples of each prompt; "greedy": a greedy rollout of each prompt; "reference": log-probs of a
        reference policy; "old_logp": log-probs taken before the first update. Computed, so that it stays true of a row
        of which a run has changed an axis.
        """
        needs: set[Need] = set()
        if self.estimator in ("group", "leave_one_out"):
            needs.add("group")
        if self.estimator == "scst":
            needs.add("greedy")
        if self.kl_type is not None and self.kl_coef > 0:
            needs.add("reference")
            if self.kl_type != "loss":
                needs.add("old_logp")
        if self.updates_per_rollout > 1:
            needs.add("old_logp")
        return frozenset(needs)


_ROWS = (
    Algorithm(
        name="reinforce",
        summary="Reward times the gradient of the log-probability; a baseline (mean, ema, scst) takes out noise.",
        paper="https://doi.org/10.1007/BF00992696",
        estimator="none",
    ),
    Algorithm(
        name="rloo",
        summary="REINFORCE against the mean of the other samples of the same prompt: unbiased.",
        paper="https://arxiv.org/abs/2402.14740",
        estimator="leave_one_out",
    ),
    Algorithm(
        name="grpo",
        summary="Rewards standardised within the group, clipped ratio, mean over sequences, KL to a reference as loss.",
        paper="https://arxiv.org/abs/2402.03300",
        estimator="group",
        norm_std=True,
        surrogate="ppo_clip",
        kl_type="loss",
        kl_coef=0.04,
        aggregation="sequence",
    ),
    Algorithm(
        name="dr_grpo",
        summary="GRPO without its two biases: no division by the deviation, none by the answer's length. The default.",
        paper="https://arxiv.org/abs/2503.20783",
        estimator="group",
        surrogate="ppo_clip",
        constant="max_tokens",
    ),
    Algorithm(
        name="dapo",
        summary="GRPO with a higher upper clip, the mean over tokens, and groups of equal rewards replaced; no KL.",
        paper="https://arxiv.org/abs/2503.14476",
        estimator="group",
        norm_std=True,
        surrogate="ppo_clip",
        clip_high=0.28,
        aggregation="token",
        updates_per_rollout=4,
        dynamic_sampling=True,
    ),
    Algorithm(
        name="ppo_clip",
        summary="PPO's clipped ratio with the group's mean for a critic, several updates per rollout.",
        paper="https://arxiv.org/abs/1707.06347",
        estimator="group",
        surrogate="ppo_clip",
        aggregation="token",
        updates_per_rollout=4,
    ),
)

ALGORITHMS = MappingProxyType({row.name: row for row in _ROWS})
