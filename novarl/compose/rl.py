"""`novarl rl`: the parts of a reinforcement-learning run, and its phases: warm-up, then training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

from novarl.compose.chat import date_facts, date_notes
from novarl.compose.govern import build_alarm_guard, build_front, check_alarm_guard
from novarl.compose.lora import adapt, adapter_state, check_adaptable, keep_base, model_source
from novarl.compose.overlap import FarSampler
from novarl.compose.parts import Parts
from novarl.compose.references import named_process_model, named_reference, open_reference
from novarl.compose.resolve import RLPlan, model_in, other_algorithm, resolve_rl, usual_lr, usual_max_tokens
from novarl.compose.rewards import build_rewards, close_env
from novarl.compose.rows import demonstrations, longest_prompt, longest_sequence, raw, rl_rows
from novarl.compose.sampling import sampling_of, training_sampler
from novarl.compose.settings import refuse_objects, run_settings
from novarl.compose.stages import credit_rule, objective, online_stages
from novarl.compose.weights import check_reference_is_there, optim_settings, read_policy, shard_policy
from novarl.config.notes import without_effect
from novarl.config.tree import RLConfig
from novarl.core.types import Batch, Prompt, Record, Rollout, Sampling, Scored, Sequence as TokenSequence
from novarl.data.dataset import load_sft
from novarl.data.pack import pack_sequences
from novarl.data.render import render_prompt
from novarl.data.rollout_log import SPARSE, RolloutLog
from novarl.learn.agreement import TOLERANCES, Agreement
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.loops.evaluate import Evaluation
from novarl.loops.offline import OfflineStages, offline
from novarl.loops.online import Stages, online
from novarl.loops.stale import stale
from novarl.loops.state import LoopState, Pending
from novarl.models.forward import head
from novarl.observe.stability.ending import low_rate
from novarl.run.fingerprint import fingerprint
from novarl.run.judge import Judge, write_samples
from novarl.run.lifecycle import Machine, Phase, Run, Training
from novarl.run.machine import check_overlap, divided_threads
from novarl.run.pareto_front import Front
from novarl.run.play import Play
from novarl.run.session import Session

WARMUP_BATCH = 64
"""Demonstrations per warm-up update."""
WARMUP = (
    "The built-in model is untrained: {steps} supervised warm-up steps on the task's demonstrations run before RL. "
    "Change the number with warmup=N; warmup=0 skips them."
)


class Kept(Protocol):
    """A part of the run that is stored in checkpoints."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def rl_run(config: RLConfig) -> Run:
    """A run that has not started. A second process that samples one step ahead is forked now."""
    plan = resolve_rl(config)
    threads, sampling = divided_threads(
        config.threads, staleness=config.rollout.staleness, sampling=config.rollout.threads
    )
    if config.rollout.staleness:
        refuse_objects(config, "rollout.staleness=1 samples in a second process, which cannot use")
    far = FarSampler(sampling) if config.rollout.staleness else None
    return Run(
        run_settings(config, threads=threads, steps=config.steps),
        lambda machine: RLTraining(config, plan, machine, far),
        close=far.close if far is not None else None,
    )


