"""The sampler of a run, from its configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from novarl.compose.rewards import build_env
from novarl.core.event_loop import EventLoop
from novarl.core.types import Engine, Sampling
from novarl.envs.single_turn import SingleTurn
from novarl.models.load import Policy
from novarl.run.sampler import Sampler, local_engine

if TYPE_CHECKING:
    from novarl.compose.resolve import RLPlan
    from novarl.config.base import TrainConfig
    from novarl.config.parts import Sampled
    from novarl.config.tree import EvalConfig, RLConfig


def sampler_of(policy: Policy, config: TrainConfig | EvalConfig, loop: EventLoop, **given: Any) -> Sampler:
    """A sampler with what policy and configuration decide in every kind of run."""
    return Sampler(
        tokenizer=policy.tokenizer,
        context=policy.context,
        apply_chat_template=config.apply_chat_template,
        seed=config.seed,
        loop=loop,
        ends=policy.eos_ids,
        **given,
    )


def sampling_of(section: Sampled, **given: Any) -> Sampling:
    """A section's distribution of tokens."""
    return Sampling(
        temperature=section.temperature, top_k=section.top_k, top_p=section.top_p, min_p=section.min_p, **given
    )


def training_sampler(config: RLConfig, plan: RLPlan, policy: Policy, loop: EventLoop) -> Sampler:
    """The sampler of a run, with an engine in this process."""
    section = config.rollout
    return sampler_of(
        policy,
        config,
        loop,
        engine=engine_of(config, policy),
        env=build_env(config),
        sampling=sampling_of(section, max_tokens=plan.max_tokens, stop=tuple(section.stop), supports=True),
        max_turns=section.max_turns,
        samples=config.responses_per_prompt,
        greedy_twin="greedy" in plan.algorithm.needs,
    )


def greedy_sampler(policy: Policy, config: TrainConfig, loop: EventLoop, *, max_tokens: int) -> Sampler:
    """One greedy single-turn answer per prompt, for the samples and evaluation of offline runs."""
    return sampler_of(
        policy,
        config,
        loop,
        engine=local_engine(policy),
        env=SingleTurn,
        sampling=Sampling(temperature=0.0, max_tokens=max_tokens),
        max_turns=1,
        samples=1,
    )


def engine_of(config: RLConfig | EvalConfig, policy: Policy) -> Engine:
    """The given engine (an `Engine`, or a function that creates one for the policy), otherwise one in this process."""
    given = config.object("engine")
    if given is None:
        return local_engine(policy, max_batch=config.rollout.max_batch)
    return given(policy) if callable(given) and not hasattr(given, "sample") else given
