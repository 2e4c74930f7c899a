"""`novarl sft`: compose a supervised run, and drive it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from novarl.build.chat import date_facts, date_notes
from novarl.build.judge import SHOWN, Judge, write_samples
from novarl.build.lora import adapt, adapter_state, keep_base
from novarl.build.machine import start
from novarl.build.resolve import SFTPlan, resolve_sft
from novarl.build.rows import Rows, raw, sft_rows, subject
from novarl.build.sampling import greedy_sampler
from novarl.build.session import Interrupts, Opened, Session, Stopped, open_run
from novarl.build.sinks import finish, open_sinks
from novarl.build.weights import fingerprint, optim_settings, read_policy
from novarl.config.idle import idle
from novarl.config.load import to_yaml
from novarl.config.tree import SFTConfig
from novarl.core.bus import Bus
from novarl.core.checkpoint import Checkpoints
from novarl.core.types import Prompt, Scored, Sequence as TokenSequence
from novarl.data.dataset import load_rl
from novarl.data.pack import pack_sequences
from novarl.data.render import turn_text
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.loops.evaluate import Evaluation, evaluate_likelihood
from novarl.loops.offline import OfflineStages, offline
from novarl.loops.state import LoopState
from novarl.models.forward import attention_of, modules_of
from novarl.models.load import Policy, save
from novarl.rewards.compose import RewardSet

SHOWN_TOKENS = 256
"""The longest answer in samples.md."""


def run_sft(config: SFTConfig) -> dict[str, Any]:
    """Train, and return what summary.json holds. `status` is "done", or "stopped" after Ctrl-C."""
    plan = resolve_sft(config)
    device, ranks = start(config.device, config.threads, config.seed)
    opened = open_run(config, ranks)
    state = opened.state
    policy = read_policy(config, opened, device)
    adapt(config, policy, state)
    rows = sft_rows(config, plan.task, policy)
    if state is not None:
        rows.check_same(state["facts"], opened.rundir.path)
    steps = config.steps or max(1, math.ceil((config.epochs or 1.0) * len(rows.train) / config.batch_size))
    if (ended := opened.finished("sft", steps=steps, model=config.model)) is not None:
        return ended
    with Interrupts() as interrupts:
        session = Session(
            rundir=opened.rundir,
            ranks=ranks,
            bus=Bus(),
            interrupts=interrupts,
            checkpoints=Checkpoints(opened.rundir.path / "checkpoints", keep=config.keep),
            write_model=lambda folder: save(policy, folder),
            save_every=config.save_every,
            eval_every=config.eval_every,
            keep_best=config.keep_best,
        )
        try:
            _begin(config, session, opened, state, policy=policy, rows=rows)
            return _drive(config, plan, session, state, policy=policy, rows=rows, steps=steps)
        finally:
            session.bus.close()
            ranks.stop()


def _begin(
    config: SFTConfig,
    session: Session,
    opened: Opened,
    state: dict[str, Any] | None,
    *,
    policy: Policy,
    rows: Rows[TokenSequence],
) -> None:
    device = next(policy.model.parameters()).device
    manifest = {
        "kind": "sft",
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "ranks": session.ranks.size,
        "device": str(device),
        "model": fingerprint(policy),
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        "rows": rows.summary(),
    }
    session.begin(opened, state, manifest, to_yaml(config))
    if session.ranks.rank == 0:
        session.bus.sinks += open_sinks(
            session.rundir.path, console=config.log.console, tensorboard=config.log.tensorboard
        )
    session.announce(
        [
            *opened.notes,
            *policy.notes(),
            *date_notes(policy, config, state),
            *idle(config),
            *rows.notes(config.data, config.eval.n),
        ],
        device=str(device),
        seed=config.seed,
        model=config.model,
        attention=attention_of(policy.model),
        modules=modules_of(policy.model),
    )
    if state is None:
        rows.report(session.bus)
        session.facts |= {**rows.facts(), **date_facts(policy), "model": config.model}
        keep_base(config, policy, opened, session.ranks)


def _drive(
    config: SFTConfig,
    plan: SFTPlan,
    session: Session,
    saved: dict[str, Any] | None,
    *,
    policy: Policy,
    rows: Rows[TokenSequence],
    steps: int,
) -> dict[str, Any]:
    scorer = Scorer(policy.model, chunk=config.micro.logprob_chunk, compute_dtype=policy.compute_dtype)
    settings = optim_settings(config.optim, lr=plan.lr, total=steps)
    learner = SupervisedLearner(
        policy.model, scorer, optim=settings, ranks=session.ranks, budget=config.micro.max_tokens
    )
    measure, show = _measures(config, plan, session, scorer, policy=policy, rows=rows)
    state = LoopState()
    if saved is not None:
        state.load_state_dict(saved["loop"])
        learner.load_state_dict(saved["learner"])
    stages: OfflineStages[TokenSequence] = OfflineStages(
        rows=rows.train,
        pack=pack_sequences,
        update=learner.update,
        bus=session.bus,
        batch_size=config.batch_size,
        seed=config.seed,
    )
    session.enter(
        "sft",
        lambda: {
            "model": fingerprint(policy),
            "loop": state.state_dict(),
            "learner": learner.state_dict(),
            **adapter_state(config, policy),
        },
        prefix="step",
        steps=steps,
        done=state.step,
    )
    status = "done"
    try:
        if measure is not None and "before" not in session.facts:
            session.note("before", measure())
        session.drive(offline(state, stages, steps=steps), state, measure)
        session.save(state)
        if measure is not None:
            session.note("after", measure())
        show()
    except Stopped:
        status = "stopped"
    entries = {"status": status, "command": "sft", "task": config.task, "lr": plan.lr}
    entries |= {"steps": state.step, "updates": state.update, **subject(config)}
    return finish(session, {**entries, **{name: session.facts.get(name) for name in ("rows", "before", "after")}})


def _measures(
    config: SFTConfig, plan: SFTPlan, session: Session, scorer: Scorer, *, policy: Policy, rows: Rows[TokenSequence]
) -> tuple[Callable[[], Evaluation] | None, Callable[[], None]]:
    """How to score held-out rows (by the task's reward, or by their likelihood), and how to write samples.md."""
    task, ranks = plan.task, session.ranks
    sampler = greedy_sampler(policy, config, max_tokens=task.max_tokens if task else SHOWN_TOKENS)
    sampling = sampler.sampling

    def write(scored: Sequence[Scored]) -> None:
        if ranks.rank == 0:
            write_samples(session.rundir.path / "samples.md", scored)

    if task is not None:
        held_out = raw(task.rows("held_out", seed=0)[: config.eval.n])
        prompts, _ = load_rl(
            held_out,
            tokenizer=policy.tokenizer,
            max_length=policy.context,
            apply_chat_template=config.apply_chat_template,
            template_kwargs=policy.template_kwargs,
        )
        judge = Judge(prompts, sampler, RewardSet(task.rewards(), task.weights), ranks, sampling, 0)
        shown = list(enumerate(prompts[:SHOWN]))
        return judge, lambda: write(judge.score(sampler.evaluate(shown, 1, sampling)))
    questions = [_question(row, index, policy) for index, row in enumerate((rows.held_out or rows.train)[:SHOWN])]

    def show() -> None:
        write([Scored(rollout, {}, math.nan) for rollout in sampler.evaluate(list(enumerate(questions)), 1, sampling)])

    if not rows.held_out:
        return None, show
    budget = config.micro.max_tokens
    return lambda: evaluate_likelihood(rows.held_out, lambda batch: scorer.logprobs(batch, ranks, budget)), show


def _question(sequence: TokenSequence, index: int, policy: Policy) -> Prompt:
    """A row to imitate as a question: what comes before the first trained token, and the answer that follows it."""
    begin = sequence.mask.index(True)
    text = policy.tokenizer.decode(sequence.tokens[:begin], skip_special_tokens=True)
    trained = [token for token, chosen in zip(sequence.tokens, sequence.mask, strict=True) if chosen]
    ended = trained[-1] in policy.eos_ids
    answer = turn_text(policy.tokenizer, sequence.tokens[:begin], trained, ended=ended)
    return Prompt(f"row {index + 1}", sequence.tokens[:begin], ({"role": "user", "content": text},), answer)
