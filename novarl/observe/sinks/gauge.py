"""Progress of one phase of a run: steps done, time left, current readings and their trend. Text only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

BLOCKS = "▁▂▃▄▅▆▇█"
TREND_CELLS = 10

READINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward_raw_mean", "reward_mean")),
    ("loss", ("loss",)),
    ("accuracy", ("accuracy", "preference_accuracy", "label_accuracy")),
    ("margin", ("reward_margin",)),
    ("ref KL", ("kl_mean", "kl_to_ref")),
    ("update KL", ("kl",)),
    ("entropy", ("entropy",)),
    ("length", ("length_mean",)),
    ("tok/s", ("tokens_per_second",)),
)
"""(label, metrics), the most important first; the first metric that the record has is shown. `update KL` is shown only
in records without a `ref KL`."""


class Gauge:
    """Tracks one phase at a time; the trend of the first reading is kept over the whole phase."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.begin("", None, done=0)

    def begin(self, name: str, steps: int | None, *, done: int) -> None:
        """Start a phase of `steps` steps (None: unknown), of which an earlier run has done `done`."""
        self.name, self.steps, self.start, self.step = name, steps, done, done
        self.began = self.moved = self.clock()
        self.readings: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.trend = Trend()

    def update(self, step: int, record: Mapping[str, float]) -> None:
        self.step, self.moved = step, self.clock()
        self.readings = {
            label: record[found]
            for label, names in READINGS
            if (found := next((n for n in names if n in record), None))
        }
        if "ref KL" in self.readings:
            self.readings.pop("update KL", None)
        self.first = self.first or dict(self.readings)
        for value in list(self.readings.values())[:1]:
            self.trend.add(value)

    def share(self) -> float:
        """Fraction of the phase that is done; 0 if its length is unknown."""
        return min(1.0, self.step / self.steps) if self.steps else 0.0

    def elapsed(self) -> float:
        return self.clock() - self.began

    def remaining(self) -> float | None:
        """Estimated seconds left; None before the first step or if the length is unknown."""
        if not self.steps or self.step <= self.start:
            return None
        pace = (self.moved - self.began) / (self.step - self.start)
        return max(0.0, pace * (self.steps - self.step) - (self.clock() - self.moved))


class Trend:
    """A curve of any length in TREND_CELLS characters: when there are too many values, pairs are averaged."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.width = 1
        self.part: list[float] = []

    def add(self, value: float) -> None:
        if not math.isfinite(value):
            return
        if not self.part and len(self.means) == TREND_CELLS:
            self.means = [sum(pair) / 2 for pair in zip(self.means[::2], self.means[1::2], strict=True)]
            self.width *= 2
        self.part.append(value)
        if len(self.part) == self.width:
            self.means.append(sum(self.part) / self.width)
            self.part = []

    def __str__(self) -> str:
        if len(self.means) < 2:
            return ""
        low, high = min(self.means), max(self.means)
        scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
        return "".join(BLOCKS[round((mean - low) * scale)] for mean in self.means)


def number(value: float) -> str:
    """A number with three significant digits.

    >>> number(0.73412), number(4123.0), number(1.2e-5), number(-0.0)
    ('0.734', '4.12k', '1.2e-05', '0')
    """
    if not math.isfinite(value):
        return str(value)
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{suffix}"
    return f"{value + 0.0:.3g}"


def clock_text(seconds: float) -> str:
    """
    >>> clock_text(7.4), clock_text(75), clock_text(3725)
    ('0:07', '1:15', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def printable(text: str, limit: int) -> str:
    """Model output made safe for a terminal: one line of at most `limit` characters, without control characters.

    >>> printable("two\\nlines \\x1b[2J", 40)
    'two⏎lines ·[2J'
    """
    shown = "".join(c if c.isprintable() else {"\n": "⏎", "\t": " "}.get(c, "·") for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
