"""The sections that change coefficients during a run: KL controllers, constraints, multiple objectives."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from novarl.config.parts import Above0, AtLeast0, Beta, Count, Node, Text, conflict

MEASURED = ("kl", "entropy", "length")
"""Objectives that are not rewards."""


class AdaptiveKL(Node):
    """A controller that adapts `kl.coef` to keep KL near a target. Settings that are null use the controller's own
    defaults; `novarl explain` prints them."""

    enabled: bool = False
    """Turn the controller on. false: the coefficient is constant."""
    controller_type: Literal[
        "dead_band", "ziegler", "exponential", "two_speed", "linear", "pid", "schedule", "fixed"
    ] = "dead_band"
    """The control rule. `schedule` follows a curve and ignores the measured KL."""
    target_kl: Above0 = 0.01
    """Target KL in nats, per token or per answer as set by `kl.unit`."""
    initial_coef: Above0 | None = None
    """Initial coefficient. null: `kl.coef`."""
    min_coef: AtLeast0 | None = None
    """Lower bound of the coefficient."""
    max_coef: Above0 | None = None
    """Upper bound of the coefficient."""
    band: Above0 | None = None
    """dead_band: the coefficient is unchanged while KL is within [target / band, target * band]."""
    speed: Above0 | None = None
    """dead_band: factor by which the coefficient changes outside the band."""
    horizon: Count | None = None
    """ziegler: number of episodes in which a large error changes the coefficient by about 20%."""
    clip: Above0 | None = None
    """ziegler, exponential, pid: bound on the error."""
    rate: Above0 | None = None
    """exponential: fraction of the log error corrected per step."""
    up: Above0 | None = None
    """two_speed: factor while KL is above the target."""
    down: Above0 | None = None
    """two_speed: factor while KL is at or below the target."""
    factor: Above0 | None = None
    """linear: fraction of the relative error corrected per step."""
    max_step: Above0 | None = None
    """linear: bound on the relative error."""
    kp: AtLeast0 | None = None
    """pid: proportional gain."""
    ki: Above0 | None = None
    """pid: integral gain."""
    kd: AtLeast0 | None = None
    """pid: derivative gain, on the measurement."""
    smoothing: Above0 | None = None
    """pid: weight of the newest measurement in the moving average used for the derivative."""
    shape: Literal["constant", "linear", "cosine", "exponential", "warmup_cosine"] | None = None
    """schedule: shape of the curve from the initial to the final coefficient."""
    final_coef: AtLeast0 | None = None
    """schedule: final coefficient."""
    warmup_frac: Above0 | None = None
    """schedule, shape=warmup_cosine: fraction of the run in which the coefficient rises."""


class Guard(Node):
    """What a run does when an alert is raised. docs/stability.md lists the alerts."""

    on_alert: dict[Text, Literal["warn", "stop", "skip"]] = Field(default_factory=dict)
    """The action for each alert by its name, such as {nan: skip, kl_explosion: stop}. warn: nothing else, the default;
    stop: save and end the run; skip: undo the update (only nan, kl_explosion and gradient_spike)."""


class ConstraintOptimization(Node):
    """Constraints on KL and entropy."""

    enabled: bool = False
    """Turn this section on. false: nothing else in it is used."""
    mode: Literal["lagrangian", "penalty", "early_stop", "rollback"] = "lagrangian"
    """How the constraint is enforced. lagrangian: a multiplier that grows while the constraint is violated; penalty: a
    weight proportional to the violation; early_stop: the remaining updates of the rollout are skipped; rollback: a step
    that violates the constraint is shortened or undone. The first two constrain KL to the reference, the last two KL to
    the policy that sampled."""
    kl_constraint: Above0 | None = None
    """Maximum KL in nats per token (per answer with kl.unit=sequence). null: no constraint."""
    entropy_constraint: Above0 | None = None
    """Minimum entropy in nats per token. null: no constraint."""
    entropy_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Minimum entropy as a fraction of the first step's entropy. null: no constraint."""
    lagrangian_lr: Above0 = 0.1
    """lagrangian: learning rate of the multiplier, per relative violation."""
    dual: Literal["projected", "softplus"] = "projected"
    """lagrangian: how the multiplier is kept non-negative."""
    lagrangian_kp: AtLeast0 = 0.0
    """lagrangian, dual=projected: proportional gain on the violation, which damps oscillations."""
    lagrangian_kd: AtLeast0 = 0.0
    """lagrangian, dual=projected: gain on an increasing violation."""
    lagrangian_init: AtLeast0 = 0.1
    """lagrangian: initial multiplier."""
    constraint_violation_penalty: Above0 = 10.0
    """penalty: weight of the squared violation."""

    @model_validator(mode="after")
    def _bounds_something(self) -> ConstraintOptimization:
        bounds_entropy = self.entropy_constraint is not None or self.entropy_fraction is not None
        of_step = self.mode in ("early_stop", "rollback")
        if self.enabled and self.kl_constraint is None and not bounds_entropy:
            raise conflict(
                "constraint_optimization",
                "no constraint is set",
                "set constraint_optimization.kl_constraint, entropy_constraint or entropy_fraction",
            )
        if self.entropy_constraint is not None and self.entropy_fraction is not None:
            raise conflict(
                "constraint_optimization.entropy_fraction",
                "the entropy has two lower bounds",
                "remove entropy_constraint or entropy_fraction",
            )
        if self.enabled and of_step and self.kl_constraint is None:
            what, fix = f"mode={self.mode} needs a KL limit", "set it, or use mode=lagrangian"
            raise conflict("constraint_optimization.kl_constraint", what, fix)
        if of_step and bounds_entropy:
            what, fix = f"mode={self.mode} constrains KL only", "use mode=lagrangian or penalty for the entropy"
            raise conflict("constraint_optimization.mode", what, fix)
        return self


