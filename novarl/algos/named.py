"""The table of algorithms: each is a value on five axes, and no code anywhere asks for its name.

    credit        `estimator`, `norm_std`, `whiten`, `gamma`, `lam`   what the reward is compared with      (advantages)
                  `values`, `process`                                 who supplies what it needs            (learn)
    surrogate     `surrogate`, `clip_low`, `clip_high`                how far the policy may move           (surrogates)
    correction    of the sampler's distribution: a setting of the run, not of the algorithm                 (off_policy)
    regularizer   `kl_type`, `kl_estimator`, `kl_coef`, `entropy_coef`                                      (kl)
    aggregation   `aggregation`, `constant`                           what is averaged over what            (aggregate)

A run changes single axes with `dataclasses.replace`. This module imports no torch.
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
"""Estimators that compare the answers to one prompt, and so need two of them."""
TEMPORAL: tuple[Estimator, ...] = ("gae", "vtrace", "retrace", "td_lambda", "n_step", "clipped_is", "monte_carlo")
"""Estimators that give every step its own advantage, from values."""
OFF_POLICY: tuple[Estimator, ...] = ("vtrace", "retrace", "clipped_is")
"""Those of them that weigh what was sampled by pi_old / mu."""
RATIO: tuple[SurrogateName, ...] = ("ppo_clip", "dual_clip", "gspo", "cispo", "sapo")
"""Surrogates that look at pi / pi_old."""
CLIPS: dict[str, tuple[float, float]] = {
    "ppo_clip": (0.2, 0.2),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}
"""`clip_low`, `clip_high` of the surrogates as published; those of ppo_clip for the others."""
CLIP_DUAL = 3.0
"""`clip_dual` of dual_clip as published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: where to read about it, and its place on the five axes.

    `gamma` and `lam` belong to the estimators over time. `values` says who supplies V: a learnt critic, or the mean
    reward of fresh continuations, which are taken at the boundaries of steps. `process` adds a learnt reward for every
    token. `clip_low`, `clip_high` bound pi / pi_old for the surrogates that look at it. `constant` is what "constant"
    aggregation divides each trajectory's sum by: 1 ("one") or the run's longest answer ("max_tokens").
    `updates_per_rollout` is into how many optimiser updates one rollout phase goes. `dynamic_sampling` replaces groups
    of equal rewards, which have no gradient, by groups of other prompts.
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
        """What must be there beside the rollouts and their rewards.

        "group": several samples of each prompt; "greedy": a greedy rollout of each prompt; "reference": log-probs of a
        reference policy; "old_logp": log-probs taken before the first update; "values" and "process": a supplier.
        Computed, so that it stays true of a row of which a run has changed an axis.
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
    Algorithm(
        name="gspo",
        summary="GRPO whose ratio and clip are of the whole answer, its length taken out.",
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
        summary="The ratio is cut as a weight, not as a clip: every token keeps its gradient, mean over tokens.",
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
        summary="REINFORCE++: less the group's mean, then scaled by the whole batch's deviation; k2 as loss.",
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
        summary="REINFORCE against the reward of the greedy answer to the same prompt.",
        paper="https://arxiv.org/abs/2310.10505",
        estimator="scst",
    ),
    Algorithm(
        name="opo",
        summary="Strictly on-policy, against the group's length-weighted mean, nearly the baseline of least variance.",
        paper="https://arxiv.org/abs/2505.23585",
        estimator="opo",
    ),
    Algorithm(
        name="ppo",
        summary="A critic's values, advantages over time by GAE, clipped ratio, KL to the start in the reward.",
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
        summary="PPO whose values are the mean reward of fresh continuations from each step: no critic to be wrong.",
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
        summary="Rewards for every token from an implicit reward model, learnt online from outcomes alone.",
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
