"""Resolves null settings of preference training. This module does not import torch, so `novarl explain` is fast."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from novarl.compose.resolve import is_small, model_in
from novarl.config.preference import DPOConfig, RMConfig
from novarl.tasks.registry import Task, find_task

SMALL_DPO_LR, LARGE_DPO_LR = 1e-4, 5e-7
SMALL_RM_LR, LARGE_RM_LR = 3e-4, 1e-5
DPO_BETA = {"simpo": 2.0}
"""By loss; 0.1 for all others. SimPO's rewards are means over tokens, the others' are sums."""
IMPLICIT_BETA = 0.05
DEFAULTS = {
    "dpop": {"penalty": 50.0},
    "simpo": {"gamma": 0.5},
    "kto": {"desirable_weight": 1.0, "undesirable_weight": 1.0},
}
"""Defaults of the keys that belong to one loss."""


@dataclass(frozen=True, slots=True)
class PreferencePlan:
    """`labelled`: the loss uses labelled answers instead of pairs; `reference`: it compares the policy with its initial
    state; `head`: it trains a scalar head. `options` are the loss's keywords."""

    task: Task | None
    lr: float
    loss: str
    beta: float
    labelled: bool
    reference: bool
    head: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def strangers(self) -> bool:
        """Whether the loss estimates its reference point on other rows' answers."""
        return self.loss in ("kto", "implicit_kto")


def resolve_dpo(config: DPOConfig) -> PreferencePlan:
    """The task, the learning rate and the loss with its keywords."""
    given: dict[str, Any] = {
        "penalty": config.penalty,
        "gamma": config.gamma,
        "desirable_weight": config.desirable_weight,
        "undesirable_weight": config.undesirable_weight,
        "label_smoothing": config.label_smoothing or None,
    }
    return PreferencePlan(
        task=_task(config),
        lr=config.optim.lr or (SMALL_DPO_LR if is_small(model_in(config)) else LARGE_DPO_LR),
        loss=config.loss,
        beta=config.beta or DPO_BETA.get(config.loss, 0.1),
        labelled=config.loss == "kto",
        reference=config.loss not in ("simpo", "orpo"),
        options=DEFAULTS.get(config.loss, {}) | {name: value for name, value in given.items() if value is not None},
    )


def resolve_rm(config: RMConfig) -> PreferencePlan:
    """The task, the learning rate and the loss with its keywords."""
    head = config.loss in ("bt", "bce")
    given = {"centring": config.centring, "label_smoothing": config.label_smoothing}
    return PreferencePlan(
        task=_task(config),
        lr=config.optim.lr or (SMALL_RM_LR if is_small(model_in(config)) else LARGE_RM_LR),
        loss=config.loss,
        beta=config.beta or IMPLICIT_BETA,
        labelled=config.loss in ("bce", "implicit_ce", "implicit_kto"),
        reference=not head,
        head=head,
        options={name: value for name, value in given.items() if value},
    )


def decided(config: DPOConfig | RMConfig) -> dict[str, Any]:
    """The effective values of the null keys that this loss uses."""
    if isinstance(config, RMConfig):
        plan = resolve_rm(config)
        return {"optim.lr": plan.lr} | ({} if plan.head else {"beta": plan.beta})
    plan = resolve_dpo(config)
    own = {name: value for name, value in plan.options.items() if name != "label_smoothing"}
    return {"optim.lr": plan.lr, "beta": plan.beta, **own}


def _task(config: DPOConfig | RMConfig) -> Task | None:
    return find_task(config.task, dict(config.task_options)) if config.task else None