class RLTraining(Training):
    """Loads and checks everything; nothing is written yet, so an invalid configuration leaves no files behind."""

    def __init__(self, config: RLConfig, plan: RLPlan, machine: Machine, far: FarSampler | None) -> None:
        check_overlap(config.rollout.staleness, machine.ranks)
        self.config, self.plan, self.machine, self.far, self.steps = config, plan, machine, far, config.steps
        opened = machine.opened
        self.state = state = opened.state
        if far is not None:
            far.load(config, model_source(config, opened, state))
        self.policy = policy = read_policy(config, opened, machine.device)
        if config.fsdp:
            shard_policy(policy, machine.ranks, lora=config.lora.rank > 0, compiled=config.compile)
        if state is not None:
            check_reference_is_there(config, plan, opened.rundir, state)
        check_adaptable(config, policy)
        check_alarm_guard(config)
        if plan.algorithm.values == "critic":
            head(policy.model)  # a critic needs hidden states, which a module with logits alone does not give
        self.rows = rows = rl_rows(config, plan.task, policy, max_tokens=plan.max_tokens)
        longest = longest_sequence(config, rows, policy, max_tokens=plan.max_tokens)
        self.named_reference: nn.Module | None = (
            named_reference(config, policy, longest, machine.device) if plan.needs_reference else None
        )
        process_model = named_process_model(config, policy, longest, machine.device)
        if state is not None:
            rows.check_same(state["facts"], opened.rundir.path)
        self.rewards = build_rewards(config, plan.task, rows.train, rows.held_out, device=machine.device)
        self.sampler = training_sampler(config, plan, policy, machine.loop)
        self.engine, self.longest = self.sampler.engine, plan.max_tokens
        self.judge = Judge(
            rows.held_out, self.sampler, self.rewards, machine.ranks, self._at_evaluation(), config.eval.k
        )
        scorer = Scorer(
            policy.model,
            temperature=config.rollout.temperature,
            chunk=config.micro.logprob_chunk,
            compute_dtype=policy.compute_dtype,
        )
        self.parts = Parts(
            config=config,
            plan=plan,
            ranks=machine.ranks,
            policy=policy,
            scorer=scorer,
            sampler=self.sampler,
            judge=self.judge,
            objective=objective(config, plan),
            credit=credit_rule(config, plan),
            process_model=process_model,
        )
        self.loop_state = LoopState()
        self.front: Front | None = None

    def _at_evaluation(self) -> Sampling:
        config = self.config
        return sampling_of(config.eval, max_tokens=self.plan.max_tokens, stop=tuple(config.rollout.stop))

    @property
    def notes(self) -> Sequence[str]:
        config = self.config
        return [
            *date_notes(self.policy, config, self.state),
            *without_effect(config),
            *self.rows.notes(config.data, config.eval.n, reads=self.rewards.reads),
            *self._slow(),
        ]

    def _slow(self) -> list[str]:
        """A note if the learning rate is too low for the number of updates."""
        updates = (self.config.steps - self.config.critic.warmup_steps) * self.plan.algorithm.updates_per_rollout
        slow = low_rate(self.plan.lr, usual_lr(model_in(self.config), self.plan.task), updates)
        return [] if slow is None else [f"{slow.said}. {slow.cure}."]

    def manifest(self) -> Mapping[str, Any]:
        section = self.config.rollout
        _, sampling = divided_threads(self.config.threads, staleness=section.staleness, sampling=section.threads)
        return {"sampling_threads": sampling}

    def about(self) -> Mapping[str, Any]:
        return {"algo": self.config.algo}

    def facts(self) -> Mapping[str, Any]:
        return date_facts(self.policy)

    def begin(self, session: Session) -> None:
        tokens, turns = f"max_new_tokens={self.plan.max_tokens}", self.config.rollout.max_turns
        session.limit = tokens if turns == 1 else f"{tokens} or rollout.max_turns={turns}"
        session.usual_lr = usual_lr(model_in(self.config), self.plan.task)
        self.front = build_front(self.config.multi_objective, session)

    @property
    def evaluate(self) -> Callable[[], Evaluation] | None:
        return self._evaluate if self.rows.held_out else None

    def _evaluate(self) -> Evaluation:
        step = self.rewards.progress.step = self.loop_state.step
        self.publish()
        found = self.judge()
        if self.front is not None:
            self.front.add(found, step)
            found = replace(found, hypervolume=self.front.hypervolume())
        return found

    def phases(self, session: Session) -> Iterator[Phase]:
        if self.state is None or self.state["phase"] == "warmup":
            yield from self._warm_up(session)
        self._adapt()
        stages, state = self.stages(session), self.loop_state
        parts: dict[str, Kept | None] = {
            "learner": stages.learner,
            "governor": stages.governor,
            "supplier": stages.supplier,
            "guard": stages.guard,
        }
        session.guard = stages.guard
        if self.state is not None and self.state["phase"] == "rl":
            state.load_state_dict(self.state["loop"])
            for name, part in parts.items():
                if part is not None and (name in self.state or name != "guard"):  # a guard may be added on resume
                    part.load_state_dict(self.state[name])

        def snapshot() -> dict[str, Any]:
            states = {name: part.state_dict() for name, part in parts.items() if part is not None}
            adapters = adapter_state(self.config, self.policy)
            return {"model": fingerprint(self.policy), "loop": state.state_dict(), **adapters, **states}

        yield Phase("rl", self._loop(state, stages), state, self.config.steps, snapshot)

    def _loop(self, state: LoopState, stages: Stages) -> Iterator[Record]:
        """The loop of the configuration."""
        steps = self.config.steps
        if self.far is None or state.step >= steps:
            return online(state, stages, steps=steps)
        self.far.follow(self.policy.model)
        return stale(state, stages, self.far, steps=steps)

    def stages(self, session: Session) -> Stages:
        """The learner and the stages of the loop."""
        reference = None
        if self.plan.needs_reference:
            resumed = self.state is not None and self.state["phase"] == "rl"
            folder = session.rundir.path / "reference"
            reference = open_reference(self.parts, self.named_reference, folder, resumed=resumed)
        settings = self.config.log
        log = RolloutLog(
            session.rundir.path / "rollouts",
            every=settings.rollouts_every,
            limit=None if settings.rollouts_gb is None else settings.rollouts_gb * 1e9,
            tokenizer=self.policy.tokenizer,
        )
        return online_stages(
            self.parts,
            prompts=self.rows.train,
            play=Play(self.sampler, self.rewards),
            reference=reference,
            check=partial(self._check_agreement, session),
            keep=partial(self._keep, session, log),
            keep_measured=partial(self._keep_measured, session, log),
            bus=session.bus,
            guard=build_alarm_guard(self.config, session),
        )

    def _warm_up(self, session: Session) -> Iterator[Phase]:
        """Supervised steps on the task's demonstrations: an untrained model's answers never get a reward."""
        task, steps = self.plan.task, self.plan.warmup
        if steps == 0 or task is None:
            return
        state = LoopState()
        sequences, _ = load_sft(
            raw(demonstrations(task)),
            tokenizer=self.policy.tokenizer,
            max_length=self.policy.context,
            apply_chat_template=self.config.apply_chat_template,
            template_kwargs=self.policy.template_kwargs,
        )
        asked = optim_settings(self.config.optim, lr=task.warmup_lr, total=steps)
        # Its own schedule, since `optim` is for RL; it decays to end close to the teacher's distribution.
        learner = SupervisedLearner(
            self.policy.model,
            replace(self.parts.scorer, temperature=1.0),
            optim=replace(asked, schedule="linear", warmup_steps=0, min_lr_ratio=0.05),
            ranks=self.machine.ranks,
            budget=self.config.micro.max_tokens,
        )
        if self.state is not None:
            state.load_state_dict(self.state["loop"])
            learner.load_state_dict(self.state["learner"])
        stages: OfflineStages[TokenSequence] = OfflineStages(
            rows=sequences,
            pack=pack_sequences,
            update=learner.update,
            bus=session.bus,
            batch_size=WARMUP_BATCH,
            seed=self.config.seed,
        )
        if state.step == 0:
            session.bus.event("alert", message=WARMUP.format(steps=steps))

        def snapshot() -> dict[str, Any]:
            learned = learner.state_dict()
            return {"model": fingerprint(self.policy), "loop": state.state_dict(), "learner": learned}

        loop = offline(state, stages, steps=steps)
        yield Phase("warmup", loop, state, steps, snapshot, prefix="warmup", last=False)
        session.facts["warmup"] = {"steps": state.step, **session.first_and_last("loss", "accuracy")}

    def _adapt(self) -> None:
        """Add adapters after the warm-up, which trains all weights; its result is their base."""
        begun = self.state is not None and self.state["phase"] == "rl"
        adapt(self.config, self.policy, self.state if begun else None)
        if not begun:
            keep_base(self.config, self.policy, self.machine.opened, self.machine.ranks)

    def _check_agreement(self, session: Session, batch: Batch, rollouts: Sequence[Rollout]) -> Record:
        """Before the first update: check that sampler and learner agree, otherwise stop the run."""
        scorer, config = self.parts.scorer, self.config
        limit = longest_prompt(config, self.policy, max_tokens=self.plan.max_tokens)

        def render(prompt: Prompt) -> tuple[int, ...]:
            tokens = render_prompt(
                self.policy.tokenizer,
                prompt.messages,
                apply_chat_template=config.apply_chat_template,
                template_kwargs=prompt.template_kwargs,
            )
            return tokens[-limit:]

        found = Agreement(
            model=self.policy.model,
            logprobs=lambda batch, temperature: replace(scorer, temperature=temperature).logprobs(
                batch, self.machine.ranks, config.micro.max_tokens
            ),
            render=render,
            temperature=scorer.temperature,
            sampling_temperature=self.sampler.sampling.temperature,
            version=0,
            tolerance=TOLERANCES[self.policy.compute_dtype],
        ).check(batch, rollouts)
        session.bus.event("agreement", **found)
        return found

    def _keep(self, session: Session, log: RolloutLog, step: int, scored: Sequence[Scored], pending: Pending) -> None:
        """Write the rollout log and report samples."""
        ranks, every = self.machine.ranks, self.config.log.samples_every
        if ranks.from_first(ranks.rank == 0 and log.wants(step)):
            pending.measured = {}
        if ranks.rank != 0:
            return
        bus, was_full = session.bus, log.full
        if pending.measured is not None:
            log.write(step, scored, pending.batch, pending.scores, pending.credit)
            if log.full and not was_full:
                size = f"{self.config.log.rollouts_gb:g} GB (log.rollouts_gb)"
                bus.event("alert", message=f"rollouts/ exceeds {size}: from now on, one in {SPARSE} steps is logged.")
        if every and (step % every == 0 or step == 1):
            shown = next((item for item in scored if item.reward is not None), None)
            if shown is not None:
                asked = shown.rollout.prompt
                expected = {} if asked.answer is None else {"answer": str(asked.answer)}
                prompt, text = str(asked.messages[-1]["content"]), shown.rollout.text
                bus.event("sample", step=step, prompt=prompt, text=text, reward=shown.reward, **expected)

    def _keep_measured(self, session: Session, log: RolloutLog, step: int, measured: Mapping[str, Tensor]) -> None:
        if session.ranks.rank == 0:
            log.add(step, measured)

    def show(self, session: Session, found: Evaluation | None) -> None:
        if found is not None and session.ranks.rank == 0:
            write_samples(session.rundir.path / "samples.md", found.rows)

    def entries(self, session: Session) -> Mapping[str, Any]:
        if self.front is not None:
            self.front.draw()
        config, plan, state = self.config, self.plan, self.loop_state
        facts = {name: session.facts.get(name) for name in ("rollouts", "before", "after", "warmup")}
        return {
            "command": "rl",
            "task": config.task,
            "algo": config.algo,
            "lr": plan.lr,
            "usual_lr": usual_lr(model_in(config), plan.task),
            "entropy_coef": config.entropy.coef,
            "other_algo": other_algorithm(config),
            "steps": state.step,
            "updates": state.update,
            "rows": session.facts["rows"],
            **facts,
            "max_tokens": plan.max_tokens,
            "usual_max_tokens": usual_max_tokens(plan.task),
        }

    def close(self) -> None:
        self.rewards.close()
        close_env(self.sampler.env)
        self.engine.close()
