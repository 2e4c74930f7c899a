"""The sections of a configuration: what `optim.*`, `rollout.*`, `kl.*` and the others hold.

Every value is checked when the tree is built: unknown keys, wrong types and values out of range are refused. Types are
strict: a number in quotes is text, not a number. `null` means that the default depends on something else, which the
key's description names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from novarl.core.errors import NovaError
from novarl.core.types import COLDEST

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Above0 = Annotated[float, Field(gt=0.0)]
AtLeast0 = Annotated[float, Field(ge=0.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Text = Annotated[str, Field(min_length=1)]
OwnFunction = Annotated[str, Field(pattern=r"\.py\b")]
"""A function in a file of the user's: `file.py:name`."""
Texts = Annotated[tuple[Text, ...], Field(strict=False)]


class Node(BaseModel):
    """A frozen group of keys. A contradiction between two of them raises NovaError, naming the first."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
        defer_build=True,  # of some thirty groups a command needs a few
    )


def refuse(when: bool, key: str, what: str, fix: str) -> None:
    """Raise the contradiction `what` about `key` where `when` holds."""
    if when:
        raise NovaError(what, where=key, fix=fix)


def _all_tokens(value: Any) -> Any:
    """-1 is 0 in other libraries."""
    return 0 if value == -1 and not isinstance(value, bool) else value


class Sampled(Node):
    """A distribution to sample from; the three filters apply in this order, each to what the one before it left."""

    temperature: AtLeast0 = 1.0
    """0 is greedy; else at least 1e-4."""
    top_k: Annotated[Whole, BeforeValidator(_all_tokens)] = 0
    """Only the k likeliest tokens; 0 or -1: all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Only the likeliest tokens that together hold this probability."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Only tokens at least this likely, relative to the likeliest."""

    @field_validator("temperature")
    @classmethod
    def _is_not_too_cold(cls, value: float) -> float:
        if 0 < value < COLDEST:
            raise PydanticCustomError("too_cold", "must be 0 or at least {least}", {"least": f"{COLDEST:g}"})
        return value


class Talk(Sampled):
    """How `novarl sample` answers."""

    max_tokens: Count = 256
    """The longest answer, in tokens."""
    stop: Texts = ()
    """Strings that end an answer."""


class Episode(Node):
    """How an answer is brought about, in training and in evaluation."""

    max_tokens: Count | None = None
    """The longest answer of one turn, in tokens; null: the task's, or 256 for a data file."""
    stop: Texts = ()
    """Strings that end an answer."""
    max_turns: Count = 1
    """The most turns of the policy in an episode."""
    env_path: Text | None = None
    """A Python file with `interact(messages)`, and `reward_fn(messages, answer)` unless `reward` names another; with
    reward=environment the reward is what `interact` returns: {"messages": [...], "reward": 1.0, "done": true}. At
    max_turns=1 a file with `reward_fn` alone will do."""
    max_batch: Count = 256
    """The most answers that are sampled at the same time; changes speed and memory, never a result."""
    reward_timeout: Above0 = 10.0
    """Time limit in seconds for one call of a reward (for one answer; TRL's form: for all), after which its process is
    killed."""
    reward_workers: Count | None = None
    """Processes that run a reward file. A slow function that is not async and takes one answer is spread over them.
    null: one for each core, at most 8. Set 1 if a score depends on earlier calls, more if calls wait for a server."""
    reward_memory: Count | None = None
    """MB that each process of a reward of your own, or of env_path, may have (RLIMIT_DATA: what it has asked for, used
    or not); null: no limit."""

    @model_validator(mode="after")
    def _turns_need_a_partner(self) -> Episode:
        refuse(
            self.max_turns > 1 and self.env_path is None,
            "rollout.max_turns",
            f"{self.max_turns} turns, yet nobody answers after the first",
            "name a file with interact(messages) in rollout.env_path, or leave rollout.max_turns at 1",
        )
        return self


