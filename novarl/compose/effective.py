"""The effective values of null settings in an RL run, for `novarl explain`. This module does not import torch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from novarl.algos.named import CLIP_DUAL, RATIO, TEMPORAL, Algorithm
from novarl.compose.coefficients import ADAPTIVE_KEYS, kl_controller
from novarl.compose.merge import READERS
from novarl.compose.resolve import WEIGHT_MAX, RLPlan, resolve_rl
from novarl.config.tree import RLConfig


def decided_rl(config: RLConfig) -> dict[str, Any]:
    """The effective values of the keys that this run uses. NovaError as in `resolve_rl`."""
    plan = resolve_rl(config)
    row = plan.algorithm
    values: dict[str, Any] = {
        "optim.lr": plan.lr,
        "warmup": plan.warmup,
        "updates_per_rollout": row.updates_per_rollout,
        "rollout.max_tokens": plan.max_tokens,
        "entropy.coef": row.entropy_coef,
        "loss.surrogate": row.surrogate,
        "loss.agg": row.aggregation,
        "dynamic_sampling.enabled": row.dynamic_sampling,
        **_credit(config, plan),
        **_kl(config, row),
    }
    if row.surrogate in RATIO and row.surrogate != "sapo":
        values |= {"clip.low": row.clip_low, "clip.high": row.clip_high}
    if row.surrogate == "dual_clip":
        values["clip.dual"] = config.clip.dual or CLIP_DUAL
    if plan.correction is not None:
        values["correction.type"] = plan.correction
    if plan.correction in ("token", "sequence"):
        values["correction.tis_max"] = config.correction.tis_max or WEIGHT_MAX
    if plan.needs_reference:
        values |= {"kl.type": row.kl_type, "kl.coef": row.kl_coef}
        values["kl.estimator"] = row.kl_estimator if row.kl_type else None
    return values


def _credit(config: RLConfig, plan: RLPlan) -> dict[str, Any]:
    row = plan.algorithm
    values: dict[str, Any] = {"adv.estimator": row.estimator, "adv.norm_std": row.norm_std, "adv.whiten": row.whiten}
    values |= {f"adv.{name}": getattr(row, name) for name in ("gamma", "lam") if row.estimator in READERS[name]}
    if row.estimator in TEMPORAL:
        values["adv.values"] = row.values
    if row.values == "critic" and not config.critic.shared:
        updates = config.critic.updates_per_rollout or row.updates_per_rollout
        values |= {"critic.lr": plan.critic_lr, "critic.updates_per_rollout": updates}
    if row.values == "continuations" and plan.split:
        values["vine.split"] = plan.split
    if row.process:
        values |= {"prime.lr": plan.prime_lr} | ({"prime.beta": plan.prime_beta} if plan.prime_beta else {})
    return values


def _kl(config: RLConfig, row: Algorithm) -> dict[str, Any]:
    """The effective settings of the KL controller."""
    if not config.adaptive_kl.enabled:
        return {}
    controller = kl_controller(config, row)
    known = set(type(config.adaptive_kl).model_fields)
    named = {spec.name: ADAPTIVE_KEYS.get(spec.name, spec.name) for spec in fields(controller) if spec.init}
    values = {
        f"adaptive_kl.{key}": controller.initial if name == "coef" else getattr(controller, name)
        for name, key in named.items()
        if key in known
    }
    return values
