"""Merges an algorithm's row with a configuration and refuses contradictions. This module does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from novarl.algos.named import CLIPS, COMPARING, TEMPORAL, Algorithm
from novarl.config.tree import RLConfig
from novarl.core.errors import NovaError

READERS: dict[str, tuple[str, ...]] = {
    "ema_beta": ("ema",),
    "constant": ("constant",),
    "n": ("n_step",),
    "gamma": (*TEMPORAL, "prime"),
    "lam": ("gae", "vtrace", "retrace", "td_lambda"),
    "rho_max": ("vtrace", "clipped_is"),
    "c_max": ("vtrace", "retrace"),
    "is_level": ("clipped_is",),
    "values": TEMPORAL,
    "bootstrap_truncated": TEMPORAL,
}
"""The estimators that use each key of `adv`."""
ENTROPY_START = 0.01
"""The initial entropy weight for `entropy.target` if neither the run nor the algorithm sets one. It cannot be 0,
because it is adapted by multiplication."""
WEIGHED: tuple[str, ...] = ("vtrace", "clipped_is")
"""Estimators whose token advantages already include the token's pi_old / mu."""


def merge(row: Algorithm, config: RLConfig) -> Algorithm:
    """The algorithm's row with the parts that the configuration changes."""
    changes = _merge_credit(row, config) | _merge_surrogate(row, config)
    if config.entropy.coef is not None:
        changes["entropy_coef"] = config.entropy.coef
    elif config.entropy.target is not None:
        changes["entropy_coef"] = row.entropy_coef or ENTROPY_START
    if config.loss.agg is not None:
        changes["aggregation"] = config.loss.agg
    if config.dynamic_sampling.enabled is not None:
        changes["dynamic_sampling"] = config.dynamic_sampling.enabled
    if config.kl.type is not None or config.kl.coef is not None or config.kl.estimator is not None:
        changes |= _merge_kl(row, config)
    merged = _adapted(replace(row, **changes), config)
    _check_credit(merged, config)
    _check_surrogate(merged, config)
    _check_kl(merged, config)
    _check_entropy(merged, config)
    return merged


def constrains_kl(config: RLConfig) -> bool:
    """Whether a constraint adapts the coefficient of KL to the reference."""
    bound = config.constraint_optimization
    return bound.enabled and bound.mode in ("lagrangian", "penalty") and bound.kl_constraint is not None


def _adapted(merged: Algorithm, config: RLConfig) -> Algorithm:
    """The row with a place and an initial value for an adaptive KL coefficient."""
    adaptive = config.adaptive_kl
    if adaptive.enabled and merged.kl_type is None:
        raise NovaError(
            f"algo={merged.name} has no KL term",
            where="adaptive_kl.enabled",
            fix="add kl.type=loss, reward or advantage",
        )
    if adaptive.enabled and constrains_kl(config):
        raise NovaError(
            "a controller and a constraint would both change the KL coefficient",
            where="adaptive_kl.enabled",
            fix="remove one of them",
        )
    if adaptive.enabled and adaptive.initial_coef is not None:
        merged = replace(merged, kl_coef=adaptive.initial_coef)
    if adaptive.enabled and merged.kl_coef == 0:
        raise NovaError(
            "a coefficient of 0 cannot adapt, because it is changed by multiplication",
            where="adaptive_kl.initial_coef",
            fix="set it above 0",
        )
    if constrains_kl(config) and merged.kl_type is None:
        merged = replace(merged, kl_type="loss", kl_estimator=config.kl.estimator or "k2", kl_coef=0.0)
    return merged


def _merge_credit(row: Algorithm, config: RLConfig) -> dict[str, Any]:
    adv = config.adv
    changes: dict[str, Any] = {}
    estimator = adv.estimator or row.estimator
    if adv.estimator is not None and adv.estimator != row.estimator:
        changes |= {"estimator": estimator, "norm_std": row.norm_std and estimator == "group", "whiten": False}
        changes |= {"process": estimator == "prime", "values": row.values if estimator in TEMPORAL else None}
        if estimator in TEMPORAL and row.values is None and estimator != "monte_carlo":
            changes["values"] = "critic"
    for name in ("norm_std", "whiten", "gamma", "lam", "values"):
        if getattr(adv, name) is not None:
            changes[name] = getattr(adv, name)
    return changes


