"""Load preference pairs and labelled answers as tokens, and pack them into batches.

A pair is one trajectory of two sequences, the chosen one first, so micro-batches and ranks never split it. The reward
of a pair is its margin (0 if it has none); the reward of a labelled sequence is its label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from novarl.core.types import Batch, Message, Sequence, Tokenizer
from novarl.data.dataset import (
    OnLong,
    Report,
    RowCounts,
    Source,
    as_sequence,
    load_rows,
    named,
    open_rows,
    row_kwargs,
)
from novarl.data.formats import Columns, Refused, row_value
from novarl.data.pack import pack_sequences
from novarl.data.pair_formats import LabelledExample, detect_pairs, labelled_example, pair_example
from novarl.data.render import Rendered, render_sft
from novarl.data.sources import RawRow
from novarl.data.unused import Unused


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, the first one preferred, with an optional `margin`."""

    id: str
    chosen: Sequence
    rejected: Sequence
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Labelled:
    """An answer, or a whole text (`plain`), labelled good (1.0) or bad (0.0)."""

    id: str
    sequence: Sequence
    label: float
    plain: bool = False


def pack_pairs(pairs: Seq[Pair], *, dtype: torch.dtype = torch.float32) -> Batch:
    """Trajectory and group r of the batch is `pairs[r]`: sequence 2r is the chosen side, 2r + 1 the rejected side."""
    batch = pack_sequences([side for pair in pairs for side in (pair.chosen, pair.rejected)], dtype=dtype)
    group = torch.arange(len(pairs))
    return replace(
        batch,
        traj=group.repeat_interleave(2),
        group=group,
        reward=torch.tensor([pair.margin or 0.0 for pair in pairs], dtype=dtype),
        rewards=batch.rewards[: len(pairs)],
        truncated=batch.truncated[: len(pairs)],
        baseline=batch.baseline[: len(pairs)],
    )


