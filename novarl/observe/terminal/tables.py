"""Text for a terminal of 80 columns: tables with aligned columns, and wrapped paragraphs."""

from __future__ import annotations

from collections.abc import Sequence

from novarl.core.errors import visible, wrapped
from novarl.observe.sinks.gauge import number

WIDTH = 80
GAP = "  "
ABSENT = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines of aligned columns; those in `right` are aligned on the right. If a line would be wider than 80 columns,
    the first column has lines of its own, and the others are indented below it. Words are never broken."""
    cells = [[visible(cell).replace("\n", " ").replace("\t", " ") for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    if sum(widths) + len(GAP) * (len(widths) - 1) <= WIDTH:
        return [_line(row, widths, right) for row in cells]
    moved = [column - 1 for column in right if column > 0]
    return [
        line for row in cells for line in (row[0], f"{GAP}{_line(row[1:], widths[1:], moved)}".rstrip()) if line.strip()
    ]


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return GAP.join(padded).rstrip()


def labelled(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """`label  text`, the texts aligned and wrapped."""
    wide = max((len(label) for label, _ in pairs), default=0) + len(GAP)
    lines: list[str] = []
    for label, text in pairs:
        first, *rest = wrapped(visible(f"{label:<{wide}}{text}"), WIDTH, hanging=" " * wide) or [label]
        lines += [first.rstrip(), *rest]
    return lines


def listed(items: Sequence[str]) -> list[str]:
    """Items of a list, wrapped."""
    return [line for item in items for line in wrapped(visible(f"- {item}"), WIDTH, hanging="  ")]


def value_text(value: float | None) -> str:
    """A number with three significant digits, or a dash if there is none."""
    return ABSENT if value is None else number(value)


def size_text(size: float) -> str:
    """Bytes in a unit that suits them.

    >>> size_text(512), size_text(2_300_000)
    ('512 B', '2.3 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
