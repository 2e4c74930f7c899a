"""`novarl rl`: compose an online run, and drive it through its phases: warm-up, before, training, after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from novarl.algos import surrogates
from novarl.build.judge import Judge, write_samples
from novarl.build.machine import start
from novarl.build.resolve import RLPlan, resolve_rl
from novarl.build.rewards import build_env, build_rewards
from novarl.build.rows import Rows, demonstrations, longest_prompt, raw, rl_rows
from novarl.build.sampling import Sampler, local_engine
from novarl.build.session import Interrupts, Opened, Session, Stopped, open_run
from novarl.build.sinks import finish, open_sinks
from novarl.build.weights import check_same_model, fingerprint, optim_settings
from novarl.config.load import to_yaml
from novarl.config.tree import RLConfig
from novarl.core.bus import Bus
from novarl.core.checkpoint import Checkpoints
from novarl.core.types import Batch, Prompt, Record, Rollout, Sampling, Scored, Sequence as TokenSequence
from novarl.data.dataset import load_sft
from novarl.data.pack import pack_sequences
from novarl.data.render import render_prompt
from novarl.data.rollout_log import write_rollouts
from novarl.distributed.ranks import Ranks
from novarl.engines.local import LocalEngine
from novarl.learn.agreement import TOLERANCES, Agreement, switch_dropout_off
from novarl.learn.credit import CreditRule
from novarl.learn.policy import Objective, PolicyLearner, Surrogate
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.loops.admit import Admission
from novarl.loops.offline import OfflineStages, offline
from novarl.loops.online import Stages, online
from novarl.loops.state import LoopState, Pending
from novarl.models.load import Policy, load, save
from novarl.models.reference import freeze, frozen_copy
from novarl.rewards.compose import RewardSet

WARMUP_BATCH = 64
"""Demonstrations in an update of the warm-up."""


@dataclass(slots=True)
class Online:
    """The parts of a reinforcement-learning run, made by `compose`."""

    config: RLConfig
    plan: RLPlan
    ranks: Ranks
    opened: Opened
    state: dict[str, Any] | None
    policy: Policy
    rows: Rows[Prompt]
    rewards: RewardSet
    engine: LocalEngine
    sampler: Sampler
    judge: Judge
    scorer: Scorer
    session: Session


def run_rl(config: RLConfig) -> dict[str, Any]:
    """Train, and return what summary.json holds. `status` is "done", or "stopped" after Ctrl-C."""
    plan = resolve_rl(config)
    device, ranks = start(config.device, config.threads, config.seed)
    opened = open_run("rl", config.run_dir, config.resume, ranks)
    if (ended := opened.finished("rl", steps=config.steps, model=config.model)) is not None:
        return ended
    with Interrupts() as interrupts:
        run = compose(config, plan, ranks=ranks, device=device, opened=opened, interrupts=interrupts)
        try:
            _begin(run)
            return _drive(run)
        finally:
            run.rewards.close()
            run.engine.close()
            run.session.bus.close()
            ranks.stop()


def compose(
    config: RLConfig, plan: RLPlan, *, ranks: Ranks, device: torch.device, opened: Opened, interrupts: Interrupts
) -> Online:
    """Load and check everything. Nothing is written yet, so a mistake leaves no trace."""
    state = opened.state
    source = str(opened.checkpoint.model) if opened.checkpoint else config.model
    policy = load(
        source,
        seed=config.seed,
        dtype=config.dtype,
        device=device,
        gradient_checkpointing=config.micro.gradient_checkpointing,
    )
    if state is not None and opened.checkpoint is not None:
        check_same_model(state, config.model, policy, opened.checkpoint.path)
    switch_dropout_off(policy.model)
    rewards = build_rewards(config, plan.task)
    rows = rl_rows(config, plan.task, policy, max_tokens=plan.max_tokens)
    engine = local_engine(policy, max_batch=config.rollout.max_batch)
    sampling = Sampling(
        temperature=config.rollout.temperature, max_tokens=plan.max_tokens, stop=tuple(config.rollout.stop)
    )
    sampler = Sampler(
        engine=engine,
        env=build_env(config),
        tokenizer=policy.tokenizer,
        sampling=sampling,
        max_turns=config.rollout.max_turns,
        context=policy.context,
        apply_chat_template=config.apply_chat_template,
        samples=config.responses_per_prompt,
        seed=config.seed,
        greedy_twin=plan.algorithm.estimator == "scst",
    )
    at_eval = replace(
        sampling,
        temperature=config.eval.temperature,
        top_k=config.eval.top_k,
        top_p=config.eval.top_p,
        min_p=config.eval.min_p,
    )
    judge = Judge(rows.held_out, sampler, rewards, ranks, at_eval, config.eval.k)
    scorer = Scorer(
        policy.model,
        temperature=config.rollout.temperature,
        chunk=config.micro.logprob_chunk,
        compute_dtype=policy.compute_dtype,
    )
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
    return Online(
        config=config,
        plan=plan,
        ranks=ranks,
        opened=opened,
        state=state,
        policy=policy,
        rows=rows,
        rewards=rewards,
        engine=engine,
        sampler=sampler,
        judge=judge,
        scorer=scorer,
        session=session,
    )


def _begin(run: Online) -> None:
    """The first writes: the directory, the manifest, the sinks."""
    config, session = run.config, run.session
    manifest = {
        "kind": "rl",
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "ranks": run.ranks.size,
        "device": str(run.scorer.device),
        "model": fingerprint(run.policy),
        "parameters": sum(parameter.numel() for parameter in run.policy.model.parameters()),
        "rows": run.rows.summary(),
    }
    session.begin(run.opened, run.state, manifest, to_yaml(config))
    if run.ranks.rank == 0:
        session.bus.sinks += open_sinks(
            session.rundir.path, console=config.log.console, tensorboard=config.log.tensorboard
        )
    session.bus.event(
        "start",
        run_dir=str(session.rundir.path),
        device=str(run.scorer.device),
        seed=config.seed,
        model=config.model,
        algo=config.algo,
    )
    for trouble in run.opened.troubles:
        session.bus.event("alert", message=f"resuming from an earlier checkpoint: {trouble}")
    if run.state is None:
        run.rows.report(session.bus)
        session.facts |= {"rows": run.rows.summary(), "model": config.model}


def _drive(run: Online) -> dict[str, Any]:
    session, state = run.session, LoopState()
    status = "done"
    try:
        if run.state is None or run.state["phase"] == "warmup":
            _warm_up(run)
        learner, stages = online_stages(run)
        if run.state is not None and run.state["phase"] == "rl":
            state.load_state_dict(run.state["loop"])
            learner.load_state_dict(run.state["learner"])
        session.enter(
            "rl",
            lambda: {"model": fingerprint(run.policy), "loop": state.state_dict(), "learner": learner.state_dict()},
            prefix="step",
            steps=run.config.steps,
            done=state.step,
        )
        if "before" not in session.facts:
            _measure(run, "before")
        session.drive(online(state, stages, steps=run.config.steps), state, run.judge if run.rows.held_out else None)
        session.save(state)
        _measure(run, "after")
    except Stopped:
        status = "stopped"
    return finish(
        session,
        {
            "status": status,
            "command": "rl",
            "task": run.config.task,
            "algo": run.config.algo,
            "steps": state.step,
            "updates": state.update,
            "rows": session.facts["rows"],
            "before": session.facts.get("before"),
            "after": session.facts.get("after"),
        },
    )


def _warm_up(run: Online) -> None:
    """Supervised steps on the task's demonstrations: a built-in model starts from noise, where no reward is found."""
    if run.plan.warmup == 0 or run.plan.task is None:
        return
    session, state, task = run.session, LoopState(), run.plan.task
    sequences, _ = load_sft(
        raw(demonstrations(task)),
        tokenizer=run.policy.tokenizer,
        max_length=run.policy.context,
        apply_chat_template=run.config.apply_chat_template,
    )
    asked = optim_settings(run.config.optim, lr=task.warmup_lr, total=run.plan.warmup)
    # Its own rate and schedule (`optim` is reinforcement learning's), falling, to end close to the teacher's odds.
    settings = replace(asked, lr=task.warmup_lr, schedule="linear", warmup_steps=0, min_lr_ratio=0.05)
    learner = SupervisedLearner(
        run.policy.model,
        replace(run.scorer, temperature=1.0),
        optim=settings,
        ranks=run.ranks,
        budget=run.config.micro.max_tokens,
    )
    if run.state is not None:
        state.load_state_dict(run.state["loop"])
        learner.load_state_dict(run.state["learner"])
    stages: OfflineStages[TokenSequence] = OfflineStages(
        rows=sequences,
        pack=pack_sequences,
        update=learner.update,
        bus=session.bus,
        batch_size=WARMUP_BATCH,
        seed=run.config.seed,
    )
    session.enter(
        "warmup",
        lambda: {"model": fingerprint(run.policy), "loop": state.state_dict(), "learner": learner.state_dict()},
        prefix="warmup",
        steps=run.plan.warmup,
        done=state.step,
    )
    session.drive(offline(state, stages, steps=run.plan.warmup), state)


