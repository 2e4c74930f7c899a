"""The table of algorithms: each is a set of values on five axes; no code depends on an algorithm's name.

    credit        `estimator`, `norm_std`, `whiten`, `gamma`, `lam`   the baseline of the reward            (advantages)
                  `values`, `process`                                 sources of values and process rewards (learn)
    surrogate     `surrogate`, `clip_low`, `clip_high`                limits of the policy update           (surrogates)
    correction    of the sampling distribution: a setting of the run, not of the algorithm                  (off_policy)
    regularizer   `kl_type`, `kl_estimator`, `kl_coef`, `entropy_coef`                                      (kl)
    aggregation   `aggregation`, `constant`                           the denominators of the loss          (aggregate)

Single axes are changed with `dataclasses.replace`. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from novarl.core.axes import (
    AggregationName,
    Estimator,
    KLEstimator,
    KLType,
    Need,
    OwnFunction,
    SurrogateName,
    ValueSource,
)

COMPARING: tuple[Estimator, ...] = ("group", "leave_one_out", "reinforce_pp", "opo", "prime")
"""Estimators that compare answers to the same prompt, and so need at least two."""
TEMPORAL: tuple[Estimator, ...] = ("gae", "vtrace", "retrace", "td_lambda", "n_step", "clipped_is", "monte_carlo")
"""Estimators with per-step advantages from values."""
OFF_POLICY: tuple[Estimator, ...] = ("vtrace", "retrace", "clipped_is")
"""Those of them with importance weights pi_old / mu."""
RATIO: tuple[SurrogateName, ...] = ("ppo_clip", "dual_clip", "gspo", "cispo", "sapo")
"""Surrogates that use the ratio pi / pi_old."""
CLIPS: dict[str, tuple[float, float]] = {
    "ppo_clip": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
"""Published `clip_low` and `clip_high` of the surrogates; those of ppo_clip for the others."""
CLIP_DUAL = 3.0
"""Published `clip_dual` of dual_clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: a reference, and its values on the five axes.

    `gamma` and `lam` are for per-step estimators. `values` is the source of V: a learned critic, or the mean reward of
    new continuations from step boundaries. `process` adds a learned reward for every token. `clip_low` and `clip_high`
    bound pi / pi_old for surrogates that use it. `constant` is the denominator of "constant" aggregation: 1 ("one") or
    the maximum answer length ("max_tokens"). `updates_per_rollout` is the number of optimiser updates per rollout
    phase. `dynamic_sampling` replaces groups of equal rewards, which have no gradient, by groups of other prompts.
    """

    name: str
    summary: str
    paper: str
    estimator: Estimator | OwnFunction
    norm_std: bool = False
    whiten: bool = False
    gamma: float = 1.0
    lam: float = 1.0
    values: ValueSource | None = None
    process: bool = False
    surrogate: SurrogateName | OwnFunction = "reinforce"
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
        """What is needed besides rollouts and rewards.

        "group": several samples of each prompt; "greedy": a greedy rollout of each prompt; "reference": log-probs of a
        reference policy; "old_logp": log-probs taken before the first update; "values" and "process": their source.
        Computed, so that it is correct for modified rows.
        """
        needs: set[Need] = set()
        if self.estimator in COMPARING:
            needs.add("group")
        if self.estimator == "scst":
            needs.add("greedy")
        if self.values is not None:
            needs.add("values")
        if self.process:
            needs |= {"process", "reference"}
        if self.kl_type is not None and self.kl_coef > 0:
            needs.add("reference")
            if self.kl_type != "loss":
                needs.add("old_logp")
        if self.updates_per_rollout > 1 or self.estimator in OFF_POLICY:
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
        norm_std=True,
        surrogate="ppo_clip",
        clip_high=0.28,
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
        summary="GRPO with ratio and clip per answer, normalised by its length.",
        paper="https://arxiv.org/abs/2507.18071",
        estimator="group",
        norm_std=True,
        surrogate="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence",
        updates_per_rollout=4,
    ),
    Algorithm(
        name="cispo",
        summary="The ratio is a clipped weight, so every token keeps its gradient; mean over tokens.",
        paper="https://arxiv.org/abs/2506.13585",
        estimator="group",
        norm_std=True,
        surrogate="cispo",
        clip_low=1.0,
        clip_high=4.0,
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
        lam=0.95,
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
        lam=0.0,
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
        process=True,
        surrogate="ppo_clip",
        aggregation="token",
        updates_per_rollout=2,
    ),
)

ALGORITHMS = MappingProxyType({row.name: row for row in _ROWS})


def algorithms() -> list[str]:
    """The names of the reinforcement-learning algorithms, for `algo=`."""
    return list(ALGORITHMS)