class ObjectiveSpec(Node):
    """One of several objectives."""

    direction: Literal["max", "min"]
    """Whether the objective is maximized or minimized. Required."""
    weight: AtLeast0 = 1.0
    """Weight of the objective. 0: it is only measured."""
    ideal: float | None = None
    """Best possible value. null: the best value so far."""
    reference: float | None = None
    """Reference point of the hypervolume, worse than any value of interest. null: the first evaluation."""
    epsilon: AtLeast0 = 0.0
    """Minimum improvement over every policy on the front, in some objective, for a policy to be added."""


def _directed(value: Any) -> Any:
    """Refuse objectives without a direction."""
    for name, spec in value.items() if isinstance(value, dict) else ():
        if isinstance(spec, dict) and "direction" not in spec:
            raise conflict(
                f"multi_objective.objectives.{name}",
                "the objective has no direction",
                f"set multi_objective.objectives.{name}.direction to max or min",
            )
    return value


class MultiObjective(Node):
    """Several objectives at once: rewards by name, `reward` (their weighted sum), kl, entropy, length."""

    enabled: bool = False
    """Turn this section on. false: nothing else in it is used."""
    objectives: Annotated[dict[Text, ObjectiveSpec], BeforeValidator(_directed)] = Field(default_factory=dict)
    """The objectives by name, each with its direction and weight."""
    method: Literal["weighted_sum", "tchebycheff", "augmented_tchebycheff", "smooth_tchebycheff"] = "weighted_sum"
    """Scalarization. weighted_sum reaches only the convex part of the Pareto front, the others all of it."""
    mu: Above0 = 0.1
    """smooth_tchebycheff: smoothing in standard deviations. 0 approaches tchebycheff."""
    rho: AtLeast0 = 0.05
    """augmented_tchebycheff: weight of the sum of all objectives."""
    beta: Beta = 0.9
    """Decay of the moving estimate of each objective."""
    archive_size: Count = 100
    """Maximum number of non-dominated policies on the front."""
    prune: Literal["crowding", "contribution"] = "crowding"
    """Which policy is removed from a full front: the most crowded one, or the one with the smallest hypervolume
    contribution."""

    @model_validator(mode="after")
    def _has_some(self) -> MultiObjective:
        if self.enabled and not self.objectives:
            raise conflict(
                "multi_objective.objectives",
                "no objectives are set",
                "list them with their directions: {right: {direction: max}, length: {direction: min}}",
            )
        if self.enabled and not any(spec.weight > 0 for spec in self.objectives.values()):
            raise conflict(
                "multi_objective.objectives",
                "no objective has a weight above 0",
                "set the weight of at least one objective",
            )
        return self
