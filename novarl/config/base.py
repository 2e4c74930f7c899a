"""What all kinds of runs share: a model and a device, rows, and training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from novarl.config.parts import Count, Lora, Micro, Node, Optim, Share, Text, Texts, conflict


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError("must be a number, text, true or false")


Option = Annotated[Any, AfterValidator(_plain)]

_COLUMNS = (
    *("prompt_key", "completion_key", "answer_key", "messages_key", "text_key"),
    *("chosen_key", "rejected_key", "label_key"),
)


class Config(Node):
    """What every command needs: a model and a device to run it on."""

    kind: ClassVar[str]
    _objects: dict[str, Any] = PrivateAttr(default_factory=dict)
    _given: dict[str, str] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    model: Text
    """A model: `tiny` or `small` (built in, untrained), a directory, or a Hugging Face id."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Random seed. The same seed gives bit-identical results on the same machine with the same number of threads."""
    threads: Count | None = None
    """Number of CPU threads. null: OMP_NUM_THREADS, otherwise 2."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|xpu|cuda(:\d+)?)$")] = "auto"
    """Device: auto, cpu, cuda, cuda:N, mps or xpu."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation. Trained weights stay in float32. On CPUs without bfloat16 instructions float32 is
    faster."""
    apply_chat_template: bool = True
    """Render messages with the chat template. false: message contents are concatenated, for base models."""
    chat_template: Text | None = None
    """A chat template that replaces the tokenizer's: a Jinja file or the template itself. It is saved with the
    model."""
    chat_template_kwargs: dict[Text, Any] = Field(default_factory=dict)
    """Extra arguments for the chat template, such as enable_thinking. A column of this name in the data takes
    precedence."""
    chat_template_date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = None
    """Date (YYYY-MM-DD) for chat templates that write the date. null: the day the run starts."""
    tools: Text | Annotated[tuple[dict[str, Any], ...], Field(strict=False)] | None = None
    """Tool schemas for the chat template: a JSON file with a list, or the list itself. A column of this name in the
    data takes precedence."""

    trust_remote_code: Texts = ()
    """Models (directories or hub ids) whose own Python code (auto_map in config.json) may be executed. Read the code
    first."""
    trust_pickle: Texts = ()
    """Models (directories or hub ids) whose weights may be loaded from pickle files, such as pytorch_model.bin."""

    def object(self, key: str) -> Any:
        """The Python object behind a key whose value is only a name, such as a model or a function; None if there is no
        object."""
        return self._objects.get(key)

    @property
    def has_objects(self) -> bool:
        """Whether there are objects behind any keys."""
        return bool(self._objects)

    def given_as(self, key: str) -> str:
        """The argument that the user gave the object of a key as, such as `prompts` for `data`."""
        return self._given.get(key, key)

    def with_objects(self, objects: Mapping[str, Any], given: Mapping[str, str]) -> Self:
        """The same configuration with Python objects behind some of its keys, which were `given` under other names."""
        other = self.model_copy()
        other._objects, other._given = dict(objects), dict(given)
        return other

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on names that were accepted and ignored, shown by the run and by `novarl explain`."""
        return self._notes

    def with_notes(self, notes: Iterable[str]) -> Self:
        """The same configuration with notes to show."""
        other = self.model_copy()
        other._notes = tuple(notes)
        return other

    @field_validator("trust_remote_code", "trust_pickle", mode="before")
    @classmethod
    def _models_are_named(cls, value: Any) -> Any:
        if value is False:
            return ()
        if value is True:
            raise PydanticCustomError("unnamed", "must list the models, by directory or hub id")
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _template_is_used(self) -> Config:
        for name in ("chat_template", "chat_template_kwargs", "chat_template_date", "tools"):
            if not self.apply_chat_template and getattr(self, name):
                raise conflict(name, f"{name} has no effect with apply_chat_template=false", "remove one of them")
        return self


