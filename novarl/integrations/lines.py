"""Turns what a library logs into the lines of metrics.jsonl: one line a step, with the step's evaluation in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from novarl.observe.writer import RunWriter


class StepLines:
    """Holds the line of the current step back until the next one begins, since libraries log an evaluation after the
    training metrics of the same step."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._step: int | None = None
        self._metrics: dict[str, float] = {}
        self._refused: set[str] = set()

    def add(self, step: int, metrics: Mapping[str, float], refused: Collection[str] = ()) -> None:
        """Add metrics of `step`; a line of another step is written first. `refused` are names whose values are no
        numbers; each is reported once, by an event."""
        if new := sorted(set(refused) - self._refused):
            self._refused.update(new)
            self._writer.event("alert", step=step, message=f"not recorded, because not a number: {', '.join(new)}")
        if step != self._step:
            self.flush()
        self._step = step
        self._metrics |= metrics

    def evaluation(self, step: int, metrics: Mapping[str, float], *, name: str = "held-out") -> None:
        """Add an evaluation, and record it as an event."""
        self.add(step, metrics)
        self._writer.event("eval", name=name, step=step, metrics=dict(metrics))

    def flush(self) -> None:
        """Write the line that is held back."""
        if self._step is not None and self._metrics:
            self._writer.step(self._step, self._metrics)
        self._step, self._metrics = None, {}
