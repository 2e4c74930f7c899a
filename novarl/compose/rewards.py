"""Rewards and environments by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from novarl.compose.trust import trust_of
from novarl.config.objects import is_object
from novarl.config.tree import EvalConfig, RLConfig
from novarl.core.errors import NovaError
from novarl.core.types import Env, Prompt
from novarl.envs.interact import load_interact
from novarl.envs.single_turn import SingleTurn
from novarl.rewards.compose import RewardSet
from novarl.rewards.registry import find_reward
from novarl.rewards.services import Progress
from novarl.rewards.user_file import from_function
from novarl.rewards.verdict import Scorer
from novarl.tasks.registry import Task


def build_rewards(
    config: RLConfig | EvalConfig, task: Task | None, *sets: Sequence[Prompt], device: torch.device
) -> RewardSet:
    """The configured rewards, otherwise those of the environment's file, otherwise the task's. A reward that needs a
    column missing from one of the `sets` of prompts is refused. Reward models run on `device`."""
    limit = config.rollout.reward_timeout
    if config.reward is None and config.rollout.env_path is None:
        assert task is not None
        return RewardSet(task.rewards(), task.weights, time_limit=limit)
    if config.reward is not None:
        sources = {name: (spec.source, spec.options) for name, spec in config.reward.items()}
        weights = {name: spec.weight for name, spec in config.reward.items()}
        if config.rollout.env_path is None and any(source == "environment" for source, _ in sources.values()):
            what, fix = "no environment is configured", "set rollout.env_path"
            raise NovaError(what, where="reward=environment", fix=fix)
    else:
        if config.object("rollout.env_path") is not None:
            fix = "set reward, for example reward='environment' if the environment returns rewards"
            raise NovaError("an environment object has no reward function", where="env", fix=fix)
        sources, weights = {"reward": (f"{config.rollout.env_path}:reward_fn", {})}, {"reward": 1.0}
    progress = Progress(0, config.steps) if isinstance(config, RLConfig) else Progress()
    columns, workers = columns_of(*sets), config.rollout.reward_workers
    found: dict[str, Scorer] = {}
    for name, (source, options) in sources.items():
        if (function := config.object(f"reward.{name}") or config.object(f"reward.{name}.source")) is not None:
            found[name] = from_function(function, time_limit=limit, columns=columns, progress=progress)
            continue
        if is_object(source):
            what = f"{source} was a function of the Python program that started the run"
            raise NovaError(what, where=f"reward.{name}", fix="resume in Python, or set it to file.py:name")
        found[name] = find_reward(
            source,
            time_limit=limit,
            workers=workers,
            columns=columns,
            memory=_memory(config),
            device=str(device),
            trust=trust_of(config),
            options=options,
            progress=progress,
        )
    return RewardSet(found, weights, time_limit=limit, progress=progress)


def columns_of(*sets: Sequence[Prompt]) -> set[str] | None:
    """The columns besides the prompt that all datasets have, nested ones by path; None if there are no prompts."""
    found = [
        {name for prompt in prompts for name in _paths(prompt.extra)}
        | {"answer" for prompt in prompts if prompt.answer is not None}
        for prompts in sets
        if prompts
    ]
    return set.intersection(*found) if found else None


def _paths(columns: Mapping[str, Any]) -> Iterator[str]:
    for name, value in columns.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in value if value[inner] is not None)


def build_env(config: RLConfig | EvalConfig) -> Callable[[], Env]:
    """The environment: single-turn, or `interact` of the environment's file, which may be missing for a single turn."""
    if config.rollout.env_path is None:
        return SingleTurn
    if (given := config.object("rollout.env_path")) is not None:
        return given  # type: ignore[no-any-return]
    return load_interact(
        config.rollout.env_path,
        time_limit=config.rollout.reward_timeout,
        memory=_memory(config),
        needed=config.rollout.max_turns > 1 or config.reward is not None,
    )


def _memory(config: RLConfig | EvalConfig) -> int | None:
    """Memory limit in bytes of a process that runs a user's file."""
    limit = config.rollout.reward_memory
    return None if limit is None else limit * 1_000_000


def close_env(env: Callable[[], Env]) -> None:
    """End the environment's process, if it has one."""
    if hasattr(env, "close"):
        env.close()
