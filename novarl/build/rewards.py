"""Rewards and environments by name."""

from __future__ import annotations

from collections.abc import Callable

from novarl.config.tree import EvalConfig, RLConfig
from novarl.core.types import Env
from novarl.envs.interact import load_interact
from novarl.envs.single_turn import SingleTurn
from novarl.rewards.compose import RewardSet
from novarl.rewards.registry import find_reward
from novarl.tasks.registry import Task


def build_rewards(config: RLConfig | EvalConfig, task: Task | None) -> RewardSet:
    """The rewards that the configuration names, else those of the environment's file, else the task's."""
    limit = config.rollout.reward_timeout
    if config.reward is not None:
        found = {name: find_reward(spec.source, time_limit=limit) for name, spec in config.reward.items()}
        return RewardSet(found, {name: spec.weight for name, spec in config.reward.items()}, time_limit=limit)
    if config.rollout.env_path is not None:
        return RewardSet(
            {"reward": find_reward(f"{config.rollout.env_path}:reward_fn", time_limit=limit)}, time_limit=limit
        )
    assert task is not None
    return RewardSet(task.rewards(), task.weights, time_limit=limit)


def build_env(config: RLConfig | EvalConfig) -> Callable[[], Env]:
    """What answers the policy: nobody, or `interact` of the environment's file."""
    if config.rollout.env_path is None:
        return SingleTurn
    return load_interact(config.rollout.env_path)