def pack_labelled(rows: Seq[Labelled], *, dtype: torch.dtype = torch.float32) -> Batch:
    """Trajectory and group r of the batch is `rows[r]`, with the label as its reward."""
    batch = pack_sequences([row.sequence for row in rows], dtype=dtype)
    return replace(batch, reward=torch.tensor([row.label for row in rows], dtype=dtype))


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are tokenized; limits and reports are those of `dataset.load_sft`. Of a side with more than `max_length`
    tokens the prompt is cut at its beginning (half of `max_length` is kept), then the answer at its end; of a text the
    end is cut, with `on_long="keep_end"` the beginning. A row is refused if no answer is left, if both sides become
    equal, or with `on_long="refuse"`."""

    tokenizer: Tokenizer
    max_length: int
    on_long: OnLong = "truncate"
    apply_chat_template: bool = True
    max_bad_rows: float = 0.01
    report: Report | None = None
    keys: Columns = field(default_factory=Columns)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    unused: Unused | None = None

    def note(self, row: RawRow, columns: Columns, messages: Seq[Message]) -> None:
        """Record a used row in `unused`."""
        if self.unused is None:
            return
        templated = self.apply_chat_template and columns.text is None
        kwargs = row_kwargs(row, self.template_kwargs, templated)
        read = asdict(columns).values()
        self.unused.row(row_value(row), read, messages, tokenizer=self.tokenizer, templated=templated, kwargs=kwargs)


def load_pairs(source: Source, reading: Reading, *, split: str | None = None) -> tuple[list[Pair], RowCounts]:
    """The pairs of a dataset, in order. Only answers are trained on. Raises NovaError as `load_sft` does."""
    rows, where = open_rows(source, split, max_length=reading.max_length, max_bad_rows=reading.max_bad_rows)
    columns = detect_pairs(rows, keys=reading.keys, where=where, labels=False)

    def build(row: RawRow) -> tuple[list[Pair], bool]:
        pair, cut = _pair(row, columns, reading)
        return [pair], cut

    return load_rows(rows, build, max_bad_rows=reading.max_bad_rows, report=reading.report, where=where)


def load_labelled(
    source: Source, reading: Reading, *, split: str | None = None
) -> tuple[list[tuple[Labelled, ...]], RowCounts]:
    """The labelled answers or texts of a dataset, by row; a pair gives a good and a bad one. Raises NovaError as
    `load_sft` does."""
    rows, where = open_rows(source, split, max_length=reading.max_length, max_bad_rows=reading.max_bad_rows)
    columns = detect_pairs(rows, keys=reading.keys, where=where, labels=True)

    def build(row: RawRow) -> tuple[list[tuple[Labelled, ...]], bool]:
        if columns.label is None:
            pair, cut = _pair(row, columns, reading)
            good, bad = f"{pair.id}:{columns.chosen}", f"{pair.id}:{columns.rejected}"
            return [(Labelled(good, pair.chosen, 1.0), Labelled(bad, pair.rejected, 0.0))], cut
        example = labelled_example(row, columns)
        sequence, cut = _labelled(row, example, columns, reading)
        reading.note(row, columns, example.messages)
        return [(Labelled(example.id, sequence, example.label, example.plain),)], cut

    return load_rows(rows, build, max_bad_rows=reading.max_bad_rows, report=reading.report, where=where)


def _pair(row: RawRow, columns: Columns, reading: Reading) -> tuple[Pair, bool]:
    example = pair_example(row, columns)
    assert columns.chosen is not None and columns.rejected is not None
    names = columns.chosen, columns.rejected
    sides = zip(names, (example.chosen, example.rejected), strict=True)
    (chosen, rejected), cut = _fit(
        [_rendered(row, side, example.context, name, reading) for name, side in sides], names, reading
    )
    if chosen.tokens == rejected.tokens:
        within = f" within max_length={reading.max_length}" if cut else ""
        raise Refused(columns.rejected, f"is equal to {columns.chosen}{within}")
    for side in (example.chosen, example.rejected):
        reading.note(row, columns, side)
    return Pair(example.id, chosen, rejected, example.margin), cut


def _labelled(row: RawRow, example: LabelledExample, columns: Columns, reading: Reading) -> tuple[Sequence, bool]:
    if not example.plain:
        name = columns.completion or ""
        (sequence,), cut = _fit([_rendered(row, example.messages, example.context, name, reading)], (name,), reading)
        return sequence, cut
    with named(columns.text or ""):
        ((tokens, mask),) = render_sft(reading.tokenizer, example.messages, apply_chat_template=False)
    long = len(tokens) > reading.max_length
    if long:
        _refuse_long(len(tokens), columns.text or "", reading)
        if reading.on_long == "keep_end":
            begin = mask.index(True)  # keep the bos token, if there is one
            tokens = tokens[:begin] + tokens[len(tokens) - reading.max_length + begin :]
        else:  # keep the end token, at which a classifier reads the text
            tokens = (*tokens[: reading.max_length - 1], tokens[-1])
    if len(tokens) < 2:
        raise Refused(columns.text or "", f"no tokens to train on within max_length={reading.max_length}")
    return as_sequence((tokens, mask[: len(tokens)])), long


def _rendered(row: RawRow, messages: Seq[Message], context: int, name: str, reading: Reading) -> Rendered:
    """One side as tokens and mask."""
    with named(name):
        rendered = render_sft(
            reading.tokenizer,
            messages,
            context=context,
            apply_chat_template=reading.apply_chat_template,
            template_kwargs=row_kwargs(row, reading.template_kwargs, reading.apply_chat_template),
        )
    if len(rendered) > 1:
        raise Refused(name, "the chat template rewrites earlier turns of the answer: pass only the last turn")
    return rendered[0]


def _fit(sides: Seq[Rendered], names: Seq[str], reading: Reading) -> tuple[list[Sequence], bool]:
    """Answers to one prompt cut to `max_length`, and whether anything was cut: the prompt at its beginning, equally for
    all (half of `max_length` is kept), then answers at their end."""
    most = reading.max_length
    longest = max(len(tokens) for tokens, _ in sides)
    if longest <= most:
        return [as_sequence(side) for side in sides], False
    _refuse_long(longest, names[-1], reading)
    prompt = min(mask.index(True) for _, mask in sides)
    kept = max(most - (longest - prompt), most // 2, 1)
    begin = max(0, prompt - kept)
    cut = [(tokens[begin : begin + most], mask[begin : begin + most]) for tokens, mask in sides]
    for name, (_, mask) in zip(names, cut, strict=True):
        if not any(mask[1:]):
            raise Refused(name, f"no tokens of the answer within max_length={most}")
    return [as_sequence(side) for side in cut], True


def _refuse_long(count: int, name: str, reading: Reading) -> None:
    if reading.on_long == "refuse":
        raise Refused(name, f"the row has {count} tokens, more than max_length={reading.max_length}")
