"""The sections that move an algorithm's numbers while it runs: KL controllers, constraints, several objectives."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from novarl.config.parts import Above0, AtLeast0, Beta, Count, Node, Text, refuse

MEASURED = ("kl", "entropy", "length")
"""Objectives that no reward gives."""


class AdaptiveKL(Node):
    """A controller that moves `kl.coef` so that KL stays near a target. Its gains are null for the controller's own;
    `novarl explain` says which it has."""

    enabled: bool = False
    """false: the coefficient stays as it is, and nothing else here is read."""
    controller_type: Literal[
        "dead_band", "ziegler", "exponential", "two_speed", "linear", "pid", "schedule", "fixed"
    ] = "dead_band"
    """By which rule; `schedule` follows a curve and never looks at KL."""
    target_kl: Above0 = 0.01
    """Nats, per token or per answer, as `kl.unit` says."""
    initial_coef: Above0 | None = None
    """The coefficient to begin with; null: `kl.coef`."""
    min_coef: AtLeast0 | None = None
    """The coefficient never falls below."""
    max_coef: Above0 | None = None
    """The coefficient never rises above."""
    band: Above0 | None = None
    """dead_band: nothing happens within [target / band, target * band]."""
    speed: Above0 | None = None
    """dead_band: the factor outside of it."""
    horizon: Count | None = None
    """ziegler: episodes in which a large error moves the coefficient by about a fifth."""
    clip: Above0 | None = None
    """ziegler, exponential, pid: the largest error that counts."""
    rate: Above0 | None = None
    """exponential: how much of the error, in logarithms, is made good in a step."""
    up: Above0 | None = None
    """two_speed: the factor while KL is above the target."""
    down: Above0 | None = None
    """two_speed: the factor while it is not."""
    factor: Above0 | None = None
    """linear: how much of the relative error is made good in a step."""
    max_step: Above0 | None = None
    """linear: the largest relative error that counts."""
    kp: AtLeast0 | None = None
    """pid: the weight of the error,"""
    ki: Above0 | None = None
    """of its sum over the steps,"""
    kd: AtLeast0 | None = None
    """and of the change in the measurement."""
    smoothing: Above0 | None = None
    """pid: the weight of the newest measurement in the average whose change is taken."""
    shape: Literal["constant", "linear", "cosine", "exponential", "warmup_cosine"] | None = None
    """schedule: the curve from the initial to the final coefficient."""
    final_coef: AtLeast0 | None = None
    """schedule: where it ends."""
    warmup_frac: Above0 | None = None
    """schedule, shape=warmup_cosine: the share of the run in which it rises."""


class ConstraintOptimization(Node):
    """Bounds on KL and entropy."""

    enabled: bool = False
    """false: nothing else here is read."""
    mode: Literal["lagrangian", "penalty", "early_stop", "rollback"] = "lagrangian"
    """lagrangian: a multiplier that grows while the bound is broken; penalty: a weight in proportion to by how much;
    early_stop: the rest of a rollout's updates is left out; rollback: a step that breaks the bound is shortened, or
    undone. The first two bound KL to the reference, the last two KL to the policy that sampled."""
    kl_constraint: Above0 | None = None
    """The most KL, in nats per token, or per answer with kl.unit=sequence; null: no bound."""
    entropy_constraint: Above0 | None = None
    """The least entropy, in nats per token; null: no bound."""
    entropy_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """The least entropy as a share of what is measured at the first step; null: no bound."""
    lagrangian_lr: Above0 = 0.1
    """lagrangian: how fast a multiplier grows, per relative violation."""
    dual: Literal["projected", "softplus"] = "projected"
    """lagrangian: how a multiplier is kept above 0."""
    lagrangian_kp: AtLeast0 = 0.0
    """lagrangian, dual=projected: how strongly a multiplier answers to the violation itself, which damps its swings."""
    lagrangian_kd: AtLeast0 = 0.0
    """lagrangian, dual=projected: and to a violation that grows."""
    lagrangian_init: AtLeast0 = 0.1
    """lagrangian: the multiplier to begin with."""
    constraint_violation_penalty: Above0 = 10.0
    """penalty: the weight of the squared violation."""

    @model_validator(mode="after")
    def _bounds_something(self) -> ConstraintOptimization:
        none = self.kl_constraint is None and self.entropy_constraint is None and self.entropy_fraction is None
        refuse(
            self.enabled and none,
            "constraint_optimization",
            "nothing is constrained",
            "set constraint_optimization.kl_constraint, entropy_constraint or entropy_fraction",
        )
        refuse(
            self.entropy_constraint is not None and self.entropy_fraction is not None,
            "constraint_optimization.entropy_fraction",
            "the entropy has two floors",
            "leave entropy_constraint or entropy_fraction out",
        )
        refuse(
            self.enabled and self.mode in ("early_stop", "rollback") and self.kl_constraint is None,
            "constraint_optimization.kl_constraint",
            f"mode={self.mode} bounds how far a rollout's updates move the policy, and no bound is given",
            "set it, or use mode=lagrangian",
        )
        refuse(
            self.mode in ("early_stop", "rollback")
            and (self.entropy_constraint is not None or self.entropy_fraction is not None),
            "constraint_optimization.mode",
            f"mode={self.mode} can bound KL only",
            "use mode=lagrangian or penalty for the entropy",
        )
        return self


class ObjectiveSpec(Node):
    """One of several objectives."""

    direction: Literal["max", "min"]
    """Which way is better; there is no default."""
    weight: AtLeast0 = 1.0
    """How much it counts; 0: it is only observed."""
    ideal: float | None = None
    """The best value it can have; null: the best seen so far."""
    reference: float | None = None
    """Where its part of the hypervolume begins: a value worse than any of interest; null: the first evaluation's."""
    epsilon: AtLeast0 = 0.0
    """A policy is new to the front only where it is better than each one there by more than this in some objective."""


