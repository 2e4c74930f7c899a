"""docs/from_trl.md is what its command writes: every documented form runs, or is refused with the message shown."""

from __future__ import annotations

from pathlib import Path

from benchmarks.from_trl import page

WRITTEN = Path(__file__).parents[2] / "docs" / "from_trl.md"


def test_the_page_is_current() -> None:
    assert WRITTEN.read_text() == page(), "python -m benchmarks.from_trl > docs/from_trl.md"
