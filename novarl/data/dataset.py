"""Load prompts (RL) or sequences (SFT) from a data source and count what happened to every row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from novarl.core.errors import NovaError
from novarl.core.types import Prompt, Sequence, Tokenizer
from novarl.data.formats import (
    BadRow,
    Columns,
    Refused,
    at_path,
    detect,
    rl_example,
    row_value,
    sft_example,
    template_kwargs_of,
)
from novarl.data.render import Rendered, render_prompt, render_sft
from novarl.data.sources import RawRow, read
from novarl.data.template import REJECTED
from novarl.data.unused import Unused

OnLong = Literal["truncate", "keep_end", "refuse"]
"""`keep_end` is `truncate`, except that labeled texts (`data.pairs`) keep their end."""
Report = Callable[[BadRow], None]
Source = str | Path | Iterable[RawRow]
Item = TypeVar("Item")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Row counts: read = used + refused, and `truncated` of the used rows were cut to `max_length`."""

    read: int
    used: int
    truncated: int
    refused: int


def load_rl(
    source: Source,
    *,
    tokenizer: Tokenizer,
    max_length: int,
    on_long: OnLong = "refuse",
    apply_chat_template: bool = True,
    split: str | None = None,
    messages_key: str | None = None,
    prompt_key: str | None = None,
    answer_key: str | None = None,
    max_bad_rows: float = 0.01,
    report: Report | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    unused: Unused | None = None,
) -> tuple[list[Prompt], RowCounts]:
    """The prompts of a dataset, in order. `source` is a path or Hub id as for `sources.read`, or rows.

    The chat template receives `template_kwargs`, which the row's columns `chat_template_kwargs` and `tools` override. A
    prompt of more than `max_length` tokens is refused, or cut at its beginning with `on_long="truncate"`. `unused`
    collects keys that nothing reads; `report` is told each refused row. NovaError: the source cannot be read, its
    format is unknown, or no row or more than `max_bad_rows` (a fraction) of them cannot be used.
    """

    def build(row: RawRow) -> tuple[list[Prompt], bool]:
        example = rl_example(row, columns)
        part = columns.messages or columns.prompt or ""
        kwargs = row_kwargs(row, template_kwargs, apply_chat_template)
        with named(part):
            tokens = render_prompt(
                tokenizer, example.messages, apply_chat_template=apply_chat_template, template_kwargs=kwargs
            )
        long = len(tokens) > max_length
        if long and on_long == "refuse":
            raise Refused(part, f"the prompt has {len(tokens)} tokens, more than max_length={max_length}")
        value = row_value(row)
        is_text = columns.prompt is not None and isinstance(at_path(value, columns.prompt), str)
        if unused is not None:
            names = (columns.messages, columns.prompt, columns.answer)
            unused.row(
                value, names, example.messages, tokenizer=tokenizer, templated=apply_chat_template, kwargs=kwargs
            )
        prompt = Prompt(
            example.id,
            tokens[-max_length:],
            example.messages,
            example.answer,
            example.extra,
            conversational=not (is_text and len(example.messages) == 1),
            template_kwargs=kwargs,
        )
        return [prompt], long

    rows, where = open_rows(source, split, max_length=max_length, max_bad_rows=max_bad_rows)
    columns = detect(rows, "rl", keys=Columns(messages_key, prompt_key, None, answer_key), where=where)
    return load_rows(rows, build, max_bad_rows=max_bad_rows, report=report, where=where)


