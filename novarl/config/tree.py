"""One frozen, typed tree per kind of run. Class defaults are the vetted setting.

    RLConfig      novarl rl, novarl demo
    SFTConfig     novarl sft
    DPOConfig     novarl dpo (in preference.py)
    RMConfig      novarl rm (in preference.py)
    EvalConfig    novarl eval
    SampleConfig  novarl sample

Everything below `build` takes the few values it needs and never sees a tree.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from novarl.algos.axes import estimator
from novarl.config.adapting import AdaptiveKL, ConstraintOptimization, MultiObjective
from novarl.config.algorithm import (
    KL,
    Advantage,
    Clip,
    Correction,
    Critic,
    DynamicSampling,
    Entropy,
    Loss,
    Prime,
    Vine,
)
from novarl.config.base import Config, RunConfig, TrainConfig
from novarl.config.parts import (
    Count,
    Episode,
    Evaluation,
    HeldOut,
    Log,
    RewardSpec,
    Rollout,
    RolloutLog,
    Rows,
    Talk,
    Text,
    Whole,
    check_rewards,
    refuse,
    rewards_by_name,
)
from novarl.config.preference import DPOConfig, RMConfig

BUILT_IN_MODELS = ("tiny", "small")

Rewards = Annotated[
    dict[Text, RewardSpec],
    Field(min_length=1),
    BeforeValidator(rewards_by_name),
    AfterValidator(check_rewards),
]

MOST_ANSWERS = 1 << 20
"""Answers to one step's prompts: far more than runs take, far fewer than fill a machine."""


class RLConfig(TrainConfig):
    """Reinforcement learning: sample, score, credit, update, sync."""

    kind: ClassVar[str] = "rl"

    answer_key: Text | None = None
    """The column with the answer that rewards see; null: `answer` where there is one."""
    on_long: Literal["refuse", "truncate"] = "refuse"
    """A prompt longer than `max_length` is counted and left out, or cut at its beginning."""
    algo: Text = "dr_grpo"
    """A row of the table of algorithms; `adv`, `clip`, `correction`, `kl`, `entropy` and `loss` change its parts."""
    reward: Rewards | None = None
    """A built-in reward, `file.py:name`, or several by name, each with `source`, `weight` and a built-in
    reward's options: length: `shortest`, `longest`; math: `tolerance`; lexical: `brevity_penalty_scale`,
    `target_words`; get_soft_overlong_punishment: `max_completion_len`, `soft_punish_cache`;
    get_repetition_penalty_reward: `ngram_size`, `max_penalty`. null: the task's."""
    steps: Count = 100
    """Rollouts to learn from; each has `updates_per_rollout` optimiser updates."""
    warmup: Whole | None = None
    """Supervised steps on the task's demonstrations before the first rollout; null: the task's for an untrained
    built-in model, 0 for any other."""
    prompts_per_rollout: Count = 16
    """Prompts in a step."""
    responses_per_prompt: Count = 8
    """Answers sampled to each prompt."""
    updates_per_rollout: Count | None = None
    """Optimiser updates in a step; null: the algorithm's."""
    epochs_per_rollout: Count = 1
    """How often those updates go through the step's answers."""
    rollout: Rollout = Rollout()
    adv: Advantage = Advantage()
    critic: Critic = Critic()
    vine: Vine = Vine()
    prime: Prime = Prime()
    clip: Clip = Clip()
    correction: Correction = Correction()
    kl: KL = KL()
    entropy: Entropy = Entropy()
    loss: Loss = Loss()
    adaptive_kl: AdaptiveKL = AdaptiveKL()
    constraint_optimization: ConstraintOptimization = ConstraintOptimization()
    multi_objective: MultiObjective = MultiObjective()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    fsdp: bool = False
    """Shard weights, gradients and optimiser states over the processes of torchrun, by PyTorch's FSDP2."""
    log: RolloutLog = RolloutLog()
    eval: HeldOut = HeldOut()

    @model_validator(mode="after")
    def _parts_fit(self) -> RLConfig:
        refuse(
            self.data is not None and bool(self.warmup),
            "warmup",
            "warm-up learns from a task's demonstrations, and a data file has none",
            "leave it out; fine-tune with novarl sft first",
        )
        refuse(
            self.data is not None and self.reward is None and self.rollout.env_path is None,
            "reward",
            "nothing says how good an answer to a row of data is",
            "write reward=file.py:name, or the name of a built-in reward",
        )
        refuse(
            self.lora.rank > 0 and self.kl.reference == "ema",
            "kl.reference",
            "the moving average of adapters is not that of the weights they stand for",
            "use kl.reference=start (the base without its adapters), or lora.rank=0",
        )
        refuse(
            self.eval.n == 0 and self.eval_every is not None,
            "eval_every",
            "with eval.n=0 the run is not evaluated",
            "leave one of the two out",
        )
        self._groups_are_large_enough()
        self._updates_divide()
        return self

    def _groups_are_large_enough(self) -> None:
        alone = self.responses_per_prompt == 1
        refuse(
            alone and self.adv.estimator is not None and "group" in estimator(self.adv.estimator).needs,
            "adv.estimator",
            f"{self.adv.estimator} compares the answers to one prompt, and responses_per_prompt=1 leaves no others",
            "use responses_per_prompt=2 or more, or adv.estimator=mean",
        )
        refuse(
            alone and self.dynamic_sampling.enabled is True,
            "dynamic_sampling.enabled",
            "with responses_per_prompt=1 every prompt's answers score the same, and all would be dropped",
            "use responses_per_prompt=2 or more, or dynamic_sampling.enabled=false",
        )

    def _updates_divide(self) -> None:
        trajectories = self.prompts_per_rollout * self.responses_per_prompt
        refuse(
            trajectories > MOST_ANSWERS,
            "prompts_per_rollout",
            f"{trajectories:,} answers in a step are more than the {MOST_ANSWERS:,} that are held in memory at once",
            "use fewer prompts_per_rollout or responses_per_prompt, and more steps",
        )
        if self.updates_per_rollout is None:
            return
        refuse(
            self.updates_per_rollout % self.epochs_per_rollout != 0,
            "epochs_per_rollout",
            f"{self.updates_per_rollout} updates cannot be shared evenly among {self.epochs_per_rollout} epochs",
            "make updates_per_rollout a multiple of epochs_per_rollout",
        )
        refuse(
            self.updates_per_rollout // self.epochs_per_rollout > trajectories,
            "updates_per_rollout",
            f"{trajectories} answers in a step cannot be shared among {self.updates_per_rollout} updates",
            "use fewer updates, more epochs_per_rollout or more prompts_per_rollout",
        )


