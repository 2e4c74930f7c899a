"""The rows of a run: a task's or a data file's, with some held out, each one accounted for."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from novarl.config.preference import DPOConfig, RMConfig
from novarl.config.tree import EvalConfig, RLConfig, SFTConfig
from novarl.core.bus import Bus
from novarl.core.errors import NovaError
from novarl.core.types import Prompt, Sequence as TokenSequence
from novarl.data.dataset import RowCounts, load_rl, load_sft
from novarl.data.formats import BadRow, Columns, detect
from novarl.data.pairs import Labelled, Pair
from novarl.data.sources import RawRow, read
from novarl.data.unused import Unused
from novarl.models.load import Policy
from novarl.tasks.registry import Task

T = TypeVar("T")
HELD_OUT_SHARE = 10
"""At most one row in so many of a data file is held out."""


@dataclass(slots=True)
class Rows(Generic[T]):
    """`train` to learn from, `held_out` to measure on, what became of the rows, and those that could not be used."""

    train: list[T]
    held_out: list[T]
    counts: RowCounts
    bad: list[BadRow] = field(default_factory=list)
    unused: Unused = field(default_factory=Unused)

    def summary(self) -> dict[str, int]:
        return {**asdict(self.counts), "held_out": len(self.held_out)}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint remembers of them."""
        return {"rows": self.summary(), "train_rows": len(self.train)}

    def check_same(self, facts: Mapping[str, Any], run_dir: Path) -> None:
        """NovaError where a run that goes on would learn from another number of rows than its checkpoint has in
        mind: its place among them would mean others."""
        before, now = facts.get("train_rows", len(self.train)), len(self.train)
        if before != now:
            raise NovaError(
                f"the run there learns from {before:,} rows, and this would from {now:,}",
                where=f"run_dir={run_dir}",
                fix="continue it with its data and its eval.n, or start a new run with model=<checkpoint>/model",
            )

    def notes(self, data: str | None, wanted: int, *, reads: Collection[str] | None = ()) -> list[str]:
        """What should be known of a run on the rows of `data`, of which up to `wanted` were to be held out, and whose
        columns `reads` (None: all) are for rewards."""
        return [*(self.unused.notes(reads) if data else ()), *self._held_out_notes(data, wanted)]

    def _held_out_notes(self, data: str | None, wanted: int) -> list[str]:
        if not data or not wanted:
            return []
        if not self.held_out:
            few = f"fewer than {HELD_OUT_SHARE} rows: no held-out split, so evaluation is skipped"
            return [f"{few} (eval.data=FILE evaluates on other rows)"]
        learnt = set(map(_content, self.train))
        known = sum(_content(item) in learnt for item in self.held_out)
        if not known:
            return []
        many = f"{known:,} of {len(self.held_out):,} held-out {'row is' if len(self.held_out) == 1 else 'rows are'}"
        return [f"{many} in the training rows too, word for word: the score is not on new rows alone"]

    def report(self, bus: Bus) -> None:
        """An event for each row that could not be used."""
        for row in self.bad:
            bus.event("bad_row", where=row.where, field=row.field, reason=row.reason)


def _content(item: object) -> tuple[int, ...]:
    """What makes two rows the same: a prompt's tokens, a sequence's, those of the better answer of a pair."""
    match item:
        case Pair(chosen=row) | Labelled(sequence=row):
            return row.tokens
        case Prompt() | TokenSequence():
            return item.tokens
    raise TypeError(f"no row: {type(item).__name__}")


def subject(config: SFTConfig | DPOConfig | RMConfig) -> dict[str, str | None]:
    """The words that give reinforcement the rows, if they have prompts of their own, and the model of this run, for a
    summary's advice."""
    named = [(name, getattr(config, name)) for name in ("data", "prompt_key", "messages_key")]
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in named if value is not None)
    return {"data": words if words and _has_prompts(config) else None, "base": shlex.quote(config.model)}


def _has_prompts(config: SFTConfig | DPOConfig | RMConfig) -> bool:
    if config.data is None:
        return False
    try:
        first = list(islice(read(config.data), 8))
        detect(first, "rl", keys=Columns(messages=config.messages_key, prompt=config.prompt_key), where=config.data)
    except NovaError:
        return False
    return True


def raw(rows: Iterable[Mapping[str, Any]]) -> list[RawRow]:
    """A task's rows as if read from a file; a row's own id is its place."""
    return [
        RawRow(index, str(row["id"]), {key: value for key, value in row.items() if key != "id"})
        for index, row in enumerate(rows)
    ]


