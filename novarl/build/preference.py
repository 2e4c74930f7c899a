"""What `novarl dpo` and `novarl rm` share: their rows, the reference, and the drive from start to summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from novarl.build.chat import date_facts, date_notes
from novarl.build.lora import adapt, adapter_state, keep_base
from novarl.build.machine import start
from novarl.build.pair_rows import Answers, preference_rows, recall_reference, record_reference
from novarl.build.preference_plan import PreferencePlan
from novarl.build.rows import Rows, subject
from novarl.build.session import Interrupts, Opened, Session, Stopped, open_run
from novarl.build.sinks import finish, open_sinks
from novarl.build.weights import fingerprint, read_policy
from novarl.config.idle import idle
from novarl.config.load import to_yaml
from novarl.config.preference import DPOConfig, RMConfig
from novarl.core.bus import Bus
from novarl.core.checkpoint import Checkpoints
from novarl.core.types import Batch, Record
from novarl.data.pairs import Labelled, Pair, pack_labelled, pack_pairs
from novarl.distributed.ranks import Ranks
from novarl.learn.scorer import Scorer
from novarl.loops.evaluate_rewards import RewardEvaluation, evaluate_rewards
from novarl.loops.offline import OfflineStages, offline
from novarl.loops.state import LoopState
from novarl.models.forward import attention_of, modules_of
from novarl.models.load import Policy

PreferenceSettings = DPOConfig | RMConfig


class RowLearner(Protocol):
    """Learns from batches of rows: one call, one optimiser update."""

    def update(self, batch: Batch) -> Record: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs between commands: who learns, `rewards` [S] of a batch for the evaluation, how to write the model,
    and `show(session, held out, what was found)` at the end."""

    learner: Callable[[int], RowLearner]
    rewards: Callable[[Batch], Tensor]
    write_model: Callable[[Path], None]
    show: Callable[[Session, Sequence[Answers], RewardEvaluation | None], None]


@dataclass(frozen=True, slots=True)
class Base:
    """What a run stands on before it begins. `plain`: its rows are texts without a prompt."""

    policy: Policy
    scorer: Scorer
    ranks: Ranks
    opened: Opened
    plain: bool


def run_preference(
    config: PreferenceSettings, plan: PreferencePlan, compose: Callable[[Base], Parts]
) -> dict[str, Any]:
    """Train, and return what summary.json holds. `status` is "done", or "stopped" after Ctrl-C."""
    device, ranks = start(config.device, config.threads, config.seed)
    opened = open_run(config, ranks)
    state = opened.state
    policy = read_policy(config, opened, device)
    adapt(config, policy, state)
    rows = preference_rows(config, plan, policy)
    if state is not None:
        rows.check_same(state["facts"], opened.rundir.path)
    steps = config.steps or max(1, math.ceil((config.epochs or 1.0) * len(rows.train) / config.batch_size))
    if (ended := opened.finished(config.kind, steps=steps, model=config.model)) is not None:
        return ended
    scorer = Scorer(policy.model, chunk=config.micro.logprob_chunk, compute_dtype=policy.compute_dtype)
    plain = all(isinstance(row, Labelled) and row.plain for row in rows.train)
    base = Base(policy, scorer, ranks, opened, plain)
    parts = compose(base)
    with Interrupts() as interrupts:
        session = Session(
            rundir=opened.rundir,
            ranks=ranks,
            bus=Bus(),
            interrupts=interrupts,
            checkpoints=Checkpoints(opened.rundir.path / "checkpoints", keep=config.keep),
            write_model=parts.write_model,
            save_every=config.save_every,
            eval_every=config.eval_every,
            keep_best=config.keep_best,
        )
        try:
            reference = opened.rundir.path / "reference"
            if plan.reference and state is not None:
                rows = recall_reference(rows, reference)
            _begin(config, plan, session, base, state, rows)
            if plan.reference and state is None:
                many = f"{len(rows.train) + len(rows.held_out):,} rows"
                first = f"first the reference's log-probabilities of all {many} are computed, once for the whole run"
                session.bus.event("alert", message=first)
                rows = record_reference(
                    rows,
                    lambda batch: scorer.logprobs(batch, ranks, config.micro.max_tokens),
                    folder=reference,
                    ranks=ranks,
                )
            return _drive(config, plan, session, base, parts, rows=rows, saved=state, steps=steps)
        finally:
            session.bus.close()
            ranks.stop()


