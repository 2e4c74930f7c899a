"""From a configuration to plain values: where it says null, the algorithm's row and the task decide.

This module loads no torch, so `novarl explain` answers at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from novarl.algos.named import ALGORITHMS, Algorithm
from novarl.config.tree import BUILT_IN_MODELS, RLConfig, SFTConfig
from novarl.core.errors import NovaError
from novarl.tasks.registry import Task, find_task

SMALL_WIDTH = 512
"""A model this wide or narrower (the built-in ones are 128 and 256) learns at rates that would ruin a large one."""
SMALL_RL_LR, LARGE_RL_LR = 3e-4, 1e-6
SMALL_SFT_LR, LARGE_SFT_LR = 1e-3, 1e-5
DATA_MAX_TOKENS = 256
"""The longest answer for a data file, where nobody says how long answers are."""


@dataclass(frozen=True, slots=True)
class RLPlan:
    """What a reinforcement-learning run will do, every null filled in."""

    algorithm: Algorithm
    task: Task | None
    warmup: int
    lr: float
    max_tokens: int
    ema_beta: float
    whiten: bool
    correction_max: float | None

    @property
    def needs_reference(self) -> bool:
        return "reference" in self.algorithm.needs

    @property
    def needs_old_logp(self) -> bool:
        return "old_logp" in self.algorithm.needs or self.correction_max is not None


def nearest(name: str, known: Any) -> str:
    """A fix that names the closest of `known`."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}"


def resolve_rl(config: RLConfig) -> RLPlan:
    """Merge the algorithm's row with what the configuration changes of it. NovaError on what contradicts."""
    if config.algo not in ALGORITHMS:
        raise NovaError(f"unknown algorithm {config.algo!r}", where="algo", fix=nearest(config.algo, ALGORITHMS))
    task = find_task(config.task, dict(config.task_options)) if config.task else None
    algorithm = merge(ALGORITHMS[config.algo], config)
    updates = config.updates_per_rollout or algorithm.updates_per_rollout
    if updates % config.epochs_per_rollout:
        raise NovaError(
            f"{updates} updates cannot be shared evenly among {config.epochs_per_rollout} epochs",
            where="epochs_per_rollout",
            fix="make updates_per_rollout a multiple of epochs_per_rollout",
        )
    trajectories = config.prompts_per_rollout * config.responses_per_prompt
    if updates // config.epochs_per_rollout > trajectories:
        raise NovaError(
            f"{trajectories} answers in a step cannot be shared among the {updates} updates of algo={config.algo}",
            where="updates_per_rollout",
            fix="use fewer updates, or more prompts_per_rollout",
        )
    fresh = config.model in BUILT_IN_MODELS
    warmup = config.warmup if config.warmup is not None else (task.warmup if task and fresh else 0)
    return RLPlan(
        algorithm=replace(algorithm, updates_per_rollout=updates),
        task=task,
        warmup=warmup,
        lr=config.optim.lr or _rl_rate(config.model, task),
        max_tokens=config.rollout.max_tokens or (task.max_tokens if task else DATA_MAX_TOKENS),
        ema_beta=config.adv.ema_beta,
        whiten=config.adv.whiten,
        correction_max=config.correction.tis_max,
    )


def _rl_rate(model: str, task: Task | None) -> float:
    if not is_small(model):
        return LARGE_RL_LR
    return task.rl_lr if task else SMALL_RL_LR


def is_small(model: str) -> bool:
    """Whether a model is of the built-in ones' size: one of them, or a directory whose config.json says so."""
    if model in BUILT_IN_MODELS:
        return True
    try:
        width = json.loads((Path(model) / "config.json").read_text()).get("hidden_size")
    except (OSError, ValueError):
        return False
    return isinstance(width, int) and width <= SMALL_WIDTH