def set_aside(items: list[T], most: int, sizes: Sequence[int] | None = None) -> tuple[list[T], list[T]]:
    """(train, held out): every so-manyth row, at most `most` and a tenth of all, the same whatever the seed.

    `sizes`: how many consecutive items each row gave (one each, where not said). They stay on one side.
    """
    sizes = [1] * len(items) if sizes is None else sizes
    count = min(most, len(sizes) // HELD_OUT_SHARE)
    if count == 0:
        return items, []
    stride = len(sizes) // count
    held = set(range(stride - 1, stride * count, stride))
    row_of = [row for row, size in enumerate(sizes) for _ in range(size)]
    sides: tuple[list[T], list[T]] = ([], [])
    for item, row in zip(items, row_of, strict=True):
        sides[row in held].append(item)
    return sides


def longest_prompt(config: RLConfig | EvalConfig, policy: Policy, *, max_tokens: int) -> int:
    """The most tokens in a prompt: `max_length`, and in any case what the context leaves beside the answer."""
    room = policy.context - max_tokens
    if room < 1:
        raise NovaError(
            f"answers of {max_tokens} tokens leave no room for a prompt in a context of {policy.limit}",
            where="rollout.max_tokens",
            fix="make it smaller",
        )
    return min(config.max_length or room, room)


def longest_sequence(config: RLConfig, rows: Rows[Prompt], policy: Policy, *, max_tokens: int) -> int:
    """The most tokens in a sequence that may be sampled from the rows; several turns may fill the policy's context."""
    if config.rollout.max_turns > 1:
        return policy.context
    return max((len(prompt.tokens) for prompt in rows.train), default=0) + max_tokens


def rl_rows(config: RLConfig | EvalConfig, task: Task | None, policy: Policy, *, max_tokens: int) -> Rows[Prompt]:
    """Prompts to train on and to measure on."""
    bad: list[BadRow] = []
    options: dict[str, Any] = {
        "tokenizer": policy.tokenizer,
        "max_length": longest_prompt(config, policy, max_tokens=max_tokens),
        "on_long": config.on_long,
        "apply_chat_template": config.apply_chat_template,
        "template_kwargs": policy.template_kwargs,
        "max_bad_rows": config.max_bad_rows,
        "report": bad.append,
    }
    keys: dict[str, Any] = {
        "messages_key": config.messages_key,
        "prompt_key": config.prompt_key,
        "answer_key": config.answer_key,
    }
    if task is not None:
        asked = raw(task.rows("held_out", seed=0)[: config.eval.n]) if config.eval.n else []
        if isinstance(config, EvalConfig):
            return Rows([], *load_rl(asked, **options), bad)
        held_out = load_rl(asked, **options)[0] if asked else []
        train, counts = load_rl(raw(task.rows("train", seed=0)), **options)
        return Rows(train, held_out, counts, bad)
    assert config.data is not None
    unused = Unused()
    prompts, counts = load_rl(config.data, **options, **keys, unused=unused)
    if isinstance(config, EvalConfig):
        return Rows([], prompts[: config.eval.n], counts, bad, unused)
    if config.eval.data:
        held_out, _ = load_rl(config.eval.data, **options, **keys)
        return Rows(prompts, held_out[: config.eval.n], counts, bad, unused)
    return Rows(*set_aside(prompts, config.eval.n), counts, bad, unused)


def sft_rows(config: SFTConfig, task: Task | None, policy: Policy) -> Rows[TokenSequence]:
    """Sequences to imitate and to measure on."""
    bad: list[BadRow] = []
    options: dict[str, Any] = {
        "tokenizer": policy.tokenizer,
        "max_length": min(config.max_length or policy.context, policy.context),
        "on_long": config.on_long,
        "apply_chat_template": config.apply_chat_template,
        "template_kwargs": policy.template_kwargs,
        "max_bad_rows": config.max_bad_rows,
        "report": bad.append,
    }
    keys: dict[str, Any] = {
        "messages_key": config.messages_key,
        "prompt_key": config.prompt_key,
        "completion_key": config.completion_key,
        "text_key": config.text_key,
    }
    if task is not None:
        sequences, counts = load_sft(raw(demonstrations(task)), **options)
        return Rows(sequences, [], counts, bad)
    assert config.data is not None
    sizes: list[int] = []
    unused = Unused()
    sequences, counts = load_sft(config.data, **options, **keys, sizes=sizes, unused=unused)
    if config.eval.data:
        held_out, _ = load_sft(config.eval.data, **options, **keys)
        return Rows(sequences, held_out[: config.eval.n], counts, bad, unused)
    return Rows(*set_aside(sequences, config.eval.n, sizes), counts, bad, unused)


def demonstrations(task: Task) -> list[dict[str, Any]]:
    """A task's demonstrations as rows with ids."""
    return [
        {"id": f"{task.name}/demonstration/{index}", **row} for index, row in enumerate(task.demonstrations(seed=0))
    ]