def _measure(run: Online, name: str) -> None:
    """Evaluate on the held-out rows, remember it as `name`, and show it."""
    if not run.rows.held_out:
        return
    found = run.judge()
    run.session.note(name, found)
    if run.ranks.rank == 0 and name == "after":
        write_samples(run.session.rundir.path / "samples.md", found.rows)


def online_stages(run: Online) -> tuple[PolicyLearner, Stages]:
    """The learner and the five verbs, from the algorithm's row."""
    config, plan, row = run.config, run.plan, run.plan.algorithm
    reference = _reference(run) if plan.needs_reference else None
    objective = Objective(
        surrogate=_surrogate(plan),
        aggregation=row.aggregation,
        constant=float(plan.max_tokens) if row.constant == "max_tokens" else 1.0,
        kl_loss_coef=row.kl_coef if row.kl_type == "loss" else 0.0,
        kl_estimator=row.kl_estimator,
        entropy_coef=row.entropy_coef,
        correction_max=plan.correction_max,
    )
    learner = PolicyLearner(
        run.policy.model,
        run.scorer,
        objective=objective,
        optim=optim_settings(config.optim, lr=plan.lr, total=config.steps * row.updates_per_rollout),
        ranks=run.ranks,
        budget=config.micro.max_tokens,
        reference=reference,
        needs_old_logp=plan.needs_old_logp,
    )
    stages = Stages(
        prompts=run.rows.train,
        sample=run.sampler.train,
        score=run.judge.score,
        credit=CreditRule(
            estimator=row.estimator,
            norm_std=row.norm_std,
            ema_beta=plan.ema_beta,
            whiten=plan.whiten,
            kl_type=row.kl_type if plan.needs_reference else None,
            kl_estimator=row.kl_estimator,
            kl_coef=row.kl_coef,
        ),
        learner=learner,
        publish=partial(run.engine.publish, None),
        check=partial(_check_agreement, run),
        keep=partial(_keep, run),
        admission=Admission(
            varied=row.dynamic_sampling,
            max_refills=config.dynamic_sampling.max_refills,
            needs_twin=row.estimator == "scst",
        ),
        ranks=run.ranks,
        bus=run.session.bus,
        prompts_per_rollout=config.prompts_per_rollout,
        updates_per_rollout=row.updates_per_rollout,
        epochs_per_rollout=config.epochs_per_rollout,
        seed=config.seed,
    )
    return learner, stages


