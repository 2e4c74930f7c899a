"""The rows of a run, split into training and held-out rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from novarl.core.bus import Bus
from novarl.core.errors import NovaError
from novarl.core.types import Prompt, Sequence as TokenSequence
from novarl.data.dataset import RowCounts
from novarl.data.formats import BadRow
from novarl.data.pairs import Labelled, Pair
from novarl.data.unused import Unused

T = TypeVar("T")
HELD_OUT_SHARE = 10
"""At most one in this many rows of a data file is held out."""


@dataclass(slots=True)
class Rows(Generic[T]):
    """Training rows, held-out rows for evaluation, row counts, and the rows that could not be used."""

    train: list[T]
    held_out: list[T]
    counts: RowCounts
    bad: list[BadRow] = field(default_factory=list)
    unused: Unused = field(default_factory=Unused)

    def summary(self) -> dict[str, int]:
        return {**asdict(self.counts), "held_out": len(self.held_out)}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint stores about the rows."""
        return {"rows": self.summary(), "train_rows": len(self.train)}

    def check_same(self, facts: Mapping[str, Any], run_dir: Path) -> None:
        """Raise NovaError if the checkpoint's number of training rows differs, since its position would be wrong."""
        before, now = facts.get("train_rows", len(self.train)), len(self.train)
        if before != now:
            raise NovaError(
                f"this run was started with {before:,} training rows, but now has {now:,}",
                where=f"run_dir={run_dir}",
                fix="resume with the same data and eval.n, or start a new run with model=<checkpoint>/model",
            )

    def notes(self, data: str | None, wanted: int, *, reads: Collection[str] | None = ()) -> list[str]:
        """Notes on a run with the rows of `data`: up to `wanted` rows should be held out, and rewards read the columns
        `reads` (None: all)."""
        notes = self.unused.notes(reads) if data else []
        if not data or not wanted:
            return notes
        if not self.held_out:
            few = f"fewer than {HELD_OUT_SHARE} rows: no held-out split, so evaluation is skipped"
            return [*notes, f"{few} (eval.data=FILE evaluates on other rows)"]
        learnt = set(map(_content, self.train))
        if known := sum(_content(item) in learnt for item in self.held_out):
            many = f"{known:,} of {len(self.held_out):,} held-out {'row is' if len(self.held_out) == 1 else 'rows are'}"
            notes.append(f"{many} also in the training data: the score is contaminated")
        return notes

    def report(self, bus: Bus) -> None:
        """Emit an event for each row that could not be used."""
        for row in self.bad:
            bus.event("bad_row", where=row.where, field=row.field, reason=row.reason)


def _content(item: object) -> tuple[int, ...]:
    """The tokens by which rows are compared: those of a prompt, of a sequence, or of the chosen answer of a pair."""
    match item:
        case Pair(chosen=row) | Labelled(sequence=row):
            return row.tokens
        case Prompt() | TokenSequence():
            return item.tokens
    raise TypeError(f"not a row: {type(item).__name__}")


def set_aside(items: list[T], most: int, sizes: Sequence[int] | None = None) -> tuple[list[T], list[T]]:
    """(train, held out): every k-th row, at most `most` and a tenth of all, whatever the seed. `sizes`: consecutive
    items per row (default 1), which stay together."""
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
