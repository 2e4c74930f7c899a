"""Values from continuations: VinePPO estimates a state by the mean reward of answers that continue from it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev

from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.core.types import Completion, Rollout, Sampling, Sequence as TokenSequence
from novarl.data.render import turn_text
from novarl.envs.episode import UNSAMPLED
from novarl.learn.vine import Estimate, State
from novarl.run.judge import Judge
from novarl.run.sampler import Sampler


class Continue:
    """Estimates states from `samples` continuations each, sampled and scored like answers."""

    def __init__(
        self,
        sampler: Sampler,
        judge: Judge,
        *,
        samples: int,
        max_tokens: int,
        ends: Sequence[int],
        apply_chat_template: bool,
    ) -> None:
        self.engine, self.judge, self.tokenizer, self.loop = sampler.engine, judge, sampler.tokenizer, sampler.loop
        self.sampling, self.seed = sampler.sampling, sampler.seed
        self.samples, self.most = samples, max_tokens
        self.ends, self.apply_chat_template = ends, apply_chat_template

    def __call__(self, states: Sequence[State], step: int) -> list[Estimate]:
        sampling = replace(self.sampling, seed=derive(self.seed, "continue", step), supports=False)
        rollouts, spent = self.loop.run(self._sample(states, sampling))
        rewards: list[list[float]] = [[] for _ in states]
        errors: list[list[str]] = [[] for _ in states]
        for item in self.judge.score(rollouts):
            if item.reward is not None:
                rewards[item.rollout.group].append(item.reward)
            else:
                errors[item.rollout.group].append(str(item.error))
        for state, seen, failures in zip(states, rewards, errors, strict=True):
            if not seen:
                first = failures[0].partition("\n")[0]  # a traceback may follow
                raise NovaError(
                    f"the reward failed for every continuation of an answer to prompt {state.prompt.id}: {first}",
                    where="reward",
                    fix="fix the reward function",
                )
        return [Estimate(fmean(seen), pstdev(seen), tokens) for seen, tokens in zip(rewards, spent, strict=True)]

    async def _sample(self, states: Sequence[State], sampling: Sampling) -> tuple[list[Rollout], list[int]]:
        async def one(number: int, state: State, index: int) -> tuple[Rollout, int]:
            answered = len(state.answer)
            limited = replace(sampling, max_tokens=max(1, self.most - answered), answered=answered)
            mark = hashlib.sha256(repr(state.answer).encode()).hexdigest()[:16]
            key = f"{state.prompt.id}/from-{mark}/{index}"
            completion = await self.engine.sample((*state.prompt.tokens, *state.answer), limited, key=key)
            return self._rollout(number, state, index, completion), len(completion.tokens)

        wanted = [one(number, state, index) for number, state in enumerate(states) for index in range(self.samples)]
        done = await asyncio.gather(*wanted)
        spent = [0] * len(states)
        for rollout, tokens in done:
            spent[rollout.group] += tokens
        return [rollout for rollout, _ in done], spent

    def _rollout(self, number: int, state: State, index: int, completion: Completion) -> Rollout:
        """The whole answer as a reward sees it. All of its tokens, including those of the state, are the policy's."""
        asked, answer = state.prompt.tokens, (*state.answer, *completion.tokens)
        ended = completion.finish_reason == "stop" and answer[-1] in self.ends
        text = turn_text(self.tokenizer, asked, answer, ended=ended, apply_chat_template=self.apply_chat_template)
        # Never trained on, so log-probabilities and weight versions are not needed.
        zeros = (0.0,) * (len(asked) + len(answer))
        sequence = TokenSequence(
            tokens=(*asked, *answer),
            mask=(*(False for _ in asked), *(True for _ in answer)),
            behavior_logp=zeros,
            kept_logmass=zeros,
            versions=(UNSAMPLED,) * len(zeros),
        )
        return Rollout(
            prompt=state.prompt,
            group=number,
            index=index,
            sequences=(sequence,),
            messages=(*state.prompt.messages, {"role": "assistant", "content": text}),
            text=text,
            status="truncated" if completion.finish_reason == "length" else "done",
            finish_reason=completion.finish_reason,
        )
