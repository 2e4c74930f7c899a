"""`novarl rm`: a reward model learns what is better."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from novarl.build.judge import SHOWN
from novarl.build.lora import BASE
from novarl.build.pair_rows import Answers
from novarl.build.preference import Base, Parts, RowLearner, run_preference
from novarl.build.preference_plan import PreferencePlan, resolve_rm
from novarl.build.session import Session
from novarl.build.weights import optim_settings
from novarl.config.preference import RMConfig
from novarl.core.checkpoint import write_atomic
from novarl.core.errors import visible
from novarl.data.pairs import Pair
from novarl.learn.preference import KTOLearner
from novarl.learn.reward_model import HeadScorer, RatioScorer, RewardModelLearner, RewardScorer, rewards_of
from novarl.loops.evaluate_rewards import RewardEvaluation
from novarl.models.forward import backbone, head as language_head
from novarl.models.heads import ValueModel, load_head, save_with_head, with_head
from novarl.models.load import save
from novarl.observe.reliability import draw_reliability
from novarl.rewards.model import SETTINGS


def run_rm(config: RMConfig) -> dict[str, Any]:
    """Train, and return what summary.json holds. `status` is "done", or "stopped" after Ctrl-C."""
    plan = resolve_rm(config)

    def compose(base: Base) -> Parts:
        scored: RewardScorer
        if plan.head:
            model = _with_head(base)
            scored = HeadScorer(model, compute_dtype=base.policy.compute_dtype)
        else:
            scored = RatioScorer(base.scorer, plan.beta)

        def write(folder: Path) -> None:
            settings: dict[str, Any] = {"loss": plan.loss, "plain": base.plain}
            settings["apply_chat_template"] = config.apply_chat_template
            if base.policy.template_kwargs:
                settings["template_kwargs"] = dict(base.policy.template_kwargs)
            if isinstance(scored, HeadScorer):
                save_with_head(base.policy, scored.model.head, folder)
            else:
                save(base.policy, folder)
                reference = base.opened.rundir.path / BASE
                settings |= {"beta": plan.beta, "reference": os.path.relpath(reference, folder)}
            (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")

        return Parts(
            learner=lambda steps: _learner(config, plan, base, scored, steps),
            rewards=lambda batch: rewards_of(scored, batch, base.ranks, config.micro.max_tokens),
            write_model=write,
            show=lambda session, rows, found: _show(base, session, rows, found),
        )

    return run_preference(config, plan, compose)


def _with_head(base: Base) -> ValueModel:
    """The starting model with a scalar head: a fresh one, or that of the checkpoint to go on from."""
    model = with_head(base.policy.model)
    read = {id(parameter) for parameter in backbone(base.policy.model).parameters()}
    for unread in language_head(base.policy.model):
        if unread is not None and id(unread) not in read:
            unread.requires_grad_(False)
    if base.opened.checkpoint is not None:
        model.head = load_head(base.opened.checkpoint.model, base.policy.model)
    return model


def _learner(config: RMConfig, plan: PreferencePlan, base: Base, scored: RewardScorer, steps: int) -> RowLearner:
    shared: dict[str, Any] = {
        "optim": optim_settings(config.optim, lr=plan.lr, total=steps),
        "ranks": base.ranks,
        "budget": config.micro.max_tokens,
    }
    if plan.strangers:
        return KTOLearner(base.policy.model, base.scorer, beta=plan.beta, **shared)
    model = scored.model if isinstance(scored, HeadScorer) else base.policy.model
    return RewardModelLearner(model, scored, loss=plan.loss, **shared, **plan.options)


def _show(base: Base, session: Session, rows: Sequence[Answers], found: RewardEvaluation | None) -> None:
    """Draw the reliability diagram, and write samples.md: the first held-out answers with their rewards."""
    if base.ranks.rank != 0 or found is None:
        return
    folder = session.rundir.path
    (folder / "figures").mkdir(exist_ok=True)
    caption = f"held-out accuracy {found.score:.3f}, ECE {found.ece:.3f}, Brier {found.brier:.3f}, n = {found.n}"
    with session.drawing("the reliability diagram"):
        draw_reliability(folder / "figures" / "reliability.png", found.bins, caption)
    parts = ["# Samples\n\nThe first held-out answers, with the rewards they were given after training.\n"]
    given = iter(found.rewards)
    for number, row in enumerate(rows[:SHOWN], start=1):
        if isinstance(row, Pair):
            sides = {"chosen": row.chosen, "rejected": row.rejected}
        else:
            sides = {f"label {row.label:g}": row.sequence}
        parts.append(f"## {number}. {row.id}\n")
        for name, sequence in sides.items():
            text = base.policy.tokenizer.decode(sequence.tokens, skip_special_tokens=False)
            indented = "\n".join(f"    {line}" for line in text.splitlines())
            parts.append(f"{name} (reward {next(given):+.3f}):\n\n{indented}\n")
    write_atomic(folder / "samples.md", visible("\n".join(parts)))