def _directed(value: Any) -> Any:
    """Refuse objectives of which nothing says whether more is better."""
    for name, spec in value.items() if isinstance(value, dict) else ():
        refuse(
            isinstance(spec, dict) and "direction" not in spec,
            f"multi_objective.objectives.{name}",
            "has no direction: nothing says whether more of it is better",
            f"write multi_objective.objectives.{name}.direction: max, or min",
        )
    return value


class MultiObjective(Node):
    """Several objectives at once: rewards by name, `reward` (their weighted sum), kl, entropy, length."""

    enabled: bool = False
    """false: nothing else here is read."""
    objectives: Annotated[dict[Text, ObjectiveSpec], BeforeValidator(_directed)] = Field(default_factory=dict)
    """By name, each with its direction and weight."""
    method: Literal["weighted_sum", "tchebycheff", "augmented_tchebycheff", "smooth_tchebycheff"] = "weighted_sum"
    """weighted_sum reaches the convex part of the front, the others all of it."""
    mu: Above0 = 0.1
    """smooth_tchebycheff: in standard deviations; towards 0 it is tchebycheff."""
    rho: AtLeast0 = 0.05
    """augmented_tchebycheff: the weight of what is not the worst."""
    beta: Beta = 0.9
    """The weight of the past in the estimate of each objective."""
    archive_size: Count = 100
    """Evaluated policies, none better than another in everything, to keep on the front."""
    prune: Literal["crowding", "contribution"] = "crowding"
    """Which of them goes where there are more: the most crowded, or the one that adds the least hypervolume."""

    @model_validator(mode="after")
    def _has_some(self) -> MultiObjective:
        refuse(
            self.enabled and not self.objectives,
            "multi_objective.objectives",
            "there is no objective",
            "name some, each with its direction: {right: {direction: max}, length: {direction: min}}",
        )
        refuse(
            self.enabled and not any(spec.weight > 0 for spec in self.objectives.values()),
            "multi_objective.objectives",
            "no objective has a weight above 0, so there is nothing to optimise",
            "give one of them a weight",
        )
        return self
