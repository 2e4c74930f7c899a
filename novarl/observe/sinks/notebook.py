"""The run as a notebook shows it: one line of progress that is rewritten, and the curves at the end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from novarl.observe.sinks.console import ConsoleSink, plain_line

CELLS = 30
"""Width of the progress bar."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython in a terminal is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookSink(ConsoleSink):
    """Prints what `ConsoleSink` prints into a pipe, without the lines of single steps."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.line: Any = None

    def step(self, step: int, record: Mapping[str, float]) -> None:
        super().step(step, record)
        total = self.gauge.steps or 0
        filled = round(CELLS * step / total) if total else 0
        bar = f"{'█' * filled}{'░' * (CELLS - filled)} {step}/{total or '?'}  "
        self._show(bar + plain_line(step, record))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        super().event(kind, fields)
        if kind == "phase":
            self.line = None
        if kind == "summary" and (folder := fields.get("paths", {}).get("figures")):
            self._figures(Path(folder))

    def _is_due(self, step: int) -> bool:
        return False  # the line of progress shows every step

    def _show(self, text: str) -> None:
        from IPython.display import Pretty, display

        shown = Pretty(text)
        if self.line is None:
            self.line = display(shown, display_id=True)
        else:
            self.line.update(shown)

    def _figures(self, folder: Path) -> None:
        from IPython.display import Image, display

        if (curves := folder / "curves.png").is_file():
            display(Image(filename=str(curves)))
