"""Controllers and constraints from the configuration, with checks of their settings.

This module does not import torch, so `novarl explain` also reports unstable controllers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from novarl.algos.named import Algorithm
from novarl.config.tree import RLConfig
from novarl.control.constraints import Constraint, Lagrangian, QuadraticPenalty
from novarl.control.controller import Controller
from novarl.control.controllers import EntropyTarget, Fixed, make
from novarl.control.stability import check_stability
from novarl.core.errors import NovaError

GENERAL = ("enabled", "controller_type", "target_kl", "initial_coef")
"""The keys of `adaptive_kl` that all controllers share."""
ADAPTIVE_KEYS = {"coef": "initial_coef", "target": "target_kl", "controller": "controller_type"}
CONSTRAINT_KEYS = {
    "lr": "lagrangian_lr",
    "kp": "lagrangian_kp",
    "kd": "lagrangian_kd",
    "init": "lagrangian_init",
    "weight": "constraint_violation_penalty",
}
"""Names of settings in the configuration, if different."""


def kl_controller(config: RLConfig, row: Algorithm) -> Controller:
    """The controller of a run's KL coefficient. NovaError for invalid settings, including gains whose simulated control
    loop, with the run's number of answers per step, is unstable."""
    section, coef = config.adaptive_kl, row.kl_coef
    if not section.enabled:
        return Fixed(coef=coef, max_coef=max(coef, 1.0))
    wanted = {name: getattr(section, name) for name in type(section).model_fields if name not in GENERAL}
    given = {name: value for name, value in wanted.items() if value is not None}
    if section.controller_type == "schedule":
        given["total_steps"] = config.steps
    with _under("adaptive_kl", ADAPTIVE_KEYS):
        controller = make(section.controller_type, coef=coef, target=section.target_kl, **given)
        check_stability(controller, episodes=config.prompts_per_rollout * config.responses_per_prompt)
    return controller


def entropy_controller(config: RLConfig, row: Algorithm) -> Controller:
    """The controller of the entropy bonus, from the row's weight: constant, or with a target. NovaError as above."""
    section, coef = config.entropy, row.entropy_coef
    if section.target is None:
        return Fixed(coef=coef, max_coef=max(coef, 1.0))
    controller = EntropyTarget(coef=coef, target=section.target, rate=section.rate)
    check_stability(controller, episodes=config.prompts_per_rollout * config.responses_per_prompt)
    return controller


def constraints(config: RLConfig) -> dict[Any, Constraint]:
    """The constraints that act through coefficients, by quantity: "kl", "entropy". NovaError for contradictions."""
    section = config.constraint_optimization
    if not section.enabled or section.mode not in ("lagrangian", "penalty"):
        return {}

    def bound(**limit: Any) -> Constraint:
        if section.mode == "penalty":
            # The documents' p * violation^2 corresponds to a weight of 2 * p.
            return QuadraticPenalty(weight=2.0 * section.constraint_violation_penalty, **limit)
        return Lagrangian(
            lr=section.lagrangian_lr,
            dual=section.dual,
            kp=section.lagrangian_kp,
            kd=section.lagrangian_kd,
            init=section.lagrangian_init,
            **limit,
        )

    found: dict[Any, Constraint] = {}
    with _under("constraint_optimization", CONSTRAINT_KEYS):
        if section.kl_constraint is not None:
            found["kl"] = bound(sense="max", limit=section.kl_constraint)
        if section.entropy_constraint is not None or section.entropy_fraction is not None:
            found["entropy"] = bound(sense="min", limit=section.entropy_constraint, fraction=section.entropy_fraction)
    return found


@contextmanager
def _under(section: str, names: dict[str, str]) -> Iterator[None]:
    """Translate errors about settings to the keys of a section."""
    try:
        yield
    except NovaError as error:
        key = (error.where or "").partition(".")[2]
        raise NovaError(error.what, where=f"{section}.{names.get(key, key)}", fix=error.fix) from None
