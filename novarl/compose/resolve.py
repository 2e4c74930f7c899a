"""From a configuration to plain values: nulls are resolved by the algorithm and the task.

This module does not import torch, so `novarl explain` is fast.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from novarl.algos.axes import CORRECTIONS, SURROGATES, estimator
from novarl.algos.named import ALGORITHMS, Algorithm
from novarl.compose.coefficients import ADAPTIVE_KEYS, constraints, entropy_controller, kl_controller
from novarl.compose.merge import constrains_kl, given_in, merge
from novarl.config.adapting import MEASURED
from novarl.config.base import Config
from novarl.config.tree import BUILT_IN_MODELS, RLConfig, SFTConfig
from novarl.control.controller import Controller
from novarl.core.errors import NovaError, nearest
from novarl.tasks.registry import Task, find_task

SMALL_WIDTH = 256
"""Models up to this hidden size (the built-in ones have 128 and 256) use higher learning rates."""
SMALL_MODULE = 20_000_000
"""Maximum number of parameters of a small module that does not state its hidden size."""
SMALL_RL_LR, LARGE_RL_LR = 3e-4, 1e-6
SMALL_SFT_LR, LARGE_SFT_LR = 1e-3, 1e-5
SMALL_CRITIC_LR, LARGE_CRITIC_LR = 1e-3, 5e-6
PRIME_SHARE = 0.1
"""The learning rate of process rewards relative to the policy's."""
PRIME_BETA = 0.05
"""Of process rewards that start as the reference; those of `prime.model` have the one they were trained with."""
COMPARED = ("grpo", "rloo", "ppo", "reinforce", "remax")
"""Algorithms to suggest for a comparison: the first that accepts the run's settings."""
DATA_MAX_TOKENS = 256
"""Default maximum answer length for a data file."""
DATA_SPLIT = "\n"
"""Default end of a step for a data file."""


@dataclass(frozen=True, slots=True)
class RLPlan:
    """What a reinforcement-learning run will do, every null filled in. `values` holds the keys that this run reads and
    that are null or depend on the algorithm."""

    algorithm: Algorithm
    task: Task | None
    warmup: int
    lr: float
    critic_lr: float
    prime_lr: float
    prime_beta: float | None
    max_tokens: int
    split: str
    correction: str | None
    needs_reference: bool
    needs_old_logp: bool
    values: Mapping[str, Any] = field(default_factory=dict)


def resolve_rl(config: RLConfig) -> RLPlan:
    """Merge the algorithm's row with the configuration. NovaError for contradictions and unstable controllers."""
    if config.algo not in ALGORITHMS:
        raise NovaError(f"unknown algorithm {config.algo!r}", where="algo", fix=nearest(config.algo, ALGORITHMS))
    task = find_task(config.task, dict(config.task_options)) if config.task else None
    algorithm = merge(ALGORITHMS[config.algo], config)
    updates = config.updates_per_rollout or algorithm.updates_per_rollout
    algorithm = replace(algorithm, updates_per_rollout=updates)
    if updates % config.epochs_per_rollout:
        raise NovaError(
            f"{updates} updates cannot be split evenly into {config.epochs_per_rollout} epochs",
            where="epochs_per_rollout",
            fix="make updates_per_rollout a multiple of epochs_per_rollout",
        )
    trajectories = config.prompts_per_rollout * config.responses_per_prompt
    if updates // config.epochs_per_rollout > trajectories:
        raise NovaError(
            f"{trajectories} answers per step are too few for the {updates} updates of algo={config.algo}",
            where="updates_per_rollout",
            fix="lower updates_per_rollout, or raise prompts_per_rollout",
        )
    fresh = config.model in BUILT_IN_MODELS
    warmup = config.warmup if config.warmup is not None else (task.warmup if task and fresh else 0)
    _check_critic(algorithm, updates, config)
    _check_objectives(config, task)
    controller = kl_controller(config, algorithm)
    entropy_controller(config, algorithm)
    constraints(config)
    correction = config.correction.type or ("token" if config.correction.tis_max is not None else None)
    if config.rollout.staleness and correction is None and not estimator(algorithm.estimator).weighted:
        correction = "token"
    objectives = set(config.multi_objective.objectives) if config.multi_objective.enabled else set()
    split = config.vine.split if config.vine.split is not None else task.split if task else DATA_SPLIT
    lr = config.optim.lr or usual_lr(model_in(config), task)
    plan = RLPlan(
        algorithm=algorithm,
        task=task,
        warmup=warmup,
        lr=lr,
        critic_lr=config.critic.lr or (SMALL_CRITIC_LR if is_small(model_in(config)) else LARGE_CRITIC_LR),
        prime_lr=PRIME_SHARE * lr if config.prime.lr is None else config.prime.lr,
        prime_beta=config.prime.beta or (None if config.prime.model else PRIME_BETA),
        max_tokens=config.rollout.max_tokens or usual_max_tokens(task),
        split=split,
        correction=correction,
        needs_reference="reference" in algorithm.needs
        or config.kl.reference != "start"
        or constrains_kl(config)
        or "kl" in objectives,
        # A correction alone needs none: a rollout's only update gets them from its own forward pass.
        needs_old_logp="old_logp" in algorithm.needs
        or config.constraint_optimization.enabled
        or bool(objectives & {"kl", "entropy"}),
    )
    adapting = _controller(controller, config) if config.adaptive_kl.enabled else {}
    return replace(plan, values=_values(config, plan) | adapting)