def _begin(
    config: PreferenceSettings,
    plan: PreferencePlan,
    session: Session,
    base: Base,
    state: dict[str, Any] | None,
    rows: Rows[Any],
) -> None:
    device = next(base.policy.model.parameters()).device
    manifest = {
        "kind": config.kind,
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "ranks": session.ranks.size,
        "device": str(device),
        "model": fingerprint(base.policy),
        "parameters": sum(parameter.numel() for parameter in base.policy.model.parameters()),
        "loss": plan.loss,
        "rows": rows.summary(),
    }
    session.begin(base.opened, state, manifest, to_yaml(config))
    if session.ranks.rank == 0:
        session.bus.sinks += open_sinks(
            session.rundir.path, console=config.log.console, tensorboard=config.log.tensorboard
        )
    session.announce(
        [
            *base.opened.notes,
            *base.policy.notes(),
            *date_notes(base.policy, config, state),
            *idle(config),
            *rows.notes(config.data, config.eval.n),
        ],
        device=str(device),
        seed=config.seed,
        model=config.model,
        attention=attention_of(base.policy.model),
        modules=modules_of(base.policy.model),
    )
    if state is None:
        rows.report(session.bus)
        session.facts |= {**rows.facts(), **date_facts(base.policy), "model": config.model, "loss": plan.loss}
        implicit = config.kind == "rm" and plan.reference
        keep_base(config, base.policy, base.opened, session.ranks, is_reference=implicit)


def _drive(
    config: PreferenceSettings,
    plan: PreferencePlan,
    session: Session,
    base: Base,
    parts: Parts,
    *,
    rows: Rows[Answers],
    saved: dict[str, Any] | None,
    steps: int,
) -> dict[str, Any]:
    learner, state = parts.learner(steps), LoopState()
    if saved is not None:
        state.load_state_dict(saved["loop"])
        learner.load_state_dict(saved["learner"])
    stages: OfflineStages[Answers] = OfflineStages(
        rows=rows.train,
        pack=_pack,
        update=learner.update,
        bus=session.bus,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    session.enter(
        config.kind,
        lambda: {
            "model": fingerprint(base.policy),
            "loop": state.state_dict(),
            "learner": learner.state_dict(),
            **adapter_state(config, base.policy),
        },
        prefix="step",
        steps=steps,
        done=state.step,
    )

    def measure() -> RewardEvaluation:
        return evaluate_rewards(rows.held_out, parts.rewards)

    judge = measure if rows.held_out else None
    status, found = "done", None
    try:
        if judge is not None and "before" not in session.facts:
            session.note("before", judge())
        session.drive(offline(state, stages, steps=steps), state, judge)
        session.save(state)
        if judge is not None:
            found = judge()
            session.note("after", found)
        parts.show(session, rows.held_out or rows.train, found)
    except Stopped:
        status = "stopped"
    entries: dict[str, Any] = {"status": status, "command": config.kind, "task": config.task, "loss": plan.loss}
    entries |= {"lr": plan.lr, "steps": state.step, "updates": state.update, **subject(config)}
    return finish(session, {**entries, **{name: session.facts.get(name) for name in ("rows", "before", "after")}})


def _pack(rows: list[Answers]) -> Batch:
    pairs = [row for row in rows if isinstance(row, Pair)]
    return pack_pairs(pairs) if pairs else pack_labelled([row for row in rows if isinstance(row, Labelled)])
