"""One frozen, typed tree per kind of run. Class defaults are the recommended settings.

    RLConfig      novarl rl, novarl demo
    SFTConfig     novarl sft
    DPOConfig     novarl dpo (in preference.py)
    RMConfig      novarl rm (in preference.py)
    EvalConfig    novarl eval
    SampleConfig  novarl sample

Only `cli` and `compose` read a tree; all other packages receive plain values.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from novarl.algos.axes import estimator
from novarl.config.adapting import AdaptiveKL, ConstraintOptimization, Guard, MultiObjective
from novarl.config.algorithm import KL, Advantage, Clip, Correction, Critic, DynamicSampling, Entropy, Loss, Prime, Vine
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
    conflict,
    rewards_by_name,
)
from novarl.config.preference import DPOConfig, RMConfig

BUILT_IN_MODELS = ("tiny", "small")

Rewards = Annotated[
    dict[Text, RewardSpec], Field(min_length=1), BeforeValidator(rewards_by_name), AfterValidator(check_rewards)
]

MOST_ANSWERS = 1 << 20
"""Maximum number of answers per step: far more than any run needs, and few enough to fit in memory."""


class RLConfig(TrainConfig):
    """Reinforcement learning."""

    kind: ClassVar[str] = "rl"

    answer_key: Text | None = None
    """Column with the reference answer that is passed to rewards. null: `answer`, if there is one."""
    on_long: Literal["refuse", "truncate"] = "refuse"
    """What to do with prompts longer than `max_length`: skip and count them, or truncate them at the start."""
    algo: Text = "dr_grpo"
    """The algorithm. `adv`, `clip`, `correction`, `kl`, `entropy` and `loss` change its parts."""
    reward: Rewards | None = None
    """A built-in reward, `file.py:name`, or several rewards by name, each with `source`, `weight` and the options of a
    built-in reward. Options: length: `shortest`, `longest`; math: `tolerance`; lexical: `brevity_penalty_scale`,
    `target_words`; get_soft_overlong_punishment: `max_completion_len`, `soft_punish_cache`;
    get_repetition_penalty_reward: `ngram_size`, `max_penalty`. null: the task's."""
    steps: Count = 100
    """Number of rollout phases. Each has `updates_per_rollout` optimizer updates."""
    warmup: Whole | None = None
    """Supervised steps on the task's demonstrations before RL. null: set by the task for an untrained built-in model,
    otherwise 0."""
    prompts_per_rollout: Count = 16
    """Prompts per step."""
    responses_per_prompt: Count = 8
    """Answers sampled per prompt (the group size)."""
    updates_per_rollout: Count | None = None
    """Optimizer updates per step. null: set by the algorithm."""
    epochs_per_rollout: Count = 1
    """Passes over the step's answers in those updates."""
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
    guard: Guard = Guard()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    fsdp: bool = False
    """Shard weights, gradients and optimizer states over the processes of torchrun, by PyTorch's FSDP2."""
    log: RolloutLog = RolloutLog()
    eval: HeldOut = HeldOut()

    @model_validator(mode="after")
    def _parts_fit(self) -> RLConfig:
        if self.data is not None and self.warmup:
            raise conflict(
                "warmup",
                "warmup trains on a task's demonstrations, and a data file has none",
                "remove it, and fine-tune with novarl sft first",
            )
        if self.data is not None and self.reward is None and self.rollout.env_path is None:
            raise conflict("reward", "data needs a reward", "set reward=file.py:name, or the name of a built-in reward")
        if self.lora.rank > 0 and self.kl.reference == "ema":
            raise conflict(
                "kl.reference",
                "a moving average of adapters is not a moving average of the merged weights",
                "use kl.reference=start (the base without its adapters), or lora.rank=0",
            )
        if self.eval.n == 0 and self.eval_every is not None:
            raise conflict("eval_every", "eval.n=0 turns evaluation off", "remove eval_every, or set eval.n above 0")
        self._groups_are_large_enough()
        self._updates_divide()
        return self

    def _groups_are_large_enough(self) -> None:
        alone = self.responses_per_prompt == 1
        if alone and self.adv.estimator is not None and "group" in estimator(self.adv.estimator).needs:
            raise conflict(
                "adv.estimator",
                f"{self.adv.estimator} compares several answers to a prompt, but responses_per_prompt is 1",
                "use responses_per_prompt=2 or more, or adv.estimator=mean",
            )
        if alone and self.dynamic_sampling.enabled is True:
            raise conflict(
                "dynamic_sampling.enabled",
                "with responses_per_prompt=1 no group has different rewards, so all would be dropped",
                "use responses_per_prompt=2 or more, or dynamic_sampling.enabled=false",
            )

    def _updates_divide(self) -> None:
        trajectories = self.prompts_per_rollout * self.responses_per_prompt
        if trajectories > MOST_ANSWERS:
            raise conflict(
                "prompts_per_rollout",
                f"{trajectories:,} answers per step exceed the maximum of {MOST_ANSWERS:,}",
                "lower prompts_per_rollout or responses_per_prompt, and use more steps",
            )
        if self.updates_per_rollout is None:
            return
        if self.updates_per_rollout % self.epochs_per_rollout != 0:
            raise conflict(
                "epochs_per_rollout",
                f"{self.updates_per_rollout} updates cannot be split evenly into {self.epochs_per_rollout} epochs",
                "make updates_per_rollout a multiple of epochs_per_rollout",
            )
        if self.updates_per_rollout // self.epochs_per_rollout > trajectories:
            raise conflict(
                "updates_per_rollout",
                f"{trajectories} answers per step are too few for {self.updates_per_rollout} updates",
                "lower updates_per_rollout, or raise epochs_per_rollout or prompts_per_rollout",
            )