class SFTConfig(TrainConfig):
    """Supervised fine-tuning: the loss of every assistant turn."""

    kind: ClassVar[str] = "sft"

    completion_key: Text | None = None
    """The column with the answer to learn; null: found by its usual names."""
    text_key: Text | None = None
    """The column with texts to learn whole, without a prompt; null: `text`, where nothing else fits."""
    on_long: Literal["truncate", "refuse"] = "truncate"
    """A row longer than `max_length` is cut at its end, or left out; counted either way."""
    steps: Count | None = None
    """Optimiser updates; null: as many as `epochs` takes."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """How often to go through the rows; null: once, unless `steps` is given."""
    batch_size: Count = 32
    """Rows in an update; they are packed end to end, without padding, and never see each other."""
    fsdp: bool = False
    """Shard weights, gradients and optimiser states over the processes of torchrun, by PyTorch's FSDP2."""
    log: Log = Log()
    eval: Rows = Rows()

    @model_validator(mode="after")
    def _one_length(self) -> SFTConfig:
        refuse(
            self.steps is not None and self.epochs is not None,
            "epochs",
            f"steps={self.steps} and epochs={self.epochs} both say how long to train",
            "leave one of them out",
        )
        return self


class EvalConfig(RunConfig):
    """Evaluation on held-out rows: greedy and pass@k, with intervals."""

    kind: ClassVar[str] = "eval"

    answer_key: Text | None = None
    """The column with the answer that rewards see; null: `answer` where there is one."""
    on_long: Literal["refuse", "truncate"] = "refuse"
    """A prompt longer than `max_length` is counted and left out, or cut at its beginning."""
    reward: Rewards | None = None
    """A built-in reward, `file.py:name`, or several by name, each with `source`, `weight` and a built-in
    reward's options: length: `shortest`, `longest`; math: `tolerance`; lexical: `brevity_penalty_scale`,
    `target_words`; get_soft_overlong_punishment: `max_completion_len`, `soft_punish_cache`;
    get_repetition_penalty_reward: `ngram_size`, `max_penalty`. null: the task's."""
    best_of: Text | None = None
    """Best-of-N: which reward, by name, picks one of a row's `eval.k` samples, whose mean reward is then reported; give
    it weight 0 to judge its choice by the other rewards."""
    rollout: Episode = Episode()
    eval: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _can_judge(self) -> EvalConfig:
        refuse(
            self.best_of is not None and self.eval.k < 2,
            "best_of",
            f"there is nothing to choose among with eval.k={self.eval.k}",
            "set eval.k to the number of samples",
        )
        refuse(
            self.best_of is not None and self.best_of not in (self.reward or {}),
            "best_of",
            f"no reward is called {self.best_of!r}",
            "name one that `reward` lists, such as reward={rm: {source: 'model:runs/rm', weight: 0}, math: math}",
        )
        refuse(
            self.data is not None and self.reward is None and self.rollout.env_path is None,
            "reward",
            "nothing says how good an answer to a row of data is",
            "write reward=file.py:name, or the name of a built-in reward",
        )
        return self


class SampleConfig(Config):
    """Talk to a model."""

    kind: ClassVar[str] = "sample"

    prompt: Text | None = None
    """What to ask; null: every line of the standard input."""
    n: Count = 1
    """Answers to each prompt."""
    sampling: Talk = Talk()

    @model_validator(mode="after")
    def _answers_differ(self) -> SampleConfig:
        refuse(
            self.n > 1 and self.sampling.temperature == 0,
            "n",
            f"temperature 0 would give {self.n} equal answers",
            "set sampling.temperature above 0, or n=1",
        )
        return self


TREES: dict[str, type[Config]] = {
    tree.kind: tree for tree in (RLConfig, SFTConfig, DPOConfig, RMConfig, EvalConfig, SampleConfig)
}
"""The trees by the command they belong to."""
