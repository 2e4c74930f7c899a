"""What adapts during a run: controllers, constraints, objectives and step guards, from the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from novarl.compose.coefficients import constraints, entropy_controller, kl_controller
from novarl.control.governor import Governor
from novarl.control.objectives import Objective, Objectives
from novarl.learn.guard import StepGuard
from novarl.run.pareto_front import NOT_MEASURED, Axis, Front
from novarl.run.session import Session

if TYPE_CHECKING:
    from novarl.compose.resolve import RLPlan
    from novarl.config.adapting import MultiObjective
    from novarl.config.tree import RLConfig


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


def build_front(section: MultiObjective, session: Session) -> Front | None:
    """The Pareto front of a run with several objectives, if an evaluation measures at least one of them."""
    if not section.enabled or set(section.objectives) <= set(NOT_MEASURED):
        return None
    axes = {name: Axis(spec.direction, spec.epsilon, spec.reference) for name, spec in section.objectives.items()}
    return Front(axes, session, size=section.archive_size, prune=section.prune)