def load_sft(
    source: Source,
    *,
    tokenizer: Tokenizer,
    max_length: int,
    on_long: OnLong = "truncate",
    apply_chat_template: bool = True,
    split: str | None = None,
    messages_key: str | None = None,
    prompt_key: str | None = None,
    completion_key: str | None = None,
    text_key: str | None = None,
    max_bad_rows: float = 0.01,
    report: Report | None = None,
    sizes: list[int] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    unused: Unused | None = None,
) -> tuple[list[Sequence], RowCounts]:
    """The training sequences, in order. A row gives several if the chat template rewrites its earlier turns; `sizes`
    collects their number per used row. A `text` column is trained on in full, without chat template (language
    modelling). A row of more than `max_length` tokens is cut at its end (and refused if nothing to train on remains),
    or refused with `on_long="refuse"`. Everything else is as in `load_rl`."""

    def build(row: RawRow) -> tuple[list[Sequence], bool]:
        example = sft_example(row, columns)
        part = columns.messages or columns.completion or columns.text or ""
        templated = apply_chat_template and columns.text is None
        kwargs = row_kwargs(row, template_kwargs, templated)
        with named(part):
            rendered = render_sft(
                tokenizer,
                example.messages,
                context=example.context,
                apply_chat_template=templated,
                template_kwargs=kwargs,
            )
        if unused is not None:
            names = (columns.messages, columns.prompt, columns.completion, columns.text)
            unused.row(row_value(row), names, example.messages, tokenizer=tokenizer, templated=templated, kwargs=kwargs)
        longest = max(len(tokens) for tokens, _ in rendered)
        if longest > max_length and on_long == "refuse":
            raise Refused(part, f"the row has {longest} tokens, more than max_length={max_length}")
        cut = [(tokens[:max_length], mask[:max_length]) for tokens, mask in rendered]
        kept = [as_sequence(piece) for piece in cut if any(piece[1][1:])]
        if not kept:
            raise Refused(part, f"no tokens to train on within max_length={max_length}")
        return kept, longest > max_length

    rows, where = open_rows(source, split, max_length=max_length, max_bad_rows=max_bad_rows)
    columns = detect(rows, "sft", keys=Columns(messages_key, prompt_key, completion_key, text=text_key), where=where)
    return load_rows(rows, build, max_bad_rows=max_bad_rows, report=report, where=where, sizes=sizes)


def as_sequence(rendered: Rendered) -> Sequence:
    """Rendered tokens as a sequence that was not sampled from a policy."""
    tokens, mask = rendered
    zeros = (0.0,) * len(tokens)
    # Nothing predicts the first token, so it is never trained on.
    return Sequence(tokens, (False, *mask[1:]), zeros, zeros, (0,) * len(tokens))


def row_kwargs(row: RawRow, given: Mapping[str, Any] | None, templated: bool) -> dict[str, Any]:
    """The chat template's keyword arguments: `given`, overridden by the row's own."""
    return {**(given or {}), **template_kwargs_of(row_value(row))} if templated else {}


@contextmanager
def named(field: str) -> Iterator[None]:
    """Add `field` to a Refused error raised inside that does not name one."""
    try:
        yield
    except Refused as refused:
        raise refused if refused.field else Refused(field, refused.reason) from refused


def open_rows(source: Source, split: str | None, *, max_length: int, max_bad_rows: float) -> tuple[list[RawRow], str]:
    """The rows of a source, and its name for error messages. NovaError if a limit is out of range."""
    if max_length < 1:
        raise NovaError(f"must be at least 1, not {max_length}", where="max_length", fix="leave room for the prompt")
    if not 0.0 <= max_bad_rows <= 1.0:
        raise NovaError(f"must be a fraction from 0 to 1, not {max_bad_rows}", where="max_bad_rows", fix="0.01 is 1 %")
    if isinstance(source, str | Path):
        return list(read(source, split)), str(source)
    rows = list(source)
    return rows, rows[0].place.removesuffix("[0]") if rows else "data"


def load_rows(
    rows: Iterable[RawRow],
    build: Callable[[RawRow], tuple[list[Item], bool]],
    *,
    max_bad_rows: float,
    report: Report | None,
    where: str,
    sizes: list[int] | None = None,
) -> tuple[list[Item], RowCounts]:
    """Build the items of every row, with `build(row) -> (items, was it truncated)`; `sizes` collects their numbers."""
    items: list[Item] = []
    bad: list[BadRow] = []
    read_rows = truncated = 0
    for row in rows:
        read_rows += 1
        try:
            made, cut = build(row)
        except Refused as refused:
            bad.append(BadRow(row.place, refused.field, refused.reason))
        else:
            items += made
            truncated += cut
            if sizes is not None:
                sizes.append(len(made))
    if bad and len(bad) == read_rows and all(row.reason.startswith(REJECTED) for row in bad):
        what = f"the chat template rejects every row: {bad[0].where}{bad[0].reason.removeprefix(REJECTED)}"
        raise NovaError(what, where=where, fix="pass another template with chat_template=FILE")
    if bad and (len(bad) == read_rows or len(bad) / read_rows > max_bad_rows):
        shown = "; ".join(map(str, bad[:_SHOWN])) + ("; ..." if len(bad) > _SHOWN else "")
        what, fix = f"{len(bad)} of {read_rows} rows cannot be used", "fix them"
        if len(bad) < read_rows:
            what += f", more than max_bad_rows={max_bad_rows:g} allows"
            fix = "fix or remove them, or raise max_bad_rows"
        raise NovaError(f"{what}: {shown}", where=where, fix=fix)
    if report is not None:
        for bad_row in bad:
            report(bad_row)
    return items, RowCounts(read_rows, read_rows - len(bad), truncated, len(bad))
