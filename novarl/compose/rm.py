"""`novarl rm`: trains a reward model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from novarl.compose.lora import BASE
from novarl.compose.preference import PreferenceTraining
from novarl.compose.preference_plan import PreferencePlan, resolve_rm
from novarl.compose.settings import run_settings
from novarl.config.preference import RMConfig
from novarl.core.checkpoint import write_atomic
from novarl.core.errors import visible
from novarl.data.pairs import Pair
from novarl.learn.preference import KTOLearner
from novarl.learn.reward_model import HeadScorer, RatioScorer, RewardModelLearner
from novarl.learn.supervised import OfflineLearner
from novarl.loops.evaluate import Evaluation
from novarl.loops.evaluate_rewards import RewardEvaluation
from novarl.models.forward import backbone, head as language_head
from novarl.models.heads import ValueModel, load_head, save_with_head, with_head
from novarl.models.load import save
from novarl.observe.reliability import draw_reliability
from novarl.rewards.model import SETTINGS
from novarl.run.judge import SHOWN
from novarl.run.lifecycle import Machine, Run
from novarl.run.session import Session


def rm_run(config: RMConfig) -> Run:
    """A run that has not started."""
    plan = resolve_rm(config)
    settings = run_settings(config, threads=config.threads)
    return Run(settings, lambda machine: RMTraining(config, plan, machine))


class RMTraining(PreferenceTraining):
    """Loads and checks everything; nothing is written yet."""

    def __init__(self, config: RMConfig, plan: PreferencePlan, machine: Machine) -> None:
        super().__init__(config, plan, machine)
        if plan.head:
            self.scored = HeadScorer(self._with_head(), compute_dtype=self.policy.compute_dtype)
        else:
            self.scored = RatioScorer(self.scorer, plan.beta)

    def _with_head(self) -> ValueModel:
        """The initial model with a scalar head: a new one, or the head of the checkpoint to resume from."""
        model, checkpoint = with_head(self.policy.model), self.machine.opened.checkpoint
        read = {id(parameter) for parameter in backbone(self.policy.model).parameters()}
        for unread in language_head(self.policy.model):
            if unread is not None and id(unread) not in read:
                unread.requires_grad_(False)
        if checkpoint is not None:
            model.head = load_head(checkpoint.model, self.policy.model)
        return model

    def learner(self) -> OfflineLearner:
        plan, scored, shared = self.plan, self.scored, self.fitted()
        if plan.strangers:
            return KTOLearner(self.policy.model, self.scorer, beta=plan.beta, **shared)
        model = scored.model if isinstance(scored, HeadScorer) else self.policy.model
        return RewardModelLearner(model, scored, loss=plan.loss, **shared, **plan.options)

    def write_model(self, folder: Path) -> None:
        policy, plan = self.policy, self.plan
        settings: dict[str, Any] = {"loss": plan.loss, "plain": self.plain}
        settings["apply_chat_template"] = self.settings.apply_chat_template
        if policy.template_kwargs:
            settings["template_kwargs"] = dict(policy.template_kwargs)
        if isinstance(self.scored, HeadScorer):
            save_with_head(policy, self.scored.model.head, folder)
        else:
            save(policy, folder)
            reference = self.machine.opened.rundir.path / BASE
            settings |= {"beta": plan.beta, "reference": os.path.relpath(reference, folder)}
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")

    def show(self, session: Session, found: Evaluation | None) -> None:
        """Draw the reliability diagram and write samples.md: the first held-out answers with their rewards."""
        if session.ranks.rank != 0 or not isinstance(found, RewardEvaluation):
            return
        folder, rows = session.rundir.path, self.rows.held_out
        (folder / "figures").mkdir(exist_ok=True)
        caption = f"held-out accuracy {found.score:.3f}, ECE {found.ece:.3f}, Brier {found.brier:.3f}, n = {found.n}"
        with session.drawing("the reliability diagram"):
            draw_reliability(folder / "figures" / "reliability.png", found.bins, caption)
        parts = ["# Samples\n\nThe first held-out answers with their rewards after training.\n"]
        given = iter(found.rewards)
        for number, row in enumerate(rows[:SHOWN], start=1):
            if isinstance(row, Pair):
                sides = {"chosen": row.chosen, "rejected": row.rejected}
            else:
                sides = {f"label {row.label:g}": row.sequence}
            parts.append(f"## {number}. {row.id}\n")
            for name, sequence in sides.items():
                text = self.policy.tokenizer.decode(sequence.tokens, skip_special_tokens=False)
                indented = "\n".join(f"    {line}" for line in text.splitlines())
                parts.append(f"{name} (reward {next(given):+.3f}):\n\n{indented}\n")
        write_atomic(folder / "samples.md", visible("\n".join(parts)))
