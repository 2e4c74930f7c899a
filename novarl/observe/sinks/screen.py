"""The live progress line, drawn with rich. No other module uses the terminal."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING, TextIO

from novarl.observe.sinks.gauge import Gauge, clock_text, number

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live
    from rich.text import Text


class LiveLine:
    """The current state of the gauge in two lines of the terminal's width; rich redraws it four times a second."""

    def __init__(self, gauge: Gauge, title: str) -> None:
        self.gauge, self.title = gauge, title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.progress(options.max_width)
        if self.gauge.readings:
            yield self.readings(options.max_width)

    def progress(self, width: int) -> Text:
        from rich.text import Text

        gauge, left = self.gauge, self.gauge.remaining()
        count = f"{gauge.step}/{gauge.steps}" if gauge.steps else f"step {gauge.step}"
        when = f"{clock_text(gauge.elapsed())} so far" if left is None else f"{clock_text(left)} left"
        tail = f"  {count}  {when}"
        cells = max(0, min(60, width - len(self.title) - 4 - len(tail)))
        line = Text("  ", no_wrap=True, overflow="ellipsis").append(self.title, "bold").append("  ")
        if gauge.steps:
            halves = round(gauge.share() * cells * 2)
            bar = "━" * (halves // 2) + "╸" * (halves % 2)
            line.append(bar, "green").append("━" * (cells - len(bar)), "bright_black")
        return line.append(tail)

    def readings(self, width: int) -> Text:
        """As many readings as fit, the most important first."""
        from rich.text import Text

        line = Text("  ", no_wrap=True, overflow="ellipsis")
        for place, (label, value) in enumerate(self.gauge.readings.items()):
            word = Text()
            if label == "tok/s":
                word.append(number(value), "cyan").append(" tok/s", "dim")
            else:
                word.append(f"{label} ", "dim").append(number(value), "bold green" if place == 0 else "cyan")
            if place == 0 and str(self.gauge.trend):
                word.append(f" {self.gauge.trend}", "green")
            if len(line) + len(word) + 2 > width:
                break
            line.append("  " if place else "").append_text(word)
        return line


class Screen:
    """A terminal with at most one live line at the bottom and permanent lines above it."""

    def __init__(self, stream: TextIO, gauge: Gauge) -> None:
        from rich.console import Console

        self.console = Console(file=stream, force_terminal=True, highlight=False)
        self.gauge = gauge
        self.live: Live | None = None

    def begin(self, title: str) -> None:
        from rich.live import Live

        self.end()
        self.live = Live(LiveLine(self.gauge, title), console=self.console, refresh_per_second=4, transient=True)
        self.live.start()
        atexit.register(self.end)  # a run that dies must restore the cursor

    def end(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
            atexit.unregister(self.end)

    def say(self, text: str, style: str = "") -> None:
        """Print a permanent line. The terminal wraps what is still too long, so that a path can be copied."""
        from rich.text import Text

        self.console.print(Text(text, style=style), soft_wrap=True)
