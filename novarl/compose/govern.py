"""What adapts during a run: controllers, constraints, objectives and step guards, from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from novarl.compose.coefficients import constraints, entropy_controller, kl_controller
from novarl.control.governor import Governor
from novarl.control.guards import UNDOABLE, AlarmGuard
from novarl.control.objectives import Objective, Objectives
from novarl.core.errors import NovaError, nearest
from novarl.learn.guard import StepGuard
from novarl.observe.stability.rules import RULES, TRAINING
from novarl.observe.stability.watch import Watch
from novarl.run.pareto_front import NOT_MEASURED, Axis, Front
from novarl.run.session import Session

if TYPE_CHECKING:
    from novarl.compose.resolve import RLPlan
    from novarl.config.adapting import MultiObjective
    from novarl.config.tree import RLConfig


WATCHED_BY_GUARDS = [rule.name for rule in TRAINING if rule.check is not None]
"""Alerts that a guard can act on."""


def build_governor(config: RLConfig, plan: RLPlan) -> Governor:
    """Coefficients and their controllers; `resolve_rl` has checked the settings."""
    row = plan.algorithm
    return Governor(
        kl=kl_controller(config, row),
        entropy=entropy_controller(config, row),
        in_loss=row.kl_type == "loss",
        unit=config.kl.unit,
        constraints=constraints(config),
        objectives=_objectives(config),
    )


def _objectives(config: RLConfig) -> Objectives | None:
    section = config.multi_objective
    if not section.enabled:
        return None
    specs = [
        Objective(name, spec.direction, weight=spec.weight, ideal=spec.ideal)
        for name, spec in section.objectives.items()
    ]
    return Objectives(specs, section.method, mu=section.mu, rho=section.rho, beta=section.beta)


def build_guard(config: RLConfig) -> StepGuard | None:
    """The step guard of a KL constraint with mode early_stop or rollback."""
    section = config.constraint_optimization
    if not section.enabled or section.mode not in ("early_stop", "rollback") or section.kl_constraint is None:
        return None
    return StepGuard(section.mode, section.kl_constraint)


def check_alarm_guard(config: RLConfig) -> None:
    """NovaError for an alert that does not exist, that guards do not see, or whose update cannot be undone."""
    for name, action in config.guard.on_alert.items():
        where = f"guard.on_alert.{name}"
        if name not in RULES:
            raise NovaError("there is no such alert", where=where, fix=nearest(name, WATCHED_BY_GUARDS))
        if name not in WATCHED_BY_GUARDS and action != "warn":
            what = "guards act on alerts about metrics; this one is about other things"
            raise NovaError(what, where=where, fix=f"one of {', '.join(WATCHED_BY_GUARDS)}")
        if action == "skip" and name not in UNDOABLE:
            what = "this alert is not about a single update, so that skipping one does not help"
            raise NovaError(what, where=where, fix=f"use stop, or skip for {', '.join(UNDOABLE)}")


def build_alarm_guard(config: RLConfig, session: Session) -> AlarmGuard | None:
    """The guard that acts on alerts, if any alert has an action."""
    actions = {name: action for name, action in config.guard.on_alert.items() if action != "warn"}
    return AlarmGuard(actions, Watch(limit=session.limit), session.bus.event) if actions else None


def build_front(section: MultiObjective, session: Session) -> Front | None:
    """The Pareto front of a run with several objectives, if an evaluation measures at least one of them."""
    if not section.enabled or set(section.objectives) <= set(NOT_MEASURED):
        return None
    axes = {name: Axis(spec.direction, spec.epsilon, spec.reference) for name, spec in section.objectives.items()}
    return Front(axes, session, size=section.archive_size, prune=section.prune)
