"""The table of algorithms: each is a set of values on five axes; no code depends on an algorithm's name.

    credit        `estimator`, `whiten`                               what the reward is compared with      (advantages)
                  `values`                                            who supplies what it needs            (learn)
    surrogate     `surrogate`                                         how far the policy may move           (surrogates)
    correction    of the sampler's distribution: a setting of the run, not of the algorithm                 (off_policy)
    regularizer   `kl_type`, `kl_estimator`, `kl_coef`, `entropy_coef`                                      (kl)
    aggregation   `aggregation`, `constant`                           the denominators of the loss          (aggregate)

`settings` holds the keys in which a row differs from the defaults of its estimator and its surrogate (`algos.axes`).
A run changes single axes with `dataclasses.replace`. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from novarl.algos import axes
from novarl.algos.axes import Need, OwnFunction, estimator, surrogate


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: a reference, and its values on the five axes.

    `values` says who supplies V: a learned critic, or the mean reward of fresh continuations, which are taken at the
    boundaries of steps. `constant` is what "constant" aggregation divides each trajectory's sum by: 1 ("one") or the
    run's longest answer ("max_tokens").
    `updates_per_rollout` is into how many optimizer updates one rollout phase goes. `dynamic_sampling` replaces groups
    of equal rewards, which have no gradient, by groups of other prompts.
    """

    name: str
    summary: str
    paper: str
    estimator: axes.EstimatorName | OwnFunction
    whiten: bool = False
    values: axes.ValueSource | None = None
    surrogate: axes.SurrogateName | OwnFunction = "reinforce"
    settings: Mapping[str, Any] = field(default_factory=dict)
    kl_type: axes.KLType | None = None
    kl_estimator: axes.KLEstimator = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: axes.AggregationName = "constant"
    constant: Literal["one", "max_tokens"] = "one"
    updates_per_rollout: int = 1
    dynamic_sampling: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The keys that the estimator and the surrogate read, with the values that they have in this row."""
        reads = {**estimator(self.estimator).reads, **surrogate(self.surrogate).reads}
        return {key: self.settings.get(key, default) for key, default in reads.items()}

    @property
    def needs(self) -> frozenset[Need]:
        """What is needed besides rollouts and rewards.

        "group": several samples of each prompt; "greedy": a greedy rollout of each prompt; "reference": log-probs of a
        reference policy; "old_logp": log-probs taken before the first update; "values" and "process": their source.
        Computed, so that it is correct for modified rows.
        """
        needs = set(estimator(self.estimator).needs)
        if self.values is not None:
            needs.add("values")
        if "process" in needs:
            needs.add("reference")
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
        summary="Reward times the gradient of the log-probability; a baseline (mean, ema, scst) reduces variance.",
        paper="https://doi.org/10.1007/BF00992696",
        estimator="none",
    ),
    Algorithm(
        name="rloo",
        summary="REINFORCE with the mean of the other samples of the same prompt as baseline: unbiased.",
        paper="https://arxiv.org/abs/2402.14740",
        estimator="leave_one_out",
    ),
    Algorithm(
        name="grpo",
        summary="Rewards standardized within the group, clipped ratio, mean over sequences, KL to a reference as loss.",
        paper="https://arxiv.org/abs/2402.03300",
        estimator="group",
        settings={"adv.norm_std": True},
        surrogate="ppo_clip",
        kl_type="loss",
        kl_coef=0.04,
        aggregation="sequence",
    ),
    Algorithm(
        name="dr_grpo",
        summary="GRPO without its two biases: no division by standard deviation or answer length. The default.",
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
        surrogate="ppo_clip",
        settings={"adv.norm_std": True, "clip.high": 0.28},
        aggregation="token",
        updates_per_rollout=4,
        dynamic_sampling=True,
    ),
    Algorithm(
        name="ppo_clip",
        summary="PPO's clipped ratio with the group mean instead of a critic, several updates per rollout.",
        paper="https://arxiv.org/abs/1707.06347",
        estimator="group",
        surrogate="ppo_clip",
        aggregation="token",
        updates_per_rollout=4,
    ),
    Algorithm(
        name="gspo",
        summary="GRPO with ratio and clip per answer, normalized by its length.",
        paper="https://arxiv.org/abs/2507.18071",
        estimator="group",
        settings={"adv.norm_std": True},
        surrogate="gspo",
        aggregation="sequence",
        updates_per_rollout=4,
    ),
    Algorithm(
        name="cispo",
        summary="The ratio is a clipped weight, so every token keeps its gradient; mean over tokens.",
        paper="https://arxiv.org/abs/2506.13585",
        estimator="group",
        settings={"adv.norm_std": True},
        surrogate="cispo",
        aggregation="token",
        updates_per_rollout=4,
    ),
    Algorithm(
        name="reinforce_pp",
        summary="REINFORCE++: group mean subtracted, scaled by the deviation of the whole batch; k2 as loss.",
        paper="https://arxiv.org/abs/2501.03262",
        estimator="reinforce_pp",
        surrogate="ppo_clip",
        kl_type="loss",
        kl_estimator="k2",
        kl_coef=0.01,
        aggregation="token",
        updates_per_rollout=2,
    ),
    Algorithm(
        name="remax",
        summary="REINFORCE with the reward of the greedy answer to the same prompt as baseline.",
        paper="https://arxiv.org/abs/2310.10505",
        estimator="scst",
    ),
    Algorithm(
        name="opo",
        summary="Strictly on-policy, with the group's length-weighted mean as a nearly variance-optimal baseline.",
        paper="https://arxiv.org/abs/2505.23585",
        estimator="opo",
    ),
    Algorithm(
        name="ppo",
        summary="A critic, GAE advantages, clipped ratio, KL to the initial policy in the reward.",
        paper="https://arxiv.org/abs/1707.06347",
        estimator="gae",
        settings={"adv.lam": 0.95},
        values="critic",
        whiten=True,
        surrogate="ppo_clip",
        kl_type="reward",
        kl_estimator="k1",
        kl_coef=0.01,
        aggregation="token",
        updates_per_rollout=4,
    ),
    Algorithm(
        name="vineppo",
        summary="PPO with values estimated by the mean reward of new continuations from each step, without a critic.",
        paper="https://arxiv.org/abs/2410.01679",
        estimator="gae",
        settings={"adv.lam": 0.0},
        values="continuations",
        whiten=True,
        surrogate="ppo_clip",
        aggregation="token",
        updates_per_rollout=4,
    ),
    Algorithm(
        name="prime",
        summary="Per-token rewards from an implicit reward model, trained online from outcomes only.",
        paper="https://arxiv.org/abs/2502.01456",
        estimator="prime",
        surrogate="ppo_clip",
        aggregation="token",
        updates_per_rollout=2,
    ),
)

ALGORITHMS = MappingProxyType({row.name: row for row in _ROWS})


def algorithms() -> list[str]:
    """The names of the reinforcement-learning algorithms, for `algo=`."""
    return list(ALGORITHMS)
