"""The sampler of a run, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from novarl.compose.rewards import build_env
from novarl.core.event_loop import EventLoop
from novarl.core.types import Engine, Sampling
from novarl.envs.single_turn import SingleTurn
from novarl.models.load import Policy
from novarl.run.sampler import Sampler, local_engine

if TYPE_CHECKING:
    from novarl.compose.resolve import RLPlan
    from novarl.config.base import TrainConfig
    from novarl.config.tree import EvalConfig, RLConfig


def training_sampler(config: RLConfig, plan: RLPlan, policy: Policy, loop: EventLoop) -> Sampler:
    """The sampler of a run, with an engine in this process."""
    return Sampler(
        engine=engine_of(config, policy),
        env=build_env(config),
        tokenizer=policy.tokenizer,
        sampling=Sampling(
            temperature=config.rollout.temperature,
            top_k=config.rollout.top_k,
            top_p=config.rollout.top_p,
            min_p=config.rollout.min_p,
            max_tokens=plan.max_tokens,
            stop=tuple(config.rollout.stop),
            supports=True,
        ),
        max_turns=config.rollout.max_turns,
        context=policy.context,
        apply_chat_template=config.apply_chat_template,
        samples=config.responses_per_prompt,
        seed=config.seed,
        loop=loop,
        greedy_twin="greedy" in plan.algorithm.needs,
        ends=policy.eos_ids,
    )


def greedy_sampler(policy: Policy, config: TrainConfig, loop: EventLoop, *, max_tokens: int) -> Sampler:
    """One greedy single-turn answer per prompt, for the samples and evaluation of offline runs."""
    return Sampler(
        engine=local_engine(policy),
        env=SingleTurn,
        tokenizer=policy.tokenizer,
        sampling=Sampling(temperature=0.0, max_tokens=max_tokens),
        max_turns=1,
        context=policy.context,
        apply_chat_template=config.apply_chat_template,
        samples=1,
        seed=config.seed,
        loop=loop,
        ends=policy.eos_ids,
    )


def engine_of(config: RLConfig | EvalConfig, policy: Policy) -> Engine:
    """The given engine (an `Engine`, or a function that creates one for the policy), otherwise one in this process."""
    given = config.object("engine")
    if given is None:
        return local_engine(policy, max_batch=config.rollout.max_batch)
    return given(policy) if callable(given) and not hasattr(given, "sample") else given