class SFTConfig(TrainConfig):
    """Supervised fine-tuning on assistant turns."""

    kind: ClassVar[str] = "sft"

    completion_key: Text | None = None
    """Column with the completion. null: detected by common names."""
    text_key: Text | None = None
    """Column with plain text to train on, without a prompt. null: `text`, if no other format fits."""
    on_long: Literal["truncate", "refuse"] = "truncate"
    """What to do with rows longer than `max_length`: truncate them at the end, or skip them. Both are counted."""
    steps: Count | None = None
    """Number of optimizer updates. null: as many as `epochs` takes."""
    epochs: Annotated[float, Field(gt=0.0)] | None = None
    """Number of passes over the rows. null: 1, unless `steps` is set."""
    batch_size: Count = 32
    """Rows in an update; they are packed end to end, without padding, and never see each other."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer states over the processes of torchrun, by PyTorch's FSDP2."""
    log: Log = Log()
    eval: Rows = Rows()


class EvalConfig(RunConfig):
    """Evaluation on held-out rows: greedy decoding and pass@k, with confidence intervals."""

    kind: ClassVar[str] = "eval"

    answer_key: Text | None = None
    """Column with the reference answer that is passed to rewards. null: `answer`, if there is one."""
    on_long: Literal["refuse", "truncate"] = "refuse"
    """What to do with prompts longer than `max_length`: skip and count them, or truncate them at the start."""
    reward: Rewards | None = None
    """A built-in reward, `file.py:name`, or several rewards by name, each with `source`, `weight` and the options of a
    built-in reward. Options: length: `shortest`, `longest`; math: `tolerance`; lexical: `brevity_penalty_scale`,
    `target_words`; get_soft_overlong_punishment: `max_completion_len`, `soft_punish_cache`;
    get_repetition_penalty_reward: `ngram_size`, `max_penalty`. null: the task's."""
    best_of: Text | None = None
    """Best-of-N: the name of the reward that selects one of a row's `eval.k` samples; the mean reward of the selected
    samples is reported. Give it weight 0 to judge the selection by the other rewards only."""
    rollout: Episode = Episode()
    eval: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _can_judge(self) -> EvalConfig:
        if self.best_of is not None and self.eval.k < 2:
            raise conflict(
                "best_of",
                f"best-of-N needs at least 2 samples per row, but eval.k is {self.eval.k}",
                "set eval.k to the number of samples",
            )
        if self.best_of is not None and self.best_of not in (self.reward or {}):
            raise conflict(
                "best_of",
                f"there is no reward named {self.best_of!r}",
                "use a name from `reward`, such as reward={rm: {source: 'model:runs/rm', weight: 0}, math: math}",
            )
        if self.data is not None and self.reward is None and self.rollout.env_path is None:
            raise conflict("reward", "data needs a reward", "set reward=file.py:name, or the name of a built-in reward")
        return self


class SampleConfig(Config):
    """Answers to prompts."""

    kind: ClassVar[str] = "sample"

    prompt: Text | None = None
    """The prompt. null: each line of the standard input is a prompt."""
    n: Count = 1
    """Number of answers per prompt."""
    sampling: Talk = Talk()

    @model_validator(mode="after")
    def _answers_differ(self) -> SampleConfig:
        if self.n > 1 and self.sampling.temperature == 0:
            raise conflict(
                "n", f"temperature 0 would give {self.n} identical answers", "set sampling.temperature above 0, or n=1"
            )
        return self


TREES: dict[str, type[Config]] = {
    tree.kind: tree for tree in (RLConfig, SFTConfig, DPOConfig, RMConfig, EvalConfig, SampleConfig)
}
"""The trees by command."""