def _merge_surrogate(row: Algorithm, config: RLConfig) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    surrogate = config.loss.surrogate or row.surrogate
    if config.clip.dual is not None and config.loss.surrogate is None and row.surrogate == "ppo_clip":
        changes["surrogate"] = "dual_clip"
    if surrogate != row.surrogate:
        low, high = CLIPS.get(surrogate, CLIPS["ppo_clip"])
        changes |= {"surrogate": surrogate, "clip_low": low, "clip_high": high}
    if config.clip.low is None and config.clip.high is None:
        return changes
    several = (config.updates_per_rollout or row.updates_per_rollout) > 1
    if surrogate in ("gpg", "sapo") or (surrogate == "reinforce" and (config.loss.surrogate or not several)):
        raise NovaError(
            f"loss.surrogate={surrogate} has no ratio to clip"
            if config.loss.surrogate
            else f"algo={row.name} has no ratio to clip",
            where="clip",
            fix="use loss.surrogate=ppo_clip, or algo=ppo_clip, grpo or dapo",
        )
    if surrogate == "reinforce":
        changes["surrogate"] = "ppo_clip"
    low, high = changes.get("clip_low", row.clip_low), changes.get("clip_high", row.clip_high)
    if config.clip.low is not None:
        low = high = config.clip.low
    return changes | {"clip_low": low, "clip_high": high if config.clip.high is None else config.clip.high}


def _merge_kl(row: Algorithm, config: RLConfig) -> dict[str, Any]:
    kind = config.kl.type or row.kl_type
    adaptive = config.adaptive_kl
    coef = config.kl.coef if config.kl.coef is not None else row.kl_coef
    if adaptive.enabled and adaptive.initial_coef is not None:
        coef = adaptive.initial_coef
    if coef and kind is None:
        raise NovaError(
            f"kl.coef={coef:g} needs kl.type, because algo={row.name} has no KL term",
            where="kl.type",
            fix="add kl.type=loss, reward or advantage",
        )
    if config.kl.type is not None and config.kl.coef is None and not coef and not constrains_kl(config):
        raise NovaError(
            f"kl.type={kind} with coefficient 0 has no effect",
            where="kl.coef",
            fix="set kl.coef above 0, or remove kl.type",
        )
    same_place = kind == row.kl_type
    estimator = config.kl.estimator or (row.kl_estimator if same_place else "k2" if kind == "loss" else "k1")
    return {"kl_type": kind, "kl_coef": coef, "kl_estimator": estimator}


def _check_credit(merged: Algorithm, config: RLConfig) -> None:
    adv, alone = config.adv, config.responses_per_prompt == 1
    if alone and merged.estimator in COMPARING:
        raise NovaError(
            f"algo={merged.name} compares several answers to a prompt, but responses_per_prompt is 1",
            where="responses_per_prompt",
            fix="use 2 or more, or algo=reinforce adv.estimator=mean",
        )
    if alone and merged.dynamic_sampling:
        raise NovaError(
            "with one answer per prompt no group has different rewards, so all would be dropped",
            where="dynamic_sampling.enabled",
            fix="use responses_per_prompt=2 or more, or dynamic_sampling.enabled=false",
        )
    if merged.estimator != "group" and merged.norm_std:
        raise NovaError(
            f"adv.estimator={merged.estimator} has no group standard deviation to divide by",
            where="adv.norm_std",
            fix="use adv.estimator=group, or adv.whiten=true",
        )
    for name, readers in READERS.items():
        default = type(adv).model_fields[name].default
        if getattr(adv, name) != default and merged.estimator not in readers:
            raise NovaError(
                f"adv.estimator={merged.estimator} does not use it",
                where=f"adv.{name}",
                fix=f"use adv.estimator={readers[0]}, or remove it",
            )
    if merged.values == "continuations" and merged.estimator != "gae":
        raise NovaError(
            f"continuations estimate values per step, but adv.estimator={merged.estimator} needs them per token",
            where="adv.values",
            fix="use adv.estimator=gae, or adv.values=critic",
        )
    if adv.bootstrap_truncated and merged.values != "critic":
        raise NovaError(
            "only a critic can estimate the value of a truncated answer",
            where="adv.bootstrap_truncated",
            fix="use adv.values=critic, or remove it",
        )
    for key in ("type", "tis_max"):
        if getattr(config.correction, key) is not None and merged.estimator in WEIGHED:
            raise NovaError(
                f"adv.estimator={merged.estimator} already weights each token by pi_old / mu",
                where=f"correction.{key}",
                fix="remove it, or use adv.estimator=gae",
            )
    for section, used, fix in (
        ("critic", merged.values == "critic", "use algo=ppo, or remove it"),
        ("vine", merged.values == "continuations", "use algo=vineppo, or remove it"),
        ("prime", merged.process, "use algo=prime, or remove it"),
    ):
        if not used and getattr(config, section) != type(getattr(config, section))():
            raise NovaError(f"algo={merged.name} does not use it", where=section, fix=fix)


