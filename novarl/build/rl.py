"""`novarl rl`: compose an online run, and drive it through its phases: warm-up, before, training, after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from novarl.build.chat import date_facts, date_notes
from novarl.build.front import open_front
from novarl.build.judge import Judge, write_samples
from novarl.build.lora import adapt, adapter_state, check_adaptable, keep_base, model_source
from novarl.build.machine import check_overlap, divided_threads, start
from novarl.build.play import FarSampler, Play
from novarl.build.references import named_process_model, named_reference
from novarl.build.resolve import RLPlan, other_algorithm, resolve_rl, usual_lr, usual_max_tokens
from novarl.build.rewards import build_rewards, close_env
from novarl.build.rows import Rows, demonstrations, longest_sequence, raw, rl_rows
from novarl.build.sampling import Sampler, training_sampler
from novarl.build.session import Interrupts, Opened, Session, Stopped, open_run
from novarl.build.sinks import finish, open_sinks
from novarl.build.stages import credit_rule, objective, online_stages
from novarl.build.weights import check_reference_is_there, fingerprint, optim_settings, read_policy
from novarl.config.idle import idle
from novarl.config.load import to_yaml
from novarl.config.tree import RLConfig
from novarl.core.bus import Bus
from novarl.core.checkpoint import Checkpoints
from novarl.core.types import Engine, Prompt, Record, Sequence as TokenSequence
from novarl.data.dataset import load_sft
from novarl.data.pack import pack_sequences
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Objective
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.loops.evaluate import Evaluation
from novarl.loops.offline import OfflineStages, offline
from novarl.loops.online import Stages, online
from novarl.loops.stale import stale
from novarl.loops.state import LoopState
from novarl.models.forward import attention_of, modules_of
from novarl.models.implicit import ImplicitModel
from novarl.models.load import Policy, save
from novarl.observe.diagnosis import low_rate
from novarl.rewards.compose import RewardSet

WARMUP_BATCH = 64
"""Demonstrations in an update of the warm-up."""
WARMUP = (
    "the built-in model is untrained, so {steps} supervised steps on the task's demonstrations come before RL "
    "(warm-up). Set their number with warmup=N; warmup=0 leaves them out"
)


class Kept(Protocol):
    """A part of the run that a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


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
    sampler: Sampler
    play: Play
    judge: Judge
    scorer: Scorer
    objective: Objective
    credit: CreditRule
    session: Session
    named_reference: nn.Module | None
    process_model: ImplicitModel | None
    far: FarSampler | None

    @property
    def engine(self) -> Engine:
        return self.sampler.engine


def run_rl(config: RLConfig) -> dict[str, Any]:
    """Train, and return what summary.json holds. `status` is "done", or "stopped" after Ctrl-C."""
    plan = resolve_rl(config)
    with nullcontext() if config.rollout.staleness == 0 else closing(FarSampler(config)) as far:
        return _run(config, plan, far)


def _run(config: RLConfig, plan: RLPlan, far: FarSampler | None) -> dict[str, Any]:
    threads, _ = divided_threads(config)
    device, ranks = start(config.device, threads, config.seed)
    check_overlap(config, ranks)
    opened = open_run(config, ranks)
    if (ended := opened.finished("rl", steps=config.steps, model=config.model)) is not None:
        return ended
    state = opened.state
    if far is not None:
        far.load(config, model_source(config, opened, state))
    with Interrupts() as interrupts:
        run = compose(config, plan, state, ranks=ranks, device=device, opened=opened, interrupts=interrupts, far=far)
        try:
            _begin(run)
            return _drive(run)
        finally:
            run.play.close()
            run.rewards.close()
            close_env(run.sampler.env)
            run.engine.close()
            run.session.bus.close()
            ranks.stop()


def compose(
    config: RLConfig,
    plan: RLPlan,
    state: dict[str, Any] | None,
    *,
    ranks: Ranks,
    device: torch.device,
    opened: Opened,
    interrupts: Interrupts,
    far: FarSampler | None,
) -> Online:
    """Load and check everything. Nothing is written yet, so a mistake leaves no trace."""
    policy = read_policy(config, opened, device)
    if state is not None:
        check_reference_is_there(config, plan, opened.rundir, state)
    check_adaptable(config, policy)
    rows = rl_rows(config, plan.task, policy, max_tokens=plan.max_tokens)
    longest = longest_sequence(config, rows, policy, max_tokens=plan.max_tokens)
    reference = named_reference(config, policy, longest, device) if plan.needs_reference else None
    process_model = named_process_model(config, policy, longest, device)
    if state is not None:
        rows.check_same(state["facts"], opened.rundir.path)
    rewards = build_rewards(config, plan.task, rows.train, rows.held_out, device=device)
    sampler = training_sampler(config, plan, policy)
    at_eval = replace(
        sampler.sampling,
        temperature=config.eval.temperature,
        top_k=config.eval.top_k,
        top_p=config.eval.top_p,
        min_p=config.eval.min_p,
        supports=False,
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
        sampler=sampler,
        play=Play(sampler, rewards),
        judge=judge,
        scorer=scorer,
        objective=objective(config, plan),
        credit=credit_rule(config, plan),
        session=session,
        named_reference=reference,
        process_model=process_model,
        far=far,
    )


