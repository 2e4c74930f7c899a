"""`novarl sft`: the parts of a supervised run."""

from __future__ import annotations

import math
from collections.abc import Callable

from novarl.compose.lora import keep_base
from novarl.compose.offline import SHOWN_TOKENS, OfflineTraining
from novarl.compose.resolve import SFTPlan, resolve_sft
from novarl.compose.rows import raw, sft_rows
from novarl.compose.settings import run_settings
from novarl.config.tree import SFTConfig
from novarl.core.types import Batch, Prompt, Scored, Sequence as TokenSequence
from novarl.data.dataset import load_rl
from novarl.data.pack import pack_sequences
from novarl.data.render import turn_text
from novarl.data.rows import Rows
from novarl.learn.supervised import OfflineLearner, SupervisedLearner
from novarl.loops.evaluate import Evaluation, evaluate_likelihood
from novarl.models.load import Policy
from novarl.rewards.compose import RewardSet
from novarl.run.judge import SHOWN, Judge, write_samples
from novarl.run.lifecycle import Machine, Run
from novarl.run.session import Session


def sft_run(config: SFTConfig) -> Run:
    """A run that has not started."""
    plan = resolve_sft(config)
    settings = run_settings(config, threads=config.threads)
    return Run(settings, lambda machine: SFTTraining(config, plan, machine))


class SFTTraining(OfflineTraining):
    """Loads and checks everything; nothing is written yet."""

    def __init__(self, config: SFTConfig, plan: SFTPlan, machine: Machine) -> None:
        self.config, self.plan = config, plan
        super().__init__(config, plan.lr, machine, plan.task.max_tokens if plan.task else SHOWN_TOKENS)
        self.judge = self._judge()

    def read_rows(self) -> Rows[TokenSequence]:
        return sft_rows(self.config, self.plan.task, self.policy)

    def learner(self) -> OfflineLearner:
        return SupervisedLearner(self.policy.model, self.scorer, **self.fitted())

    @staticmethod
    def pack(rows: list[TokenSequence]) -> Batch:
        return pack_sequences(rows)

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

    def begin(self, session: Session) -> None:
        if self.state is None:
            keep_base(self.config, self.policy, self.machine.opened, session.ranks)

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


def _question(sequence: TokenSequence, index: int, policy: Policy) -> Prompt:
    """A row as a prompt (everything before the first trained token) with its answer."""
    begin = sequence.mask.index(True)
    text = policy.tokenizer.decode(sequence.tokens[:begin], skip_special_tokens=True)
    trained = [token for token, chosen in zip(sequence.tokens, sequence.mask, strict=True) if chosen]
    ended = trained[-1] in policy.eos_ids
    answer = turn_text(policy.tokenizer, sequence.tokens[:begin], trained, ended=ended)
    return Prompt(f"row {index + 1}", sequence.tokens[:begin], ({"role": "user", "content": text},), answer)
