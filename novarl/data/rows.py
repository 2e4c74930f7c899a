"""The rows of a run: some to learn from, some held out, each one accounted for."""

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