def _begin(run: Online) -> None:
    """The first writes: the directory, the manifest, the sinks."""
    config, session = run.config, run.session
    manifest = {
        "kind": "rl",
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "sampling_threads": divided_threads(config)[1],
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
    session.limit, session.usual_lr = _limit(run), usual_lr(config.model, run.plan.task)
    session.announce(
        [
            *run.opened.notes,
            *run.policy.notes(),
            *date_notes(run.policy, config, run.state),
            *idle(config),
            *run.rows.notes(config.data, config.eval.n, reads=run.rewards.reads),
            *_slow(run),
        ],
        device=str(run.scorer.device),
        seed=config.seed,
        model=config.model,
        algo=config.algo,
        attention=attention_of(run.policy.model),
        modules=modules_of(run.policy.model),
    )
    if run.state is None:
        run.rows.report(session.bus)
        session.facts |= {**run.rows.facts(), **date_facts(run.policy), "model": config.model}


def _limit(run: Online) -> str:
    """What cuts answers off."""
    tokens, turns = f"max_new_tokens={run.plan.max_tokens}", run.config.rollout.max_turns
    return tokens if turns == 1 else f"{tokens} or rollout.max_turns={turns}"


def _slow(run: Online) -> list[str]:
    """That the learning rate is too low for as many updates as there are."""
    updates = (run.config.steps - run.config.critic.warmup_steps) * run.plan.algorithm.updates_per_rollout
    slow = low_rate(run.plan.lr, usual_lr(run.config.model, run.plan.task), updates)
    return [] if slow is None else [f"{slow.said}. {slow.cure}"]


def _drive(run: Online) -> dict[str, Any]:
    session, state = run.session, LoopState()
    front = open_front(run.config.multi_objective, session)

    def judge() -> Evaluation:
        run.rewards.progress.step = state.step
        found = run.judge()
        if front is not None:
            front.add(found, state.step)
            found = replace(found, hypervolume=front.hypervolume())
        return found

    status = "done"
    try:
        if run.state is None or run.state["phase"] == "warmup":
            _warm_up(run)
        _adapt(run)
        stages = online_stages(run)
        parts: dict[str, Kept | None] = {
            "learner": stages.learner,
            "governor": stages.governor,
            "supplier": stages.supplier,
        }
        if run.state is not None and run.state["phase"] == "rl":
            state.load_state_dict(run.state["loop"])
            for name, part in parts.items():
                if part is not None:
                    part.load_state_dict(run.state[name])

        def snapshot() -> dict[str, Any]:
            states = {name: part.state_dict() for name, part in parts.items() if part is not None}
            adapters = adapter_state(run.config, run.policy)
            return {"model": fingerprint(run.policy), "loop": state.state_dict(), **adapters, **states}

        session.enter(
            "rl",
            snapshot,
            prefix="step",
            steps=run.config.steps,
            done=state.step,
        )
        loop = _loop(run, state, stages)
        if "before" not in session.facts:
            _measure(run, "before", judge)
        session.drive(loop, state, judge if run.rows.held_out else None)
        session.save(state)
        _measure(run, "after", judge)
    except Stopped:
        status = "stopped"
    if front is not None:
        front.draw()
    return finish(
        session,
        {
            "status": status,
            "command": "rl",
            "task": run.config.task,
            "algo": run.config.algo,
            "lr": run.plan.lr,
            "usual_lr": usual_lr(run.config.model, run.plan.task),
            "entropy_coef": run.config.entropy.coef,
            "other_algo": other_algorithm(run.config),
            "steps": state.step,
            "updates": state.update,
            "rows": session.facts["rows"],
            "rollouts": session.facts.get("rollouts"),
            "before": session.facts.get("before"),
            "after": session.facts.get("after"),
            "warmup": session.facts.get("warmup"),
            "max_tokens": run.plan.max_tokens,
            "usual_max_tokens": usual_max_tokens(run.plan.task),
        },
    )


def _loop(run: Online, state: LoopState, stages: Stages) -> Iterator[Record]:
    """The loop that the configuration asks for."""
    steps = run.config.steps
    if run.far is None or state.step >= steps:
        return online(state, stages, steps=steps)
    run.far.follow(run.policy.model)
    return stale(state, stages, run.far, steps=steps)


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
        template_kwargs=run.policy.template_kwargs,
    )
    asked = optim_settings(run.config.optim, lr=task.warmup_lr, total=run.plan.warmup)
    # Its own rate and schedule (`optim` is reinforcement learning's), falling, to end close to the teacher's odds.
    settings = replace(asked, schedule="linear", warmup_steps=0, min_lr_ratio=0.05)
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
    if state.step == 0:
        session.bus.event("alert", message=WARMUP.format(steps=run.plan.warmup))
    session.enter(
        "warmup",
        lambda: {"model": fingerprint(run.policy), "loop": state.state_dict(), "learner": learner.state_dict()},
        prefix="warmup",
        steps=run.plan.warmup,
        done=state.step,
    )
    session.drive(offline(state, stages, steps=run.plan.warmup), state)
    session.facts["warmup"] = {"steps": state.step, **session.first_and_last("loss", "accuracy")}


def _adapt(run: Online) -> None:
    """Adapters come after the warm-up, whose fine-tuning is full: what it has learnt is the base below them."""
    begun = run.state is not None and run.state["phase"] == "rl"
    adapt(run.config, run.policy, run.state if begun else None)
    if not begun:
        keep_base(run.config, run.policy, run.opened, run.ranks)


def _measure(run: Online, name: str, judge: Callable[[], Evaluation]) -> None:
    """Evaluate on the held-out rows, remember it as `name`, and show it."""
    if not run.rows.held_out:
        return
    found = judge()
    run.session.note(name, found)
    if run.ranks.rank == 0 and name == "after":
        write_samples(run.session.rundir.path / "samples.md", found.rows)
