"""`novarl dpo`: a policy learns from preferences directly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from novarl.build.judge import SHOWN, write_samples
from novarl.build.pair_rows import Answers
from novarl.build.preference import Base, Parts, RowLearner, run_preference
from novarl.build.preference_plan import PreferencePlan, resolve_dpo
from novarl.build.sampling import greedy_sampler
from novarl.build.weights import optim_settings
from novarl.config.preference import DPOConfig
from novarl.core.types import Batch, Prompt, Scored
from novarl.data.pairs import Pair
from novarl.learn.fitting import Splits
from novarl.learn.preference import KTOLearner, PreferenceLearner, answer_sums
from novarl.learn.reward_model import RatioScorer, RewardScorer, rewards_of
from novarl.learn.scorer import Scorer
from novarl.models.heads import RewardOutput
from novarl.models.load import Policy, save

SHOWN_TOKENS = 256
"""The longest answer in samples.md."""


def run_dpo(config: DPOConfig) -> dict[str, Any]:
    """Train, and return what summary.json holds. `status` is "done", or "stopped" after Ctrl-C."""
    plan = resolve_dpo(config)

    def compose(base: Base) -> Parts:
        scored = reward_of_policy(plan, base.scorer)
        return Parts(
            learner=lambda steps: _learner(config, plan, base, steps),
            rewards=lambda batch: rewards_of(scored, batch, base.ranks, config.micro.max_tokens),
            write_model=lambda folder: save(base.policy, folder),
            show=lambda session, rows, found: _show(config, base, session.rundir.path, rows),
        )

    return run_preference(config, plan, compose)


@dataclass(frozen=True, slots=True)
class MeanScorer:
    """beta times the mean log-probability of an answer's tokens [S]: the reward of losses without a reference."""

    scorer: Scorer
    beta: float

    @property
    def device(self) -> torch.device:
        return self.scorer.device

    @property
    def shares(self) -> bool:
        return self.scorer.shares

    @property
    def splits(self) -> Splits:
        return self.scorer.splits

    def __call__(self, batch: Batch) -> RewardOutput:
        logp = self.beta * self.scorer(batch)[0]
        return RewardOutput(answer_sums(batch, logp) / answer_sums(batch, batch.mask.to(logp.dtype)))


def reward_of_policy(plan: PreferencePlan, scorer: Scorer) -> RewardScorer:
    """What the policy, read as a reward model, says of an answer."""
    if plan.reference:
        return RatioScorer(scorer, plan.beta)
    return MeanScorer(scorer, plan.beta)


def _learner(config: DPOConfig, plan: PreferencePlan, base: Base, steps: int) -> RowLearner:
    shared: dict[str, Any] = {
        "beta": plan.beta,
        "optim": optim_settings(config.optim, lr=plan.lr, total=steps),
        "ranks": base.ranks,
        "budget": config.micro.max_tokens,
    }
    if plan.strangers:
        return KTOLearner(base.policy.model, base.scorer, **shared, **plan.options)
    return PreferenceLearner(base.policy.model, base.scorer, loss=plan.loss, options=plan.options, **shared)


def _show(config: DPOConfig, base: Base, folder: Path, rows: Sequence[Answers]) -> None:
    """Write samples.md: what the policy now answers to the first prompts, beside what was preferred."""
    policy = base.policy
    sampler = greedy_sampler(policy, config, max_tokens=SHOWN_TOKENS)
    asked = [(index, _question(row, policy)) for index, row in enumerate(rows[:SHOWN])]
    answers = [Scored(rollout, {}, math.nan) for rollout in sampler.evaluate(asked, 1, sampler.sampling)]
    if base.ranks.rank == 0:
        write_samples(folder / "samples.md", answers)


def _question(row: Answers, policy: Policy) -> Prompt:
    sequence = row.chosen if isinstance(row, Pair) else row.sequence
    begin = sequence.mask.index(True)
    decode: Callable[..., str] = policy.tokenizer.decode
    text, answer = decode(sequence.tokens[:begin]), decode(sequence.tokens[begin:], skip_special_tokens=True)
    wanted = answer if isinstance(row, Pair) or row.label > 0.5 else None
    return Prompt(row.id, sequence.tokens[:begin], ({"role": "user", "content": text},), wanted)