class RunConfig(Config):
    """What every run over rows needs: a task, or data and its columns, and an output directory."""

    task: Text | None = None
    """A built-in task: sort, arithmetic, lexical, sentiment or bandit. Set either this or `data`."""
    task_options: dict[Text, Option] = Field(default_factory=dict)
    """Options of the task, such as difficulty or brevity_penalty_scale."""
    data: Text | None = None
    """Training data: a file or folder (JSON, JSONL, CSV, Parquet, Arrow) or a Hugging Face dataset, `name@split`."""
    prompt_key: Text | None = None
    """Column with the prompt. null: detected by common names."""
    messages_key: Text | None = None
    """Column with the chat messages. null: `messages`."""
    max_bad_rows: Share = 0.01
    """Maximum fraction of unusable rows. The run does not start if there are more."""
    max_length: Count | None = None
    """Maximum number of tokens per row (for rl and eval, per prompt). null: as many as the model's context allows."""
    run_dir: Text | None = None
    """Output directory. null: runs/<kind>-<time>."""

    @model_validator(mode="after")
    def _one_source_of_rows(self) -> RunConfig:
        fix = "set task=sort (or arithmetic, lexical, sentiment, bandit) or data=rows.jsonl"
        if self.task is None and self.data is None:
            raise conflict("", "neither task nor data is given", fix)
        if self.task is not None and self.data is not None:
            raise conflict("data", f"task={self.task} and data={self.data} are both given", "remove one of them")
        for name in _COLUMNS:
            column = getattr(self, name, None)
            if self.task is not None and column is not None:
                raise conflict(
                    name,
                    f"{name}={column} is a column of a data file, but the rows come from task={self.task}",
                    "remove it, or set data instead of task",
                )
        if self.messages_key is not None and self.prompt_key is not None:
            raise conflict(
                "messages_key",
                f"messages_key={self.messages_key} and prompt_key={self.prompt_key} both set the prompt column",
                "remove one of them",
            )
        if self.task is None and self.task_options:
            raise conflict(
                "task_options",
                "task_options are options of a built-in task, but the rows come from data",
                "remove them",
            )
        held_out = getattr(getattr(self, "eval", None), "data", None)
        if self.task is not None and held_out is not None:
            raise conflict(
                "eval.data", f"task={self.task} has its own held-out rows", "remove it, or set data instead of task"
            )
        return self


class TrainConfig(RunConfig):
    """What every training run needs: an optimizer, and when to save, evaluate and report."""

    model: Text = "tiny"
    """A model: `tiny` or `small` (built in, untrained), a directory, or a Hugging Face id."""
    resume: Text | None = None
    """Resume a run. auto: from the last checkpoint in `run_dir`; a path: from that checkpoint; null: start a new
    run."""
    save_every: Count | None = 50
    """Save a checkpoint every N steps. null: only at the end."""
    eval_every: Count | None = None
    """Evaluate every N steps. null: only before and after training."""
    keep: Count = 2
    """Number of recent checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best held-out score."""
    optim: Optim = Optim()
    lora: Lora = Lora()
    micro: Micro = Micro()
    attn: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    """Attention implementation for training. sdpa: PyTorch's kernel, called for groups of rows; flash: PyTorch's flash
    attention in one call (CUDA, bfloat16); eager: a plain softmax (slow); auto: flash if it is available, otherwise
    sdpa."""
    compile: bool = False
    """Train with torch.compile and sample with CUDA graphs, on a GPU. The first step waits for the compiler."""

    @model_validator(mode="after")
    def _resume_and_length_are_clear(self) -> TrainConfig:
        if self.resume == "auto" and self.run_dir is None:
            raise conflict("resume", "resume=auto needs run_dir", "set run_dir=runs/...")
        steps, epochs = getattr(self, "steps", None), getattr(self, "epochs", None)
        if steps is not None and epochs is not None:
            raise conflict(
                "epochs", f"steps={steps} and epochs={epochs} both set the length of training", "remove one of them"
            )
        return self
