"""`novarl sft`: the parts of a supervised run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from novarl.compose.chat import date_facts, date_notes
from novarl.compose.lora import adapt, adapter_state, keep_base
from novarl.compose.resolve import SFTPlan, resolve_sft
from novarl.compose.rows import raw, sft_rows, subject
from novarl.compose.sampling import greedy_sampler
from novarl.compose.settings import run_settings
from novarl.compose.weights import optim_settings, read_policy, shard_policy
from novarl.config.tree import SFTConfig
from novarl.config.unread import without_effect
from novarl.core.types import Prompt, Scored, Sequence as TokenSequence
from novarl.data.dataset import load_rl
from novarl.data.pack import pack_sequences
from novarl.data.render import turn_text
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.loops.evaluate import Evaluation, evaluate_likelihood
from novarl.loops.offline import OfflineStages, offline
from novarl.loops.state import LoopState
from novarl.models.load import Policy, save
from novarl.rewards.compose import RewardSet
from novarl.run.fingerprint import fingerprint
from novarl.run.judge import SHOWN, Judge, write_samples
from novarl.run.lifecycle import Machine, Phase, Run, Training
from novarl.run.session import Session

SHOWN_TOKENS = 256
"""Maximum answer length in samples.md."""


def sft_run(config: SFTConfig) -> Run:
    """A run that has not started."""
    plan = resolve_sft(config)
    settings = run_settings(config, threads=config.threads)
    return Run(settings, lambda machine: SFTTraining(config, plan, machine))


class SFTTraining(Training):
    """Loads and checks everything; nothing is written yet."""

    def __init__(self, config: SFTConfig, plan: SFTPlan, machine: Machine) -> None:
        self.config, self.plan, self.machine = config, plan, machine
        self.state = machine.opened.state
        self.policy = read_policy(config, machine.opened, machine.device)
        if config.fsdp:
            shard_policy(self.policy, machine.ranks, lora=config.lora.rank > 0, compiled=config.compile)
        adapt(config, self.policy, self.state)
        self.rows = rows = sft_rows(config, plan.task, self.policy)
        if self.state is not None:
            rows.check_same(self.state["facts"], machine.opened.rundir.path)
        self.steps = config.steps or max(1, math.ceil((config.epochs or 1.0) * len(rows.train) / config.batch_size))
        compute_dtype = self.policy.compute_dtype
        self.scorer = Scorer(self.policy.model, chunk=config.micro.logprob_chunk, compute_dtype=compute_dtype)
        self.longest = plan.task.max_tokens if plan.task else SHOWN_TOKENS
        self.sampler = greedy_sampler(self.policy, config, machine.loop, max_tokens=self.longest)
        self.engine = self.sampler.engine
        self.judge = self._judge()
        self.loop_state = LoopState()

    def _judge(self) -> Judge | None:
        """Scores answers to the task's held-out problems; None for a data file, which has no reward."""
        task, policy = self.plan.task, self.policy
        if task is None:
            return None
        prompts, _ = load_rl(
            raw(task.rows("held_out", seed=0)[: self.config.eval.n]),
            tokenizer=policy.tokenizer,
            max_length=policy.context,
            apply_chat_template=self.config.apply_chat_template,
            template_kwargs=policy.template_kwargs,
        )
        rewards = RewardSet(task.rewards(), task.weights)
        return Judge(prompts, self.sampler, rewards, self.machine.ranks, self.sampler.sampling, 0)

    @property
    def notes(self) -> Sequence[str]:
        config = self.config
        return [
            *date_notes(self.policy, config, self.state),
            *without_effect(config),
            *self.rows.notes(config.data, config.eval.n),
        ]

    def facts(self) -> Mapping[str, Any]:
        return date_facts(self.policy)

    def write_model(self, folder: Path) -> None:
        save(self.policy, folder)

    def begin(self, session: Session) -> None:
        if self.state is None:
            keep_base(self.config, self.policy, self.machine.opened, session.ranks)

    def phases(self, session: Session) -> Iterator[Phase]:
        config, state = self.config, self.loop_state
        learner = SupervisedLearner(
            self.policy.model,
            self.scorer,
            optim=optim_settings(config.optim, lr=self.plan.lr, total=self.steps),
            ranks=session.ranks,
            budget=config.micro.max_tokens,
        )
        if self.state is not None:
            state.load_state_dict(self.state["loop"])
            learner.load_state_dict(self.state["learner"])
        stages: OfflineStages[TokenSequence] = OfflineStages(
            rows=self.rows.train,
            pack=pack_sequences,
            update=learner.update,
            bus=session.bus,
            batch_size=config.batch_size,
            seed=config.seed,
        )

        def snapshot() -> dict[str, Any]:
            return {
                "model": fingerprint(self.policy),
                "loop": state.state_dict(),
                "learner": learner.state_dict(),
                **adapter_state(config, self.policy),
            }

        yield Phase("sft", offline(state, stages, steps=self.steps), state, self.steps, snapshot)

    @property
    def evaluate(self) -> Callable[[], Evaluation] | None:
        """By the task's reward, or by how likely held-out rows are."""
        return self._evaluate if self.judge is not None or self.rows.held_out else None

    def _evaluate(self) -> Evaluation:
        if self.judge is not None:
            self.publish()
            return self.judge()
        ranks, budget = self.machine.ranks, self.config.micro.max_tokens
        return evaluate_likelihood(self.rows.held_out, lambda batch: self.scorer.logprobs(batch, ranks, budget))

    def show(self, session: Session, found: Evaluation | None) -> None:
        sampler, sampling = self.sampler, self.sampler.sampling
        self.publish()
        if self.judge is not None:
            asked = list(enumerate(self.judge.prompts[:SHOWN]))
            scored = self.judge.score(sampler.evaluate(asked, 1, sampling))
        else:
            rows = (self.rows.held_out or self.rows.train)[:SHOWN]
            asked = [(index, _question(row, index, self.policy)) for index, row in enumerate(rows)]
            scored = [Scored(rollout, {}, math.nan) for rollout in sampler.evaluate(asked, 1, sampling)]
        if session.ranks.rank == 0:
            write_samples(session.rundir.path / "samples.md", scored)

    def entries(self, session: Session) -> Mapping[str, Any]:
        state = self.loop_state
        return {
            "command": "sft",
            "task": self.config.task,
            "lr": self.plan.lr,
            "steps": state.step,
            "updates": state.update,
            **subject(self.config),
            **{name: session.facts.get(name) for name in ("rows", "before", "after")},
        }

    def close(self) -> None:
        self.engine.close()


def _question(sequence: TokenSequence, index: int, policy: Policy) -> Prompt:
    """A row as a prompt (everything before the first trained token) with its answer."""
    begin = sequence.mask.index(True)
    text = policy.tokenizer.decode(sequence.tokens[:begin], skip_special_tokens=True)
    trained = [token for token, chosen in zip(sequence.tokens, sequence.mask, strict=True) if chosen]
    ended = trained[-1] in policy.eos_ids
    answer = turn_text(policy.tokenizer, sequence.tokens[:begin], trained, ended=ended)
    return Prompt(f"row {index + 1}", sequence.tokens[:begin], ({"role": "user", "content": text},), answer)