def merge(row: Algorithm, config: RLConfig) -> Algorithm:
    """The algorithm's row with the parts that the configuration names put in their places."""
    changes: dict[str, Any] = {}
    adv, kl = config.adv, config.kl
    if adv.estimator is not None:
        changes |= {"estimator": adv.estimator, "norm_std": row.norm_std and adv.estimator == "group"}
    if adv.norm_std is not None:
        changes["norm_std"] = adv.norm_std
    if config.clip.low is not None or config.clip.high is not None:
        if row.surrogate == "reinforce" and (config.updates_per_rollout or row.updates_per_rollout) == 1:
            raise NovaError(
                f"algo={row.name} has no ratio to clip", where="clip", fix="use algo=ppo_clip, grpo or dapo"
            )
        changes |= {"surrogate": "ppo_clip", "clip_low": config.clip.low or row.clip_low or 0.2}
        changes["clip_high"] = config.clip.high or row.clip_high or changes["clip_low"]
    if config.entropy.coef is not None:
        changes["entropy_coef"] = config.entropy.coef
    if config.loss.agg is not None:
        changes["aggregation"] = config.loss.agg
    if config.dynamic_sampling.enabled is not None:
        changes["dynamic_sampling"] = config.dynamic_sampling.enabled
    if kl.type is not None or kl.coef is not None or kl.estimator is not None:
        changes |= _merge_kl(row, config)
    merged = replace(row, **changes)
    _check(merged, config)
    return merged


def _merge_kl(row: Algorithm, config: RLConfig) -> dict[str, Any]:
    kind = config.kl.type or row.kl_type
    coef = config.kl.coef if config.kl.coef is not None else row.kl_coef
    if coef and kind is None:
        raise NovaError(
            f"kl.coef={coef:g} without a place for it, and algo={row.name} has none",
            where="kl.type",
            fix="add kl.type=loss, reward or advantage",
        )
    if config.kl.type is not None and config.kl.coef is None and not coef:
        raise NovaError(
            f"kl.type={kind} with coefficient 0 does nothing",
            where="kl.coef",
            fix="set kl.coef above 0, or leave kl.type out",
        )
    same_place = kind == row.kl_type
    estimator = config.kl.estimator or (row.kl_estimator if same_place else "k2" if kind == "loss" else "k1")
    return {"kl_type": kind, "kl_coef": coef, "kl_estimator": estimator}


def _check(merged: Algorithm, config: RLConfig) -> None:
    alone = config.responses_per_prompt == 1
    if alone and merged.estimator in ("group", "leave_one_out"):
        raise NovaError(
            f"algo={merged.name} compares the answers to one prompt, and with one answer there is nothing to compare",
            where="responses_per_prompt",
            fix="use 2 or more, or algo=reinforce adv.estimator=mean",
        )
    if merged.estimator != "ema" and config.adv.ema_beta != 0.9:
        raise NovaError(
            f"adv.estimator={merged.estimator} keeps no moving average",
            where="adv.ema_beta",
            fix="use adv.estimator=ema",
        )
    if merged.estimator != "group" and merged.norm_std:
        raise NovaError(
            f"adv.estimator={merged.estimator} has no group whose deviation to divide by",
            where="adv.norm_std",
            fix="use adv.estimator=group, or adv.whiten=true",
        )
    if alone and merged.dynamic_sampling:
        raise NovaError(
            "with one answer a prompt no group varies, and all would be dropped",
            where="dynamic_sampling.enabled",
            fix="use responses_per_prompt=2 or more, or dynamic_sampling.enabled=false",
        )
    if merged.kl_type == "loss" and merged.kl_estimator == "k1":
        raise NovaError(
            "k1 as a loss has zero gradient on average", where="kl.estimator", fix="use k2 or k3, or kl.type=reward"
        )


@dataclass(frozen=True, slots=True)
class SFTPlan:
    """What a supervised run will do."""

    task: Task | None
    lr: float


def resolve_sft(config: SFTConfig) -> SFTPlan:
    """The task and the learning rate."""
    task = find_task(config.task, dict(config.task_options)) if config.task else None
    return SFTPlan(task, config.optim.lr or (SMALL_SFT_LR if is_small(config.model) else LARGE_SFT_LR))
