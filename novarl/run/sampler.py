"""From prompts to rollouts: one episode per sample, all of them concurrently in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from novarl.core.event_loop import EventLoop
from novarl.core.seeds import derive
from novarl.core.types import Engine, Env, Prompt, Role, Rollout, Sampling, Tokenizer
from novarl.distributed.shard import gather
from novarl.engines.local.engine import LocalEngine
from novarl.engines.local.recompute import RecomputeEngine
from novarl.envs.episode import run_episode
from novarl.models.load import Policy
from novarl.models.plain import PlainModel


def local_engine(policy: Policy, *, max_batch: int = 256) -> LocalEngine | RecomputeEngine:
    """An engine in this process, on the policy's own weights; for a module of the user's own, one without a cache. For
    a sharded policy it is on the whole copy of each rank: ranks sample different numbers of tokens."""
    about: dict[str, Any] = {"eos_ids": policy.eos_ids, "context": policy.context, "max_batch": max_batch}
    if isinstance(policy.model, PlainModel):
        return RecomputeEngine(policy.model, policy.tokenizer, **about)
    return LocalEngine(
        gather(policy.model),
        policy.tokenizer,
        pad_id=policy.tokenizer.pad_token_id,
        compute_dtype=policy.compute_dtype if policy.compute_dtype.itemsize == 2 else None,
        **about,
    )


@dataclass(frozen=True, slots=True)
class Sampler:
    """Runs episodes. Each has its own random stream for (seed, purpose, step, group, prompt, sample), so results do not
    depend on the ranks or on other requests, and a prompt that occurs twice in a step gets different answers."""

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
    loop: EventLoop = field(default_factory=EventLoop)

    def train(
        self, asked: Sequence[tuple[int, Prompt]], step: int, ended: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """`samples` rollouts of every (group, prompt), and a greedy one if needed; `ended` is called with each."""
        return self.loop.run(self.rollouts(asked, step, ended))

    async def rollouts(
        self, asked: Sequence[tuple[int, Prompt]], step: int, ended: Callable[[Rollout], None] | None = None
    ) -> list[Rollout]:
        """The same as `train`, inside the event loop."""
        wanted: list[tuple[int, Prompt, int, Sampling, Role]] = []
        for group, prompt in asked:
            sampling = replace(self.sampling, seed=derive(self.seed, "rollout", step, group))
            wanted += [(group, prompt, index, sampling, "train") for index in range(self.samples)]
        if self.greedy_twin:
            greedy = replace(self.sampling, temperature=0.0)
            wanted += [(group, prompt, 0, greedy, "baseline") for group, prompt in asked]
        return await self._all(wanted, ended)

    def evaluate(self, asked: Sequence[tuple[int, Prompt]], samples: int, sampling: Sampling) -> list[Rollout]:
        """`samples` rollouts of every prompt, with a different random stream than training."""
        sampling = replace(sampling, seed=derive(self.seed, "evaluate"))
        return self.loop.run(
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
