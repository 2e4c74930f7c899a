"""The data types of a run, and the protocols of its parts.

Data flows one way: Prompt -> Rollout -> Scored -> Batch -> Scores -> Credit -> Record. Each stage returns the next
type; nothing is filled in later. This module imports no torch, so that tools that only read a run start quickly.

The alignment rule, everywhere: column t of a per-token tensor describes `tokens[t]`, and a mask is True where the
policy chose that token. The shift between a token and the position that predicts it is in one place, `Batch.prev`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat message: `role` and `content`, as in the OpenAI format."""

Record = dict[str, float]
Update = dict[str, Any]
"""A Record as a run yields it: with its `phase` ("warmup", "rl", "sft", ...) and `step`."""
"""The metrics of one optimiser update, by glossary name; the same on every rank."""

Status = Literal["done", "truncated", "failed"]
Role = Literal["train", "baseline"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a task or dataset, rendered to tokens. `id` is its permanent name ("sort/train/41", "rows.jsonl:12")
    and the key of its random stream; `extra` holds the other columns, which rewards receive by name. `conversational`
    is False if the row held a plain string: TRL-style rewards then receive strings. `template_kwargs` are the chat
    template's arguments (`tools`, `enable_thinking`)."""

    id: str
    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    answer: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    conversational: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


COLDEST = 1e-4
"""The lowest temperature above 0: below it, the scaled logits would overflow float32."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: temperature 0 is greedy; `top_k=0`, `top_p=1.0`, `min_p=0.0` keep the full support. A completion
    ends with a string of `stop` or a token of `stop_tokens`, which it keeps. `answered`: how many of the prompt's last
    tokens belong to the answer being continued, in which a stop string may begin. `supports`: record the possible
    tokens under truncation, as training requires."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    answered: int = 0
    seed: int = 0
    supports: bool = False

    @property
    def truncates(self) -> bool:
        """Whether the support is truncated (top-k, top-p or min-p)."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def records(self) -> bool:
        """Whether supports are recorded: requested, and the support is truncated."""
        return self.supports and self.truncates and self.temperature > 0


@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's output: `logp[t]` is the log-probability of `tokens[t]` under the actual sampling distribution.

    `kept_logmass[t]` is the log of the probability mass kept by truncation (0.0 for the full support), `versions[t]`
    the version of the weights that sampled the token. Greedy tokens have their log-probability at temperature 1.
    `support[t]` is the set of possible tokens at position t, as the words of `algos.support`, little-endian (empty: all
    tokens); None without truncation or `Sampling.supports`.
    """

    tokens: tuple[int, ...]
    logp: tuple[float, ...]
    kept_logmass: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    support: tuple[bytes, ...] | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """A token sequence as the model sees it, prompt and all, aligned column by column. `support[t]`: as in
    `Completion`, empty for tokens that the policy did not choose."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]
    behavior_logp: tuple[float, ...]
    kept_logmass: tuple[float, ...]
    versions: tuple[int, ...]
    support: tuple[bytes, ...] | None = None

    def __post_init__(self) -> None:
        lengths = {
            len(self.tokens),
            len(self.mask),
            len(self.behavior_logp),
            len(self.kept_logmass),
            len(self.versions),
            len(self.tokens if self.support is None else self.support),
        }
        if len(lengths) != 1:
            raise ValueError(f"a Sequence's columns must be equally long, got lengths {sorted(lengths)}")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One trajectory: the policy's answer to a prompt, over one or more turns. `group` is the id of all samples of the
    prompt in one step, `index` the number among them. The `role` "baseline" (the greedy rollout of SCST and ReMax) is
    never trained on. An episode whose context was rewritten has several sequences. `messages` is the whole conversation
    that rewards receive, with the policy's last answer."""

    prompt: Prompt
    group: int
    index: int
    sequences: tuple[Sequence, ...]
    messages: tuple[Message, ...]
    text: str
    status: Status = "done"
    finish_reason: str = "stop"
    role: Role = "train"
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scored:
    """A rollout with its rewards by name (without those that do not apply) and `reward`, their weighted sum. It is None
    if one failed (raised, timed out, returned no finite number), for the reason `error`: the rollout is then counted
    and excluded from training, never scored 0. `extra` and `metrics` are what reward functions logged: columns of the
    rollout log, and metrics of the batch."""

    rollout: Rollout
    rewards: Mapping[str, float]
    reward: float | None
    error: str | None = None
    token_rewards: tuple[float, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Trajectories packed on one flat token axis, without padding. N tokens, S sequences, R trajectories, K rewards.

    tokens[N] int64, position_ids[N] int64 (from 0 in each sequence), prev[N] int64 (the flat position whose output
    predicts this token; -1 for a sequence's first token), cu_seqlens[S+1] int64 (where sequences begin and end),
    mask[N] bool (the policy chose it), behavior_logp[N] float (0 outside the mask), version[N] int64, traj[S] int64
    (the trajectory of each sequence), group[R] int64, reward[R] float, rewards[R, K] float, reward_names (K of them),
    truncated[R] bool (stopped by a limit, not by itself), baseline[R] bool (a rollout that is never trained on; its
    mask is all False).

    Under truncated sampling, support[W] int32 and cu_support[N+1] int64 hold the possible tokens at each position
    (`algos.support`): the words of token t are support[cu_support[t] : cu_support[t + 1]], empty if all were possible.
    Both are None without truncation.
    """

    tokens: Tensor
    position_ids: Tensor
    prev: Tensor
    cu_seqlens: Tensor
    mask: Tensor
    behavior_logp: Tensor
    version: Tensor
    traj: Tensor
    group: Tensor
    reward: Tensor
    rewards: Tensor
    reward_names: tuple[str, ...]
    truncated: Tensor
    baseline: Tensor
    support: Tensor | None = None
    cu_support: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """Model outputs for a batch before its first update, per token [N]; saved with it and never recomputed. values: of
    the state before the token; bootstrap [R]: after a trajectory's last token, 0 if it terminated; token_reward: in
    addition to the trajectory's; segment: the index (from 0) of the token's step, if steps are longer than a token."""

    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    values: Tensor | None = None
    bootstrap: Tensor | None = None
    token_reward: Tensor | None = None
    segment: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Credit:
    """How much better each token was than expected: advantage[N], 0 outside the mask; returns[N] for a critic."""

    advantage: Tensor
    returns: Tensor | None = None


class Tokenizer(Protocol):
    """The tokenizer interface, implemented by Hugging Face tokenizers and the built-in byte tokenizer."""

    eos_token_id: int
    pad_token_id: int
    chat_template: str | None

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, tokens: Seq[int], /, *, skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(
        self, conversation: Seq[Message], /, *, tokenize: bool, add_generation_prompt: bool, **template_kwargs: Any
    ) -> Any: ...
    def save_pretrained(self, save_directory: str, /) -> Any: ...


class Engine(Protocol):
    """Samples completions. `key` names the random stream: equal keys give equal completions, whatever else is asked."""

    async def sample(self, tokens: Seq[int], sampling: Sampling, *, key: str) -> Completion: ...
    def publish(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EnvStep:
    """The result of an environment step: messages to append (none: the episode is over), and an optional reward."""

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """A conversational environment, created anew for each episode."""

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]: ...
    async def step(self, messages: Seq[Message]) -> EnvStep: ...


class TensorEnv(Protocol):
    """A vector environment over tensors: observations [B, ...], actions [B], rewards [B], dones [B]."""

    def reset(self, batch_size: int) -> Tensor: ...
    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


class Reward(Protocol):
    """Scores a list of rollouts: a number, several by name, or None (a failure) for each."""

    async def __call__(self, rollouts: Seq[Rollout]) -> list[float | Mapping[str, float] | None]: ...


class Learner(Protocol):
    """Updates the weights from credit: one optimiser update per call."""

    def update(self, batch: Batch, scores: Scores, credit: Credit) -> Record: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Buffer(Protocol):
    """A FIFO buffer of scored rollouts between sampling and learning, which drops stale ones."""

    def put(self, scored: Seq[Scored], version: int) -> None: ...
    def get(self, n: int, version: int) -> list[Scored]: ...
    def __len__(self) -> int: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Sink(Protocol):
    """A receiver of reports. Sinks never affect the run: with all of them attached it is bit-identical."""

    def step(self, step: int, record: Mapping[str, float]) -> None: ...
    def event(self, kind: str, fields: Mapping[str, Any]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
