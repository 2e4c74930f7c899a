"""Plots of a run's curves, from its metrics.jsonl and events.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from novarl.core.errors import visible
from novarl.observe.glossary import lookup
from novarl.observe.sinks.jsonl import read_lines, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: its title and its lines (metric, label); `log` allows a logarithmic axis."""

    title: str
    lines: tuple[tuple[str, str], ...]
    log: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A held-out score with its interval, `at` a position on the horizontal axis."""

    at: float
    score: float
    low: float
    high: float
    name: str


PANELS = (
    Panel("Reward", (("reward_raw_mean", "all rollouts"), ("reward_mean", "trained on"))),
    Panel("Loss", (("total_loss", "total"), ("policy_loss", "policy"), ("kl_loss", "KL"), ("loss", "training"))),
    Panel(
        "Accuracy",
        (
            ("accuracy", "next token"),
            ("preference_accuracy", "chosen preferred"),
            ("label_accuracy", "label predicted"),
        ),
    ),
    Panel("Reward margin", (("reward_margin", "chosen - rejected"),)),
    Panel("Reward of answers", (("reward_chosen_mean", "chosen / good"), ("reward_rejected_mean", "rejected / bad"))),
    Panel("KL divergence", (("kl", "update"), ("kl_mean", "to the reference")), log=True),
    Panel("Entropy", (("entropy", "policy"),)),
    Panel("Answer length", (("length_mean", "mean"), ("length_max", "longest"))),
    Panel("Clip fraction", (("clip_fraction", "clipped tokens"),)),
    Panel("Gradient norm", (("grad_norm", "before clipping"),), log=True),
    Panel("Learning rate", (("lr", "learning rate"),)),
    Panel("Speed", (("tokens_per_second", "tokens per second"),)),
)
"""In order of importance: a figure shows the first six panels for which the run has data."""

COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#8b5cf6")
INK, FAINT, RED = "#1f2937", "#9ca3af", "#dc2626"
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.12,
    "grid.color": "#e5e7eb",
    "legend.frameon": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


def draw(run: Path) -> list[Path]:
    """Write `figures/<phase>.png` for each phase of a run with metrics, the last one as `figures/curves.png`; returns
    the paths."""
    metrics = run / "metrics.jsonl"
    rows = list(read_metrics(metrics)) if metrics.exists() else []
    if not rows:
        return []
    phases = [(name, list(part)) for name, part in groupby(rows, key=lambda row: row.get("phase"))]
    (run / "figures").mkdir(exist_ok=True)
    paths = []
    for place, (name, part) in enumerate(phases):
        last = place == len(phases) - 1
        paths.append(run / "figures" / ("curves.png" if last else f"{name}.png"))
        title = " · ".join(visible(word) for word in (run.resolve().name, name) if word)
        _figure(part, title, _marks(run, part) if last else [], paths[-1])
    return paths


def _figure(rows: Sequence[Mapping[str, Any]], title: str, marks: Sequence[Mark], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if any(name in row for row in rows for name, _ in panel.lines)]
    scored = next((panel for panel in panels if panel.title == "Reward"), None) or _of_pairs(panels, rows)
    if marks and scored is None:
        scored = Panel("Held-out log-likelihood per token", ())
        panels.insert(1, scored)
    panels = panels[:6]
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * columns, 2.9 * lines + 0.4), dpi=130, layout="constrained", facecolor="white")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
        axes = figure.subplots(lines, columns, squeeze=False).ravel()
        for place, plot in enumerate(axes):
            if place < len(panels):
                _panel(plot, panels[place], rows, marks if panels[place] is scored else [])
            else:
                plot.remove()
        figure.savefig(path, metadata={"Software": None})


def _of_pairs(panels: Sequence[Panel], rows: Sequence[Mapping[str, Any]]) -> Panel | None:
    """The accuracy panel of a preference run, whose held-out score is also an accuracy."""
    told = any(name in row for row in rows for name in ("preference_accuracy", "label_accuracy"))
    return next((panel for panel in panels if panel.title == "Accuracy"), None) if told else None


def _panel(plot: Axes, panel: Panel, rows: Sequence[Mapping[str, Any]], marks: Sequence[Mark]) -> None:
    from matplotlib.ticker import MaxNLocator

    counted, across = _across(rows)
    drawn: list[list[float]] = []
    for name, label in panel.lines:
        values = [float(row.get(name, math.nan)) for row in rows]
        if all(map(math.isnan, values)) or any(np.array_equal(values, line, equal_nan=True) for line in drawn):
            continue  # an identical line would be hidden; without a reference, kl_mean equals kl
        color, above = COLOURS[len(drawn)], 4 - len(drawn)
        smooth = _smooth(values)
        if smooth:
            plot.plot(across, values, color=color, linewidth=1.0, alpha=0.3)
        plot.plot(across, smooth or values, color=color, linewidth=1.8, label=label, zorder=above)
        unit = lookup(name).unit
        plot.set_ylabel("" if unit == "1" or ";" in unit else unit)
        drawn.append(values)
    if panel.log and _decades([value for values in drawn for value in values]) > 1.5:
        plot.set_yscale("log")
    _draw_marks(plot, marks)
    plot.set_title(panel.title)
    plot.set_xlabel(counted)
    plot.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    plot.grid(True, axis="y")
    plot.margins(x=0.03)
    if len(panel.lines) > 1 or (panel.lines and marks):
        plot.legend(loc="best", fontsize=8, labelcolor=INK)


def _decades(values: Sequence[float]) -> float:
    """The number of decades that the values span; 0 if one of them is not positive."""
    finite = [value for value in values if math.isfinite(value)]
    return math.log10(max(finite) / min(finite)) if min(finite, default=0.0) > 0 else 0.0


def _draw_marks(plot: Axes, marks: Sequence[Mark]) -> None:
    if not marks:
        return
    below = [_length(mark.score - mark.low) for mark in marks]
    above = [_length(mark.high - mark.score) for mark in marks]
    where, scores = [mark.at for mark in marks], [mark.score for mark in marks]
    plot.errorbar(
        where, scores, yerr=[below, above], fmt="D", color=RED, markersize=5, capsize=3, label="held-out", zorder=5
    )
    for mark in marks:
        if mark.name in ("before", "after"):
            side = -1 if mark.name == "after" else 1
            note = plot.annotate(
                f"{mark.name} {mark.score:.2f}", (mark.at, mark.score), (7 * side, 7), textcoords="offset points"
            )
            note.set(ha="left" if side > 0 else "right", color=RED, fontsize=8)


def _length(difference: float) -> float:
    """The length of an error bar; 0 if the end of the interval is not finite."""
    return max(0.0, difference) if math.isfinite(difference) else 0.0


def _across(rows: Sequence[Mapping[str, Any]]) -> tuple[str, list[float]]:
    """The horizontal axis: steps, or updates if a step has several."""
    steps = [float(row["step"]) for row in rows]
    if len(set(steps)) == len(steps):
        return "step", steps
    return "update", [float(row.get("update", place)) for place, row in enumerate(rows, start=1)]


def _smooth(values: Sequence[float]) -> list[float]:
    """A local linear fit over windows of a twentieth of the run, which neither lags nor flattens; empty for a short
    run."""
    half = len(values) // 40
    if not half:
        return []
    y = np.asarray(values)
    fitted = []
    for place in range(len(y)):
        window = np.arange(max(0, place - half), min(len(y), place + half + 1))
        window = window[np.isfinite(y[window])]
        _, level = np.polyfit(window - place, y[window], 1) if len(window) > 1 else (0.0, y[place])
        fitted.append(float(level))
    return fitted


def _marks(run: Path, rows: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Held-out scores: during training from the metrics, before and after training from the events."""
    _, across = _across(rows)
    marks = [
        Mark(at, row["eval/score"], row.get("eval/score_low", math.nan), row.get("eval/score_high", math.nan), "")
        for at, row in zip(across, rows, strict=True)
        if "eval/score" in row
    ]
    events = run / "events.jsonl"
    places = {"before": 0.0, "after": across[-1]}
    for event in read_lines(events) if events.exists() else []:
        if event["kind"] == "eval" and event["name"] in places:
            low, high = event.get("interval") or (math.nan, math.nan)
            marks.append(Mark(places[event["name"]], float(event["score"]), float(low), float(high), event["name"]))
    return marks
