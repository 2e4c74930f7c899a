"""What the kinds of run have in common: a model and a machine, rows, and training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator
from pydantic_core import PydanticCustomError

from novarl.config.parts import Count, Lora, Micro, Node, Optim, Share, Text, Texts, refuse


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError("must be one number, text, true or false")


Option = Annotated[Any, AfterValidator(_plain)]


class Config(Node):
    """What every command needs: a model, and a machine to run it on."""

    kind: ClassVar[str]
    _objects: dict[str, Any] = PrivateAttr(default_factory=dict)
    _notes: tuple[str, ...] = PrivateAttr(default=())

    model: Text
    """`tiny` or `small` (built in), a directory, or a Hugging Face id."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The same seed gives the same run, bit for bit, on the same machine with as many threads."""
    threads: Count | None = None
    """CPU threads; null: what OMP_NUM_THREADS says, otherwise 2."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|xpu|cuda(:\d+)?)$")] = "auto"
    """auto, cpu, cuda, cuda:N, mps or xpu."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What is computed in; trained weights are kept in float32. A CPU without bf16 arithmetic is faster in float32."""
    apply_chat_template: bool = True
    """false: the contents of the messages are joined as they are, as base models want it."""
    chat_template: Text | None = None
    """A file with a chat template (Jinja), or the template itself, in place of the tokenizer's; it is saved with the
    model."""
    chat_template_kwargs: dict[Text, Any] = Field(default_factory=dict)
    """What the chat template is given beside the messages, such as enable_thinking. A row's column of this
    name takes precedence."""
    chat_template_date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = None
    """The day, YYYY-MM-DD, that a chat template which writes the date is given; null: the day the run starts."""
    tools: Text | Annotated[tuple[dict[str, Any], ...], Field(strict=False)] | None = None
    """A JSON file with a list of tool schemas, or the list, which the chat template declares. A row's column of
    this name takes precedence."""

    trust_remote_code: Texts = ()
    """Directories or hub ids of models whose own Python code (auto_map in config.json) may run. Read it before."""
    trust_pickle: Texts = ()
    """Directories or hub ids of models whose weights may be read from pickle files, such as pytorch_model.bin."""

    def object(self, key: str) -> Any:
        """The Python object that stands behind a key whose value only names it, such as a model or a function; None
        where the value is all there is."""
        return self._objects.get(key)

    def with_objects(self, objects: Mapping[str, Any]) -> Self:
        """The same configuration with Python objects behind some of its keys."""
        other = self.model_copy()
        other._objects = dict(objects)
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
            raise PydanticCustomError("unnamed", "must name the models, by directory or hub id")
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _a_template_is_read(self) -> Config:
        for name in ("chat_template", "chat_template_kwargs", "chat_template_date", "tools"):
            refuse(
                not self.apply_chat_template and bool(getattr(self, name)),
                name,
                f"{name} is for the chat template, and apply_chat_template=false leaves it out",
                "leave one of them out",
            )
        return self


class RunConfig(Config):
    """What every run over rows needs: a task, or data and its columns, and a directory for what it finds."""

    task: Text | None = None
    """A built-in task: sort, arithmetic, lexical, sentiment or bandit. Either this or `data`."""
    task_options: dict[Text, Option] = Field(default_factory=dict)
    """The task's own settings, such as difficulty or brevity_penalty_scale."""
    data: Text | None = None
    """A file or folder (JSON, JSONL, CSV, Parquet, Arrow) or a Hugging Face data set, `name@split`."""
    prompt_key: Text | None = None
    """The column with the prompt; null: found by its usual names."""
    messages_key: Text | None = None
    """The column with the chat messages; null: `messages`."""
    max_bad_rows: Share = 0.01
    """The share of unusable rows above which the run stops before it starts."""
    max_length: Count | None = None
    """The most tokens in a row (for rl and eval, in its prompt); null: what the model's context leaves room for."""
    run_dir: Text | None = None
    """Where everything is written; null: runs/<kind>-<time>."""

    @model_validator(mode="after")
    def _one_source_of_rows(self) -> RunConfig:
        fix = "write task=sort (or arithmetic, lexical, sentiment, bandit) or data=rows.jsonl"
        refuse(self.task is None and self.data is None, "", "nothing to work on: neither task nor data is given", fix)
        refuse(
            self.task is not None and self.data is not None,
            "data",
            f"task={self.task} and data={self.data} are both given, and rows come from one place",
            "leave one of them out",
        )
        for name in ("prompt_key", "completion_key", "answer_key", "messages_key", "text_key"):
            column = getattr(self, name, None)
            refuse(
                self.task is not None and column is not None,
                name,
                f"{name}={column} names a column of a data file, yet the rows come from task={self.task}",
                "leave it out, or give data instead of task",
            )
        refuse(
            self.messages_key is not None and self.prompt_key is not None,
            "messages_key",
            f"messages_key={self.messages_key} and prompt_key={self.prompt_key} both say where the prompt is",
            "leave one of them out",
        )
        refuse(
            self.task is None and bool(self.task_options),
            "task_options",
            "these are the settings of a built-in task, yet the rows come from data",
            "leave them out",
        )
        held_out = getattr(getattr(self, "eval", None), "data", None)
        refuse(
            self.task is not None and held_out is not None,
            "eval.data",
            f"task={self.task} brings its own held-out rows",
            "leave it out, or give data instead of task",
        )
        return self


class TrainConfig(RunConfig):
    """What every training run needs: an optimiser, and when to save, evaluate and report."""

    model: Text = "tiny"
    """`tiny` or `small` (built in, untrained), a directory, or a Hugging Face id."""
    resume: Text | None = None
    """auto: go on where the run in `run_dir` stopped; a path: from that checkpoint; null: start afresh."""
    save_every: Count | None = 50
    """Save a checkpoint each so many steps; null: only at the end."""
    eval_every: Count | None = None
    """Evaluate each so many steps; null: only before and after."""
    keep: Count = 2
    """Checkpoints to keep."""
    keep_best: bool = True
    """Keep the one that was best on held-out rows as well."""
    optim: Optim = Optim()
    lora: Lora = Lora()
    micro: Micro = Micro()
    attn: Literal["auto", "sdpa", "flash", "eager"] = "auto"
    """What computes attention in training: PyTorch's kernel, in calls for groups of rows (sdpa), its flash attention in
    one call, on CUDA in bfloat16 (flash), or a plain softmax (eager, slow); auto: flash where it runs, else sdpa."""
    compile: bool = False
    """For a GPU: learn through torch.compile, whose compiler the first step waits for, and sample by CUDA graphs."""

    @model_validator(mode="after")
    def _auto_needs_a_place(self) -> TrainConfig:
        refuse(
            self.resume == "auto" and self.run_dir is None,
            "resume",
            "resume=auto looks in run_dir, and without one every run has a directory of its own",
            "name it: run_dir=runs/...",
        )
        return self
