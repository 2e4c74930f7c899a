"""From prompts to rollouts: one episode for each sample, all of them at once in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from novarl.build.rewards import build_env
from novarl.core.seeds import derive
from novarl.core.types import Engine, Env, Prompt, Role, Rollout, Sampling, Tokenizer
from novarl.engines.local import LocalEngine
from novarl.envs.episode import run_episode
from novarl.envs.single_turn import SingleTurn
from novarl.models.load import Policy

if TYPE_CHECKING:
    from novarl.build.resolve import RLPlan
    from novarl.config.base import TrainConfig
    from novarl.config.tree import RLConfig


def local_engine(policy: Policy, *, max_batch: int = 256) -> LocalEngine:
    """An engine in this process, on the policy's own weights."""
    return LocalEngine(
        policy.model,
        policy.tokenizer,
        eos_ids=policy.eos_ids,
        context=policy.context,
        max_batch=max_batch,
        pad_id=policy.tokenizer.pad_token_id,
        compute_dtype=policy.compute_dtype if policy.compute_dtype.itemsize == 2 else None,
    )


@dataclass(frozen=True, slots=True)
class Sampler:
    """Runs episodes. The random stream of each belongs to (seed, purpose, step, group, prompt, sample), so neither the
    ranks nor the other requests change what it says, and a prompt that comes twice in a step is answered anew."""

    engine: Engine
    env: Callable[[], Env]
    tokenizer: Tokenizer
    sampling: Sampling
    max_turns: int
    context: int
    apply_chat_template: bool
    samples: int
    seed: int
    greedy_twin: bool = False
    ends: tuple[int, ...] | None = None

    def train(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Rollout]:
        """`samples` rollouts of every (group, prompt), and its greedy one where a baseline needs it."""
        return asyncio.run(self.rollouts(asked, step))

    async def rollouts(
        self, asked: Sequence[tuple[int, Prompt]], step: int, ended: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """As `train`; `ended` is told of each as it ends."""
        wanted: list[tuple[int, Prompt, int, Sampling, Role]] = []
        for group, prompt in asked:
            sampling = replace(self.sampling, seed=derive(self.seed, "rollout", step, group))
            wanted += [(group, prompt, index, sampling, "train") for index in range(self.samples)]
        if self.greedy_twin:
            greedy = replace(self.sampling, temperature=0.0)
            wanted += [(group, prompt, 0, greedy, "baseline") for group, prompt in asked]
        return await self._all(wanted, ended)

    def evaluate(self, asked: Sequence[tuple[int, Prompt]], samples: int, sampling: Sampling) -> list[Rollout]:
        """`samples` rollouts of every prompt, by another stream than training's."""
        sampling = replace(sampling, seed=derive(self.seed, "evaluate"))
        return asyncio.run(
            self._all(
                [(group, prompt, index, sampling, "train") for group, prompt in asked for index in range(samples)]
            )
        )

    async def _all(
        self,
        wanted: Sequence[tuple[int, Prompt, int, Sampling, Role]],
        ended: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        async def episode(group: int, prompt: Prompt, index: int, sampling: Sampling, role: Role) -> Rollout:
            rollout = await run_episode(
                self.engine,
                self.env(),
                prompt,
                tokenizer=self.tokenizer,
                sampling=sampling,
                group=group,
                index=index,
                role=role,
                max_turns=self.max_turns,
                context=self.context,
                apply_chat_template=self.apply_chat_template,
                ends=self.ends,
            )
            if ended is not None:
                ended(rollout)
            return rollout

        return list(await asyncio.gather(*(episode(*one) for one in wanted)))


def training_sampler(config: RLConfig, plan: RLPlan, policy: Policy) -> Sampler:
    """The sampler of a run, with an engine in this process."""
    return Sampler(
        engine=local_engine(policy, max_batch=config.rollout.max_batch),
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
        greedy_twin="greedy" in plan.algorithm.needs,
        ends=policy.eos_ids,
    )


def greedy_sampler(policy: Policy, config: TrainConfig, *, max_tokens: int) -> Sampler:
    """One greedy answer of one turn to each prompt: how runs that learn from data show and measure what they learnt."""
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
        ends=policy.eos_ids,
    )