class Rollout(Episode, Sampled):
    """How training answers are sampled. Under top_k, top_p or min_p the sampler records which tokens were possible, and
    the learner's probabilities are those within them."""

    temperature: Annotated[float, Field(ge=COLDEST)] = 1.0
    """The learner's log-probabilities are taken at this temperature too."""
    staleness: Literal[0, 1] = 0
    """1: while a step's answers are learnt from, a second process samples the next step's, from weights that are one
    step old; corrected by importance weights (`correction`)."""
    threads: Count | None = None
    """With staleness=1: the second process's own CPU threads, beside `threads`; null: half of `threads`, so that both
    together have as many."""

    @model_validator(mode="after")
    def _threads_need_a_process(self) -> Rollout:
        refuse(
            self.threads is not None and self.staleness == 0,
            "rollout.threads",
            "without rollout.staleness=1 answers are sampled by the process that learns, with its threads",
            "add rollout.staleness=1, or set threads",
        )
        return self


class Evaluation(Sampled):
    """How good a policy is on held-out rows: greedy, and pass@k from samples at `eval.temperature`."""

    n: Count = 500
    """The most held-out rows to answer."""
    k: Whole = 0
    """Samples of each row for pass@1 ... pass@k, right from a reward of 1 on; 0: greedy only."""

    @model_validator(mode="after")
    def _samples_must_differ(self) -> Evaluation:
        refuse(
            self.k > 1 and self.temperature == 0,
            "eval.k",
            f"pass@{self.k} at temperature 0 would compare {self.k} equal answers",
            "set eval.temperature above 0, or eval.k=0",
        )
        return self


class HeldOut(Evaluation):
    """The evaluations of a training run: before, after and every `eval_every` steps."""

    n: Whole = 500
    """The most held-out rows to answer; 0: the run is not evaluated."""
    data: Text | None = None
    """Held-out rows for `data`; null: some of its own rows are set aside. A task brings its own."""

    @model_validator(mode="after")
    def _there_is_something_to_answer(self) -> HeldOut:
        for name in ("k", "data"):
            refuse(
                self.n == 0 and bool(getattr(self, name)),
                f"eval.{name}",
                "with eval.n=0 the run is not evaluated",
                f"leave one of eval.n and eval.{name} out",
            )
        return self


class Rows(Node):
    """The held-out rows of supervised fine-tuning."""

    data: Text | None = None
    """Held-out rows for `data`; null: some of its own rows are set aside. A task brings its own."""
    n: Count = 500
    """The most held-out rows to measure."""


class Optim(Node):
    """AdamW and its learning-rate schedule, counted in optimiser updates."""

    lr: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """null: one for models up to 256 wide, as the built-in ones, and one for others; `novarl explain` says which."""
    weight_decay: AtLeast0 = 0.0
    """On matrices only."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Memory of the first and the second moment."""
    eps: Above0 = 1e-8
    """Added to the root of the second moment."""
    max_grad_norm: AtLeast0 = 1.0
    """Clip the gradient to this norm; 0: never."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls after its warm-up."""
    warmup_steps: Whole = 0
    """Updates in which the learning rate rises from 0."""
    warmup_ratio: Share = 0.0
    """The same as a share of all updates, rounded up, in place of warmup_steps."""
    min_lr_ratio: Share = 0.0
    """What is left of the learning rate at the end."""

    @model_validator(mode="after")
    def _schedule_is_clear(self) -> Optim:
        refuse(
            self.warmup_steps > 0 and self.warmup_ratio > 0,
            "optim.warmup_ratio",
            "optim.warmup_steps and optim.warmup_ratio both set the warm-up",
            "remove one of them",
        )
        refuse(
            self.schedule == "constant" and self.min_lr_ratio > 0,
            "optim.min_lr_ratio",
            "a constant learning rate never falls",
            "use optim.schedule=linear or cosine, or leave optim.min_lr_ratio out",
        )
        return self


class Lora(Node):
    """Low-rank adapters: the model stays as it is, and two thin matrices beside each of its layers are trained."""

    rank: Whole = 0
    """Columns of the thin matrices; 0: no adapters, all weights are trained."""
    alpha: Above0 = 16.0
    """The adapters' share of a layer's output is scaled by alpha / rank."""
    target: Annotated[Literal["all-linear"] | Texts, Field(union_mode="left_to_right")] = "all-linear"
    """The layers, by the last parts of their names, such as [q_proj, v_proj]; all-linear: every one but the head."""


