"""Merges an algorithm's row with a configuration and refuses contradictions. This module does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from novarl.algos.axes import ESTIMATORS, SURROGATES, estimator, readers, surrogate
from novarl.algos.named import Algorithm
from novarl.config.tree import RLConfig
from novarl.core.errors import NovaError

ENTROPY_START = 0.01
"""The weight of the bonus that `entropy.target` begins with where neither the run nor the algorithm has one: it is
adapted by factors, which no 0 would ever leave."""


def merge(row: Algorithm, config: RLConfig) -> Algorithm:
    """The algorithm's row with the parts that the configuration changes."""
    changes = _merge_credit(row, config) | _merge_surrogate(row, config)
    changes["settings"] = _settings(replace(row, **changes), config)
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
    if adv.estimator is not None and adv.estimator != row.estimator:
        wanted = estimator(adv.estimator)
        values = row.values or ("critic" if "values" in wanted.needs else None)
        changes |= {"estimator": adv.estimator, "whiten": False, "values": values if wanted.temporal else None}
    for name in ("whiten", "values"):
        if getattr(adv, name) is not None:
            changes[name] = getattr(adv, name)
    return changes


def _merge_surrogate(row: Algorithm, config: RLConfig) -> dict[str, Any]:
    """The surrogate, and the settings of the row that still apply: not its bounds where the run names a surrogate."""
    wanted, clip = config.loss.surrogate or row.surrogate, config.clip
    changes: dict[str, Any] = {"surrogate": wanted}
    if wanted != row.surrogate:
        changes["settings"] = {key: row.settings[key] for key in row.settings if key.startswith("adv.")}
    if clip.dual is not None and config.loss.surrogate is None and row.surrogate == "ppo_clip":
        changes["surrogate"] = "dual_clip"
    if (clip.low is None and clip.high is None) or "clip.high" in surrogate(wanted).reads:
        return changes
    several = (config.updates_per_rollout or row.updates_per_rollout) > 1
    if wanted != "reinforce" or config.loss.surrogate or not several:
        raise NovaError(
            f"loss.surrogate={wanted} has no ratio to clip"
            if config.loss.surrogate
            else f"algo={row.name} has no ratio to clip",
            where="clip",
            fix="use loss.surrogate=ppo_clip, or algo=ppo_clip, grpo or dapo",
        )
    return {"surrogate": "ppo_clip"}


def _settings(merged: Algorithm, config: RLConfig) -> dict[str, Any]:
    """The keys that the estimator and the surrogate read, where the run or the row differs from their defaults."""
    given = {key: given_in(config, key) for key in merged.options}
    if given.get("clip.low") is not None and given["clip.high"] is None:
        given["clip.high"] = given["clip.low"]
    known = {key: row if given[key] is None else given[key] for key, row in merged.options.items()}
    defaults = replace(merged, settings={}).options
    return {key: value for key, value in known.items() if value != defaults[key]}


def given_in(config: RLConfig, key: str) -> Any:
    """What the configuration says of a key, None where that is its default."""
    section, _, name = key.partition(".")
    node = getattr(config, section)
    value = getattr(node, name)
    return None if value == type(node).model_fields[name].default else value


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
    row = estimator(merged.estimator)
    if alone and "group" in row.needs:
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
    if adv.norm_std and "adv.norm_std" not in row.reads:
        raise NovaError(
            f"adv.estimator={merged.estimator} has no group standard deviation to divide by",
            where="adv.norm_std",
            fix="use adv.estimator=group, or adv.whiten=true",
        )
    temporal = [name for name, record in ESTIMATORS.items() if record.temporal]
    for name in type(adv).model_fields:
        given = given_in(config, f"adv.{name}")
        known = temporal if name in ("values", "bootstrap_truncated") else readers(f"adv.{name}")
        if known and given is not None and given is not False and merged.estimator not in known:
            raise NovaError(
                f"adv.estimator={merged.estimator} does not use it",
                where=f"adv.{name}",
                fix=f"use adv.estimator={known[0]}, or leave it out",
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
        if getattr(config.correction, key) is not None and row.weighted:
            raise NovaError(
                f"adv.estimator={merged.estimator} already weights each token by pi_old / mu",
                where=f"correction.{key}",
                fix="remove it, or use adv.estimator=gae",
            )
    for section, used, fix in (
        ("critic", merged.values == "critic", "use algo=ppo, or leave it out"),
        ("vine", merged.values == "continuations", "use algo=vineppo, or leave it out"),
        ("prime", "process" in row.needs, "use algo=prime, or leave it out"),
    ):
        if not used and getattr(config, section) != type(getattr(config, section))():
            raise NovaError(f"algo={merged.name} does not use it", where=section, fix=fix)


def _check_surrogate(merged: Algorithm, config: RLConfig) -> None:
    reads, dual = surrogate(merged.surrogate).reads, config.clip.dual
    for key in dict.fromkeys(key for record in SURROGATES.values() for key in record.reads):
        if key not in reads and given_in(config, key) is not None:
            raise NovaError(
                f"loss.surrogate={merged.surrogate} does not use it",
                where=key,
                fix=f"use loss.surrogate={readers(key)[0]}, or leave it out",
            )
    high = merged.options.get("clip.high", 0.0)
    if dual is not None and dual < 1.0 + high:
        raise NovaError(
            f"{dual:g} is below 1 + clip.high = {1.0 + high:g}, where the ratio is clipped already",
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