def _values(config: RLConfig, plan: RLPlan) -> dict[str, Any]:
    """The keys that the algorithm and the task decide, by their values in this run."""
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
        "adv.estimator": row.estimator,
        "adv.norm_std": False,
        "adv.whiten": row.whiten,
    }
    if row.surrogate in SURROGATES:
        values |= row.options
    else:  # whether a function of the user's own reads the bounds is not known before it is loaded
        values |= {key: row.options[key] for key in estimator(row.estimator).reads}
    if estimator(row.estimator).temporal:
        values["adv.values"] = row.values
    if row.values == "critic" and not config.critic.shared:
        values |= {"critic.lr": plan.critic_lr}
        values |= {"critic.updates_per_rollout": config.critic.updates_per_rollout or row.updates_per_rollout}
    if row.values == "continuations" and plan.split:
        values["vine.split"] = plan.split
    if "process" in row.needs:
        values |= {"prime.lr": plan.prime_lr} | ({"prime.beta": plan.prime_beta} if plan.prime_beta else {})
    if plan.correction is not None:
        reads = CORRECTIONS[plan.correction].reads
        values["correction.type"] = plan.correction
        values |= {key: given_in(config, key) or default for key, default in reads.items()}
    if plan.needs_reference:
        values |= {"kl.type": row.kl_type, "kl.coef": row.kl_coef}
        values["kl.estimator"] = row.kl_estimator if row.kl_type else None
    return values


def _controller(controller: Controller, config: RLConfig) -> dict[str, Any]:
    """The settings of what moves the KL coefficient."""
    known = type(config.adaptive_kl).model_fields
    named = {spec.name: ADAPTIVE_KEYS.get(spec.name, spec.name) for spec in fields(controller) if spec.init}
    return {
        f"adaptive_kl.{key}": controller.initial if name == "coef" else getattr(controller, name)
        for name, key in named.items()
        if key in known
    }


def other_algorithm(config: RLConfig) -> str | None:
    """An algorithm to compare with that accepts all other settings, or None: for example, not every algorithm accepts a
    critic's settings or a single answer per prompt."""
    for name in COMPARED:
        if name == config.algo:
            continue
        try:
            resolve_rl(config.model_copy(update={"algo": name}))
        except NovaError:
            continue
        return name
    return None


def _check_critic(row: Algorithm, updates: int, config: RLConfig) -> None:
    own = config.critic.updates_per_rollout
    if row.values == "critic" and own is not None and own % updates:
        raise NovaError(
            f"the critic's {own} updates are not a multiple of the policy's {updates}",
            where="critic.updates_per_rollout",
            fix="make it a multiple of updates_per_rollout",
        )
    if row.values == "critic" and config.critic.warmup_steps >= config.steps:
        raise NovaError(
            f"the policy would not be trained in any of the {config.steps} steps",
            where="critic.warmup_steps",
            fix="set it below steps",
        )
    if row.values == "continuations" and config.rollout.max_turns > 1:
        raise NovaError(
            "continuations do not support several turns",
            where="adv.values",
            fix="use adv.values=critic, or rollout.max_turns=1",
        )


def _check_objectives(config: RLConfig, task: Task | None) -> None:
    section = config.multi_objective
    if not section.enabled:
        return
    if config.reward is not None:
        rewards = tuple(config.reward)
    else:
        rewards = tuple(task.rewards()) if task is not None and config.rollout.env_path is None else ("reward",)
    known = tuple(dict.fromkeys((*rewards, "reward", *MEASURED)))
    for name in section.objectives:
        whole, _, part = name.partition("/")
        if name not in known and not (part and whole in rewards):  # a reward's parts are only known at run time
            raise NovaError(
                "this run has no reward or measurement of that name",
                where=f"multi_objective.objectives.{name}",
                fix=nearest(name, known),
            )


def usual_lr(model: Any, task: Task | None) -> float:
    """The default learning rate of a policy."""
    if not is_small(model):
        return LARGE_RL_LR
    return task.rl_lr if task else SMALL_RL_LR


def usual_max_tokens(task: Task | None) -> int:
    """The default maximum answer length."""
    return task.max_tokens if task else DATA_MAX_TOKENS


def model_in(config: Config) -> Any:
    """The model of a configuration: the given object, otherwise its name."""
    given = config.object("model")
    return config.model if given is None else given


def is_small(model: Any) -> bool:
    """Whether a model is about as small as the built-in ones, by the hidden size in its configuration (or that of its
    adapter's base), or by the number of parameters of a module without a configuration."""
    if not isinstance(model, str):
        stated = getattr(getattr(model, "config", None), "hidden_size", None)
        if isinstance(stated, int):
            return stated <= SMALL_WIDTH
        return sum(parameter.numel() for parameter in model.parameters()) <= SMALL_MODULE
    if model in BUILT_IN_MODELS:
        return True
    try:
        if (adapter := Path(model) / "adapter_config.json").is_file():
            model = str(json.loads(adapter.read_text()).get("base_model_name_or_path"))
        width = json.loads((Path(model) / "config.json").read_text()).get("hidden_size")
    except (OSError, ValueError):
        return False
    return isinstance(width, int) and width <= SMALL_WIDTH


@dataclass(frozen=True, slots=True)
class SFTPlan:
    """The resolved settings of a supervised run."""

    task: Task | None
    lr: float


def resolve_sft(config: SFTConfig) -> SFTPlan:
    """The task and the learning rate."""
    task = find_task(config.task, dict(config.task_options)) if config.task else None
    return SFTPlan(task, config.optim.lr or (SMALL_SFT_LR if is_small(model_in(config)) else LARGE_SFT_LR))
