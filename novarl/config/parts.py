"""The sections of a configuration: `optim.*`, `rollout.*`, `kl.*` and the others.

Every value is checked when the tree is built: unknown keys, wrong types and values out of range are refused. Types are
strict: a number in quotes is text. `null` means that the default depends on other settings; the key's description says
which.
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
"""A function in a user's file: `file.py:name`."""
Texts = Annotated[tuple[Text, ...], Field(strict=False)]


class Node(BaseModel):
    """A frozen group of keys. Two values that contradict each other raise a NovaError that names the first."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
        defer_build=True,  # each command needs only a few of about thirty groups
    )


def conflict(key: str, what: str, fix: str) -> NovaError:
    """The error of a key that contradicts another one."""
    return NovaError(what, where=key, fix=fix)


def _all_tokens(value: Any) -> Any:
    """Other libraries write -1 for 0."""
    return 0 if value == -1 and not isinstance(value, bool) else value


class Sampled(Node):
    """The sampling distribution. The filters apply in the order top_k, top_p, min_p, each to the tokens left by the one
    before."""

    temperature: AtLeast0 = 1.0
    """Sampling temperature. 0 is greedy decoding; any other value must be at least 1e-4."""
    top_k: Annotated[Whole, BeforeValidator(_all_tokens)] = 0
    """Sample from the k most likely tokens only. 0 or -1: all tokens."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the smallest set of tokens whose total probability is at least top_p."""
    min_p: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Minimum probability of a token, relative to the most likely token."""

    @field_validator("temperature")
    @classmethod
    def _is_not_too_small(cls, value: float) -> float:
        if 0 < value < COLDEST:
            raise PydanticCustomError("temperature", "must be 0 or at least {least}", {"least": f"{COLDEST:g}"})
        return value


class Talk(Sampled):
    """How `novarl sample` generates answers."""

    max_tokens: Count = 256
    """Maximum number of tokens per answer."""
    stop: Texts = ()
    """Strings that end an answer."""


class Episode(Node):
    """How answers are generated and scored."""

    max_tokens: Count | None = None
    """Maximum number of tokens per answer (per turn in multi-turn episodes). null: set by the task, or 256 for a data
    file."""
    stop: Texts = ()
    """Strings that end an answer."""
    max_turns: Count = 1
    """Maximum number of model turns per episode."""
    env_path: Text | None = None
    """A Python file with `interact(messages)` for multi-turn episodes. It also provides `reward_fn(messages, answer)`
    unless `reward` is set. With reward=environment, the reward is returned by `interact`: {"messages": [...], "reward":
    1.0, "done": true}. With max_turns=1 a file with only `reward_fn` is enough."""
    max_batch: Count = 256
    """Maximum number of answers sampled at the same time. Affects speed and memory, never the results."""
    reward_timeout: Above0 = 10.0
    """Time limit in seconds for one call of a reward (for one answer; TRL's form: for all), after which its process is
    killed."""
    reward_workers: Count | None = None
    """Processes that run a reward file. A slow function that is not async and takes one answer is spread over them.
    null: one for each core, at most 8. Set 1 if a score depends on earlier calls, more if calls wait for a server."""
    reward_memory: Count | None = None
    """Memory limit in MB for each process of a custom reward or env_path (RLIMIT_DATA, allocated memory). null: no
    limit."""

    @model_validator(mode="after")
    def _turns_need_an_environment(self) -> Episode:
        if self.max_turns > 1 and self.env_path is None:
            raise conflict(
                "rollout.max_turns",
                f"rollout.max_turns={self.max_turns} needs an environment that replies to the policy",
                "set rollout.env_path to a file with interact(messages), or use rollout.max_turns=1",
            )
        return self


class Rollout(Episode, Sampled):
    """How training answers are sampled. With top_k, top_p or min_p, the sampler records the allowed tokens and the
    learner's probabilities are normalized over them."""

    temperature: Annotated[float, Field(ge=COLDEST)] = 1.0
    """Sampling temperature. The learner's log-probabilities are computed at the same temperature."""
    staleness: Literal[0, 1] = 0
    """1: a second process samples the next step's answers, with weights that are one step old, while the current step
    is trained on. Importance weights correct for it (see `correction`)."""
    threads: Count | None = None
    """CPU threads of the sampling process with staleness=1. null: half of `threads`, so that both processes together
    use `threads`."""

    @model_validator(mode="after")
    def _threads_need_staleness(self) -> Rollout:
        if self.threads is not None and self.staleness == 0:
            raise conflict(
                "rollout.threads",
                "without rollout.staleness=1 there is no separate sampling process",
                "add rollout.staleness=1, or set threads",
            )
        return self


class Evaluation(Sampled):
    """Evaluation on held-out rows: greedy decoding, and pass@k from samples at `eval.temperature`."""

    n: Count = 500
    """Maximum number of held-out rows to evaluate."""
    k: Whole = 0
    """Samples per row for pass@1 to pass@k. A reward of at least 1 counts as correct; 0: greedy decoding only."""

    @model_validator(mode="after")
    def _samples_must_differ(self) -> Evaluation:
        if self.k > 1 and self.temperature == 0:
            raise conflict(
                "eval.k",
                f"pass@{self.k} at temperature 0 would sample {self.k} identical answers",
                "set eval.temperature above 0, or eval.k=0",
            )
        return self


class HeldOut(Evaluation):
    """Evaluation before and after training, and every `eval_every` steps."""

    n: Whole = 500
    """Maximum number of held-out rows to evaluate. 0: no evaluation."""
    data: Text | None = None
    """A data file of held-out rows. null: some rows of `data` are held out. Tasks have their own held-out rows."""

    @model_validator(mode="after")
    def _evaluation_is_on(self) -> HeldOut:
        for name in ("k", "data"):
            if self.n == 0 and getattr(self, name):
                raise conflict(f"eval.{name}", "eval.n=0 turns evaluation off", f"remove eval.n or eval.{name}")
        return self


class Rows(Node):
    """The held-out rows."""

    data: Text | None = None
    """A data file of held-out rows. null: some rows of `data` are held out. Tasks have their own held-out rows."""
    n: Count = 500
    """Maximum number of held-out rows to evaluate."""


class Optim(Node):
    """AdamW and its learning-rate schedule, counted in optimizer updates."""

    lr: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Peak learning rate. null: one default for models with a hidden size of at most 256 (such as the built-in ones)
    and another for larger models; `novarl explain` prints the value."""
    weight_decay: AtLeast0 = 0.0
    """Weight decay, applied to matrices only."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Adam's decay rates of the first and second moment estimates."""
    eps: Above0 = 1e-8
    """Adam's epsilon, added to the denominator."""
    max_grad_norm: AtLeast0 = 1.0
    """Maximum gradient norm for clipping. 0: no clipping."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warmup."""
    warmup_steps: Whole = 0
    """Updates in which the learning rate rises from 0."""
    warmup_ratio: Share = 0.0
    """The same as a share of all updates, rounded up, in place of warmup_steps."""
    min_lr_ratio: Share = 0.0
    """Final learning rate of the schedule as a fraction of the peak."""

    @model_validator(mode="after")
    def _schedule_is_clear(self) -> Optim:
        if self.warmup_steps > 0 and self.warmup_ratio > 0:
            raise conflict(
                "optim.warmup_ratio",
                "optim.warmup_steps and optim.warmup_ratio both set the warm-up",
                "remove one of them",
            )
        if self.schedule == "constant" and self.min_lr_ratio > 0:
            raise conflict(
                "optim.min_lr_ratio",
                "the constant schedule does not decay the learning rate",
                "use optim.schedule=linear or cosine, or remove optim.min_lr_ratio",
            )
        return self


class Lora(Node):
    """Low-rank adapters (LoRA): the base model is frozen and low-rank matrices beside its linear layers are trained."""

    rank: Whole = 0
    """Rank of the adapters. 0: no adapters, all weights are trained."""
    alpha: Above0 = 16.0
    """Scaling: the adapter's output is multiplied by alpha / rank."""
    target: Annotated[Literal["all-linear"] | Texts, Field(union_mode="left_to_right")] = "all-linear"
    """Layers with adapters, by the last parts of their names, such as [q_proj, v_proj]. all-linear: every linear layer
    except the output head."""


class Micro(Node):
    """How a batch is split to fit in memory. The gradient does not depend on it."""

    max_tokens: Count = 2048
    """Maximum number of tokens in one forward and backward pass. Shared prefixes count once. 2048 suits a CPU's caches,
    16384 a GPU."""
    logprob_chunk: Count | None = None
    """Maximum number of tokens whose logits are held in memory at once. null: as many as fit in 256 MiB."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory at the cost of time."""


def _listed(value: Any) -> Any:
    """One name, or several separated by commas, are a list."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Trackers = Annotated[tuple[Literal["trackio", "wandb", "mlflow"], ...], Field(strict=False), BeforeValidator(_listed)]


class Log(Node):
    """What a run reports in addition to metrics.jsonl and events.jsonl."""

    console: bool = True
    """Print progress: a live line in a terminal, plain lines in a pipe."""
    tensorboard: bool = True
    """Write TensorBoard event files to tb/."""
    trackers: Trackers = ()
    """Experiment trackers that receive the metrics too: trackio, wandb, mlflow."""
    project: Text = "novarl"
    """Project (MLflow: experiment) of the run in the trackers."""
    run_name: Text | None = None
    """Name of the run in the trackers. null: the name of run_dir."""
    artifacts: bool = False
    """Also store the final model in the trackers."""


class RolloutLog(Log):
    """What an RL run reports in addition to metrics.jsonl and events.jsonl."""

    rollouts_every: Count | None = 1
    """Write all answers with their rewards and tokens to rollouts/ every N steps. null: never."""
    rollouts_gb: Above0 | None = 2.0
    """Once rollouts/ holds more than this, write only one in ten of these steps. null: no limit."""
    samples_every: Count | None = 10
    """Print one answer at step 1 and every N steps. null: never."""


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
"""The built-in rewards and the options of each; the options are fields of `RewardSpec`."""


class RewardSpec(Node):
    """One of several rewards."""

    source: Text
    """A built-in reward or `file.py:name`. May be omitted if the reward is named after a built-in one."""
    weight: float = 1.0
    """Weight in the sum that is trained on."""
    shortest: Whole | None = None
    """length: answers with fewer words get -2. null: 5."""
    longest: Whole | None = None
    """length: answers with more words get -1. null: 20."""
    tolerance: AtLeast0 | None = None
    """math: numbers match if |a - b| <= tolerance * max(1, |b|), unless both are whole. null: six decimals."""

    brevity_penalty_scale: AtLeast0 | None = None
    """lexical: penalty of an empty text; shorter texts get a proportional penalty. null: 0."""
    target_words: Count | None = None
    """lexical: number of words from which there is no penalty. null: 80."""
    max_completion_len: Count | None = None
    """get_soft_overlong_punishment: longer answers (in tokens) get -1. Required."""
    soft_punish_cache: Whole | None = None
    """get_soft_overlong_punishment: length in tokens of the zone below the limit in which the reward falls from 0 to
    -1. Required."""
    ngram_size: Count | None = None
    """get_repetition_penalty_reward: tokens per n-gram. null: 3."""
    max_penalty: Annotated[float, Field(le=0.0)] | None = None
    """get_repetition_penalty_reward: the lowest reward, for an answer that only repeats itself. null: -1."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set, by name."""
        names = {name for options in BUILT_IN_REWARDS.values() for name in options}
        return {name: value for name in sorted(names) if (value := getattr(self, name)) is not None}


def rewards_by_name(value: Any) -> Any:
    """Normalize `reward=length`, `reward=file.py:name`, `reward=file.py` and `reward=model:FOLDER` to a mapping with
    one entry. In a mapping, a string means `{source: string}`, and a built-in reward needs no source."""
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
    """Refuse options that belong to another reward."""
    for name, spec in rewards.items():
        for option in sorted(spec.options.keys() - BUILT_IN_REWARDS.get(spec.source, ())):
            owners = [reward for reward, options in BUILT_IN_REWARDS.items() if option in options]
            what = f"{option} is an option of reward {' and '.join(owners)}, but reward.{name}.source is {spec.source}"
            raise conflict(f"reward.{name}.{option}", what, "remove it")
    return rewards