def _surrogate(plan: RLPlan) -> Surrogate:
    row = plan.algorithm
    if row.surrogate == "reinforce":
        return surrogates.reinforce
    return partial(surrogates.ppo_clip, clip_low=row.clip_low, clip_high=row.clip_high)


def _reference(run: Online) -> Scorer:
    """The policy as it was when reinforcement learning began, kept in the run directory for whoever resumes."""
    folder = run.session.rundir.path / "reference"
    if run.state is not None and run.state["phase"] == "rl":
        model = freeze(load(str(folder), dtype=run.config.dtype, device=run.scorer.device).model)
    else:
        model = frozen_copy(run.policy.model)
        if run.ranks.rank == 0:
            save(run.policy, folder)
        run.ranks.wait()
    return replace(run.scorer, model=model)


def _check_agreement(run: Online, batch: Batch, rollouts: Sequence[Rollout]) -> Record:
    """Before the first update: sampler and learner agree, or the run is refused."""
    limit = longest_prompt(run.config, run.policy, max_tokens=run.plan.max_tokens)

    def render(prompt: Prompt) -> tuple[int, ...]:
        return render_prompt(run.policy.tokenizer, prompt.messages, apply_chat_template=run.config.apply_chat_template)[
            -limit:
        ]

    found = Agreement(
        model=run.policy.model,
        logprobs=lambda batch, temperature: replace(run.scorer, temperature=temperature).logprobs(
            batch, run.ranks, run.config.micro.max_tokens
        ),
        render=render,
        temperature=run.scorer.temperature,
        sampling_temperature=run.sampler.sampling.temperature,
        version=0,
        tolerance=TOLERANCES[run.policy.compute_dtype],
    ).check(batch, rollouts)
    run.session.bus.event("agreement", **found)
    return found


def _keep(run: Online, step: int, scored: Sequence[Scored], pending: Pending) -> None:
    """The rollout log, the samples on the console, and an event for each rollout whose reward failed."""
    if run.ranks.rank != 0:
        return
    log, bus = run.config.log, run.session.bus
    for item in scored:
        if item.reward is None:
            bus.event("failed_rollout", prompt=item.rollout.prompt.id, index=item.rollout.index, error=item.error)
    if log.rollouts_every and (step % log.rollouts_every == 0 or step == 1):
        write_rollouts(
            run.session.rundir.path / "rollouts", step, scored, pending.batch, pending.scores, pending.credit
        )
    if log.samples_every and (step % log.samples_every == 0 or step == 1):
        shown = next((item for item in scored if item.reward is not None), None)
        if shown is not None:
            prompt = str(shown.rollout.prompt.messages[-1]["content"])
            bus.event("sample", prompt=prompt, text=shown.rollout.text, reward=shown.reward)
