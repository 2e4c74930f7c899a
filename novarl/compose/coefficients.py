"""Controllers and constraints from the configuration, and the refusal of those that cannot work.

This module loads no torch, so `novarl explain` says of a loop that it does not settle.
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
"""The keys of `adaptive_kl` that every controller has; the others belong to some of them."""
ADAPTIVE_KEYS = {"coef": "initial_coef", "target": "target_kl", "controller": "controller_type"}
CONSTRAINT_KEYS = {
    "lr": "lagrangian_lr",
    "kp": "lagrangian_kp",
    "kd": "lagrangian_kd",
    "init": "lagrangian_init",
    "weight": "constraint_violation_penalty",
}
"""What settings are called in the configuration, where that differs."""


def kl_controller(config: RLConfig, row: Algorithm) -> Controller:
    """What moves the KL coefficient of a run. NovaError for settings that make no sense, alone or together: also for
    gains whose simulated loop, with as many answers in a step as the run has, does not settle."""
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
    """What moves the weight of the entropy bonus: nothing, or what keeps the entropy at a target. NovaError as above.

    The row has the weight to begin with (`merge` gives one to a row whose own is 0).
    """
    section, coef = config.entropy, row.entropy_coef
    if section.target is None:
        return Fixed(coef=coef, max_coef=max(coef, 1.0))
    controller = EntropyTarget(coef=coef, target=section.target, rate=section.rate)
    check_stability(controller, episodes=config.prompts_per_rollout * config.responses_per_prompt)
    return controller


def constraints(config: RLConfig) -> dict[Any, Constraint]:
    """The bounds that act as coefficients, by what they bound: "kl", "entropy". NovaError for settings that make no
    sense together."""
    section = config.constraint_optimization
    if not section.enabled or section.mode not in ("lagrangian", "penalty"):
        return {}

    def bound(**limit: Any) -> Constraint:
        if section.mode == "penalty":
            # The documents' p * violation^2 has twice p for its weight.
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
    """Errors about settings are about the keys of a section."""
    try:
        yield
    except NovaError as error:
        key = (error.where or "").partition(".")[2]
        raise NovaError(error.what, where=f"{section}.{names.get(key, key)}", fix=error.fix) from None