class Micro(Node):
    """How a batch is cut to fit in memory; the gradient does not depend on it."""

    max_tokens: Count = 2048
    """The most tokens in one forward and backward pass, counting once what neighbours share; 2048 suits the caches of a
    CPU, 16384 a GPU."""
    logprob_chunk: Count | None = None
    """Tokens whose logits exist at the same time, those of the last chunk until the backward pass; null: as many as
    have 256 MiB of them."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""


class Log(Node):
    """What a run reports beside metrics.jsonl and events.jsonl."""

    console: bool = True
    """A live line, or plain lines in a pipe."""
    tensorboard: bool = True
    """Curves under tb/."""


class RolloutLog(Log):
    """What a run with rollouts reports."""

    rollouts_every: Count | None = 10
    """Write every answer, its rewards and its tokens to rollouts/ each so many steps; null: never."""
    samples_every: Count | None = 10
    """Print one answer each so many steps; null: never."""


BUILT_IN_REWARDS: dict[str, tuple[str, ...]] = {
    "lexical": ("brevity_penalty_scale", "target_words"),
    "sentiment": (),
    "preference": (),
    "length": ("shortest", "longest"),
    "math": ("tolerance",),
    "get_soft_overlong_punishment": ("max_completion_len", "soft_punish_cache"),
    "get_repetition_penalty_reward": ("ngram_size", "max_penalty"),
    "environment": (),
}
"""The rewards that need no file, and the options of each: fields of `RewardSpec`."""


class RewardSpec(Node):
    """One of several rewards."""

    source: Text
    """A built-in reward, or `file.py:name`; for a built-in reward under its own name it may be left out."""
    weight: float = 1.0
    """Its weight in the sum that is trained on."""
    shortest: Whole | None = None
    """length: fewer words are worth -2; null: 5."""
    longest: Whole | None = None
    """length: more words are worth -1; null: 20."""
    tolerance: AtLeast0 | None = None
    """math: numbers that are not both whole agree when |a - b| <= tolerance * max(1, |b|); null: to six decimals."""

    brevity_penalty_scale: AtLeast0 | None = None
    """lexical: what a text without words loses; shorter texts lose in proportion. null: 0."""
    target_words: Count | None = None
    """lexical: from so many words on nothing is lost; null: 80."""
    max_completion_len: Count | None = None
    """get_soft_overlong_punishment: an answer of more tokens is worth -1; to be set."""
    soft_punish_cache: Whole | None = None
    """get_soft_overlong_punishment: over so many tokens before that the reward falls from 0 to -1; to be set."""
    ngram_size: Count | None = None
    """get_repetition_penalty_reward: tokens of an n-gram; null: 3."""
    max_penalty: Annotated[float, Field(le=0.0)] | None = None
    """get_repetition_penalty_reward: what an answer of nothing but repetitions approaches; null: -1."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set, by name."""
        names = {name for options in BUILT_IN_REWARDS.values() for name in options}
        return {name: value for name in sorted(names) if (value := getattr(self, name)) is not None}


def rewards_by_name(value: Any) -> Any:
    """`reward=length`, `reward=file.py:name`, `reward=file.py` and `reward=model:FOLDER` as a mapping of one; in a
    mapping, text stands for `{source: text}`, and a built-in reward's name for its source."""
    if isinstance(value, str):
        function = "reward_fn" if value.endswith(".py") else value.rpartition(":")[2]
        value = {"model" if value.startswith("model:") else function: value}
    if not isinstance(value, dict):
        return value
    return {
        name: {"source": spec}
        if isinstance(spec, str)
        else {"source": name, **spec}
        if isinstance(spec, dict) and name in BUILT_IN_REWARDS
        else spec
        for name, spec in value.items()
    }


def check_rewards(rewards: dict[str, RewardSpec]) -> dict[str, RewardSpec]:
    """Refuse an option of another reward."""
    for name, spec in rewards.items():
        known = BUILT_IN_REWARDS.get(spec.source, ())
        for option in spec.options:
            owners = [reward for reward, options in BUILT_IN_REWARDS.items() if option in options]
            refuse(
                option not in known,
                f"reward.{name}.{option}",
                f"{option} is an option of reward {' and '.join(owners)}, and reward.{name}.source is {spec.source}",
                "leave it out",
            )
    return rewards
