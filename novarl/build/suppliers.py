"""Who supplies what an estimator needs beyond rewards: a critic, continuations, process rewards."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from novarl.build.resolve import PRIME_BETA
from novarl.build.weights import optim_settings
from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.core.types import Completion, Rollout, Sampling, Sequence as TokenSequence
from novarl.data.render import turn_text
from novarl.envs.episode import UNSAMPLED
from novarl.learn.critic import Critic, CriticSettings, SharedCritic, ValueScorer
from novarl.learn.policy import SharedValue
from novarl.learn.prime import PrimeSettings, ProcessRewards
from novarl.learn.supplier import Supplier
from novarl.learn.vine import Continuations, Estimate, State
from novarl.models.heads import ScalarHead, ValueModel, with_head
from novarl.models.lora import sibling

if TYPE_CHECKING:
    from novarl.build.rl import Online


def shared_value(run: Online) -> SharedValue | None:
    """The value head on the policy's own trunk, where the critic is to have no model of its own."""
    section = run.config.critic
    if run.plan.algorithm.values != "critic" or not section.shared:
        return None
    return SharedValue(with_head(run.policy.model).head, section.coef, section.clip)


def build_supplier(run: Online, value: SharedValue | None) -> Supplier | None:
    """What the algorithm's row asks for."""
    row = run.plan.algorithm
    if row.process:
        return _process_rewards(run)
    if row.values == "continuations":
        return Continuations(
            Continue(run, samples=run.config.vine.samples),
            lambda tokens: run.policy.tokenizer.decode(tokens, skip_special_tokens=True),
            split=run.plan.split,
            most=run.config.vine.max_steps,
            ranks=run.ranks,
        )
    if row.values == "critic":
        return _critic(run, value)
    return None


def _critic(run: Online, value: SharedValue | None) -> Supplier:
    config, row = run.config, run.plan.algorithm
    budget, bootstrap = config.micro.max_tokens, config.adv.bootstrap_truncated
    if value is not None:
        assert isinstance(value.head, ScalarHead)
        model = ValueModel(run.policy.model, value.head)
        scorer = ValueScorer(
            model, layout=run.scorer.layout, compute_dtype=run.scorer.compute_dtype, splits=run.scorer.splits
        )
        return SharedCritic(scorer, bootstrap=bootstrap, ranks=run.ranks, budget=budget)
    updates = config.critic.updates_per_rollout or row.updates_per_rollout
    settings = CriticSettings(
        optim=optim_settings(config.optim, lr=run.plan.critic_lr, total=config.steps * updates),
        passes=updates // row.updates_per_rollout,
        clip=config.critic.clip,
        bootstrap=bootstrap,
    )
    model = with_head(run.policy.model, separate=True)
    scorer = ValueScorer(model, layout=run.scorer.layout, compute_dtype=run.scorer.compute_dtype)
    return Critic(scorer, settings, ranks=run.ranks, budget=budget)


def _process_rewards(run: Online) -> ProcessRewards:
    section, named = run.config.prime, run.process_model
    optim = optim_settings(run.config.optim, lr=run.plan.prime_lr, total=run.config.steps)
    beta = run.plan.prime_beta or (named.beta if named is not None else PRIME_BETA)
    settings = PrimeSettings(beta=beta, threshold=section.threshold, optim=optim)
    # At the policy's temperature, as the reference is scored: phi = ref must give rewards of 0.
    if named is None:
        scorer, reference = replace(run.scorer, model=sibling(run.policy.model)), None
    else:
        scorer, reference = replace(run.scorer, model=named.model), replace(run.scorer, model=named.reference)
        named.model.requires_grad_(section.lr != 0.0)
    return ProcessRewards(scorer, settings, reference=reference, ranks=run.ranks, budget=run.config.micro.max_tokens)


class Continue:
    """Estimates states: `samples` continuations of each, sampled and scored as answers are."""

    def __init__(self, run: Online, *, samples: int) -> None:
        self.engine, self.judge, self.tokenizer = run.engine, run.judge, run.policy.tokenizer
        self.sampling, self.seed = run.sampler.sampling, run.config.seed
        self.samples, self.most = samples, run.plan.max_tokens
        self.ends, self.apply_chat_template = run.policy.eos_ids, run.config.apply_chat_template

    def __call__(self, states: Sequence[State], step: int) -> list[Estimate]:
        sampling = replace(self.sampling, seed=derive(self.seed, "continue", step), supports=False)
        rollouts, spent = asyncio.run(self._sample(states, sampling))
        rewards: list[list[float]] = [[] for _ in states]
        errors: list[list[str]] = [[] for _ in states]
        for item in self.judge.score(rollouts):
            if item.reward is not None:
                rewards[item.rollout.group].append(item.reward)
            else:
                errors[item.rollout.group].append(str(item.error))
        for state, seen, failures in zip(states, rewards, errors, strict=True):
            if not seen:
                first = failures[0].partition("\n")[0]  # a traceback may follow it
                raise NovaError(
                    f"the reward failed for every continuation of an answer to prompt {state.prompt.id}: {first}",
                    where="reward",
                    fix="mend the reward function",
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
        """The whole answer, as a reward sees it: of its tokens all are the policy's, those that the state has too."""
        asked, answer = state.prompt.tokens, (*state.answer, *completion.tokens)
        ended = completion.finish_reason == "stop" and answer[-1] in self.ends
        text = turn_text(self.tokenizer, asked, answer, ended=ended, apply_chat_template=self.apply_chat_template)
        # It is never trained on: how likely its tokens were, and by which weights, nobody reads.
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