def _check_surrogate(merged: Algorithm, config: RLConfig) -> None:
    dual, loss = config.clip.dual, config.loss
    for key, given, reader in (
        ("clip.dual", dual is not None, "dual_clip"),
        ("loss.tau_pos", loss.tau_pos != type(loss).model_fields["tau_pos"].default, "sapo"),
        ("loss.tau_neg", loss.tau_neg != type(loss).model_fields["tau_neg"].default, "sapo"),
    ):
        if given and merged.surrogate != reader:
            raise NovaError(
                f"loss.surrogate={merged.surrogate} does not use it",
                where=key,
                fix=f"use loss.surrogate={reader}, or remove it",
            )
    if dual is not None and dual < 1.0 + merged.clip_high:
        raise NovaError(
            f"{dual:g} is below 1 + clip.high = {1.0 + merged.clip_high:g}",
            where="clip.dual",
            fix="use a larger value, such as 3",
        )


def _check_entropy(merged: Algorithm, config: RLConfig) -> None:
    bound = config.constraint_optimization
    floor = bound.entropy_constraint is not None or bound.entropy_fraction is not None
    if config.entropy.target is not None and bound.enabled and floor:
        raise NovaError(
            "a controller and a constraint would both change the weight of the entropy bonus",
            where="entropy.target",
            fix="remove one of them",
        )


def _check_kl(merged: Algorithm, config: RLConfig) -> None:
    if merged.kl_type == "loss" and merged.kl_estimator == "k1":
        raise NovaError(
            "k1 in the loss has zero gradient in expectation",
            where="kl.estimator",
            fix="use k2 or k3, or kl.type=reward",
        )
    if config.kl.clamp is not None and (merged.kl_type is None or merged.kl_estimator != "k3"):
        found = f"kl.estimator={merged.kl_estimator}" if merged.kl_type else f"no KL term in algo={merged.name}"
        raise NovaError(f"only k3 can be clamped, but there is {found}", where="kl.clamp", fix="use k3, or remove it")
    if config.kl.corrected and merged.kl_type != "loss":
        raise NovaError(
            "only KL in the loss can be corrected", where="kl.corrected", fix="use kl.type=loss, or remove it"
        )
    if config.kl.estimator is not None and merged.kl_type is None:
        raise NovaError(
            f"algo={merged.name} has no KL term",
            where="kl.estimator",
            fix="set kl.type and kl.coef, or remove it",
        )
    if config.kl.unit == "sequence" and config.constraint_optimization.enabled and not constrains_kl(config):
        bound = config.constraint_optimization
        if bound.kl_constraint is not None:
            raise NovaError(
                f"mode={bound.mode} constrains KL per token, not per answer",
                where="kl.unit",
                fix="remove it, and set kl_constraint in nats per token",
            )
    objectives = config.multi_objective.objectives if config.multi_objective.enabled else {}
    for used, what in (
        (merged.kl_coef > 0, f"the penalty of algo={merged.name} has no effect"),
        (constrains_kl(config), "the constraint has no effect"),
        ("kl" in objectives, "the objective has no effect"),
    ):
        if used and config.kl.reference == "tie":
            raise NovaError(
                f"KL to the policy itself is always 0: {what}",
                where="kl.reference",
                fix="use kl.reference=start or ema, or remove KL",
            )
