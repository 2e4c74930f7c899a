"""`novarl dpo`: trains a policy directly on preferences."""

from __future__ import annotations

import math
from collections.abc import Callable

from novarl.compose.pair_rows import Answers
from novarl.compose.preference import PreferenceTraining
from novarl.compose.preference_plan import PreferencePlan, resolve_dpo
from novarl.compose.settings import run_settings
from novarl.config.preference import DPOConfig
from novarl.core.types import Prompt, Scored
from novarl.data.pairs import Pair
from novarl.learn.preference import KTOLearner, PreferenceLearner
from novarl.learn.reward_model import RatioScorer
from novarl.learn.supervised import OfflineLearner
from novarl.loops.evaluate import Evaluation
from novarl.models.load import Policy
from novarl.run.judge import SHOWN, write_samples
from novarl.run.lifecycle import Machine, Run
from novarl.run.session import Session


def dpo_run(config: DPOConfig) -> Run:
    """A run that has not started."""
    plan = resolve_dpo(config)
    settings = run_settings(config, threads=config.threads)
    return Run(settings, lambda machine: DPOTraining(config, plan, machine))


class DPOTraining(PreferenceTraining):
    """Loads and checks everything; nothing is written yet."""

    def __init__(self, config: DPOConfig, plan: PreferencePlan, machine: Machine) -> None:
        super().__init__(config, plan, machine)
        self.scored = RatioScorer(self.scorer, plan.beta, reference=plan.reference)

    def learner(self) -> OfflineLearner:
        plan, shared = self.plan, {"beta": self.plan.beta, **self.fitted()}
        if plan.strangers:
            return KTOLearner(self.policy.model, self.scorer, **shared, **plan.options)
        return PreferenceLearner(self.policy.model, self.scorer, loss=plan.loss, options=plan.options, **shared)

    def show(self, session: Session, found: Evaluation | None) -> None:
        """Write samples.md: answers to the first prompts, with the preferred ones."""
        rows = (self.rows.held_out or self.rows.train)[:SHOWN]
        asked = [(index, _question(row, self.policy)) for index, row in enumerate(rows)]
        answers = self.sampler.evaluate(asked, 1, self.sampler.sampling)
        if session.ranks.rank == 0:
            write_samples(session.rundir.path / "samples.md", [Scored(rollout, {}, math.nan) for rollout in answers])


def _question(row: Answers, policy: Policy) -> Prompt:
    sequence = row.chosen if isinstance(row, Pair) else row.sequence
    begin = sequence.mask.index(True)
    decode: Callable[..., str] = policy.tokenizer.decode
    text, answer = decode(sequence.tokens[:begin]), decode(sequence.tokens[begin:], skip_special_tokens=True)
    wanted = answer if isinstance(row, Pair) or row.label > 0.5 else None
    return Prompt(row.id, sequence.tokens[:begin], ({"role": "user", "content": text},), wanted)
