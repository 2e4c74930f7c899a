"""Plot a Pareto front: the scores of evaluated checkpoints, from one or several runs, for each pair of objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING

from novarl.control.hypervolume import hypervolume
from novarl.control.pareto import Directions, Evaluated, maximised, non_dominated, sign
from novarl.core.errors import NovaError
from novarl.observe.figures import COLOURS, INK, RED, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backend_bases import RendererBase
    from matplotlib.transforms import Bbox

DPI = 130
BLUE, PALE = COLOURS[0], "#cbd5e1"
SIDES = ((1, 1), (-1, 1), (1, -1), (-1, -1), (0, 2), (0, -2))
"""Candidate label positions (right and up are positive)."""
ALIGN_X, ALIGN_Y = {-1: "right", 0: "center", 1: "left"}, {False: "top", True: "bottom"}
REACH = (4, 8)
"""The distance of a label from its point, in points."""


@dataclass(frozen=True, slots=True)
class Picture:
    """The plotted data. `best` are the indices of non-dominated checkpoints; `signs` is -1.0 where less is better."""

    evaluated: Sequence[Evaluated]
    best: Sequence[int]
    names: Sequence[str]
    signs: Sequence[float]
    reference: Sequence[float] | None


def draw_front(
    evaluated: Sequence[Evaluated],
    path: Path,
    names: Sequence[str],
    *,
    directions: Directions = None,
    reference: Sequence[float] | None = None,
    title: str = "Pareto front",
) -> float | None:
    """Write the plot to `path` (PNG) and return the hypervolume over `reference` (None without one).

    One panel per pair of objectives, with `names` on the axes and values as measured. Non-dominated checkpoints are
    emphasised, and labelled if there is space. Error bars are one standard error. With two objectives the dominated
    region above the reference is shaded. NovaError: fewer than two objectives, no checkpoint, or differing lengths.
    """
    if len(names) < 2 or not evaluated:
        raise NovaError("a front needs at least two objectives and one evaluated checkpoint")
    rows = [maximised(entry.vector, directions) for entry in evaluated]
    if {len(row) for row in rows} != {len(names)}:
        raise NovaError(f"every checkpoint needs {len(names)} scores: {', '.join(names)}")
    best = non_dominated(rows)
    volume = None if reference is None else hypervolume(rows, maximised(reference, directions))
    caption = f"{len(best)} of {len(rows)} checkpoints are non-dominated"
    if any(entry.errors for entry in evaluated):
        caption += " · bars: ± 1 standard error"
    if reference is not None:
        caption += f" · hypervolume {volume:.4g} over ({', '.join(f'{value:g}' for value in reference)})"
    signs = [sign(direction) for direction in directions or ("max",) * len(names)]
    _figure(Picture(evaluated, best, names, signs, reference), path, title, caption)
    return volume


def _figure(picture: Picture, path: Path, title: str, caption: str) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pairs = list(combinations(range(len(picture.names)), 2))
    columns = min(3, len(pairs))
    lines = math.ceil(len(pairs) / columns)
    size = (6.4, 4.8) if len(pairs) == 1 else (4.2 * columns, 3.6 * lines + 0.6)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
        canvas = FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
        figure.supxlabel(caption, x=0.01, ha="left", fontsize=8, color=INK)
        plots = figure.subplots(lines, columns, squeeze=False).ravel()
        for plot, (first, second) in zip(plots, pairs, strict=False):
            _panel(plot, picture, first, second)
        for plot in plots[len(pairs) :]:
            plot.remove()
        handles, labels = plots[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=3, fontsize=8, labelcolor=INK)
        figure.draw_without_rendering()  # computes the layout
        figure.set_layout_engine("none")
        for plot, (first, second) in zip(plots, pairs, strict=False):
            _label(plot, picture, first, second, canvas.get_renderer())
        figure.savefig(path, metadata={"Software": None})


def _panel(plot: Axes, picture: Picture, first: int, second: int) -> None:
    """One pair of objectives: dominated checkpoints below, the front over them, the reference on top."""
    if len(picture.names) == 2:
        _shade(plot, picture)
    worse = [place for place in range(len(picture.evaluated)) if place not in picture.best]
    for places, color, size, label in ((picture.best, BLUE, 5.5, "front"), (worse, PALE, 4.0, "dominated")):
        chosen = [picture.evaluated[place] for place in places]
        if chosen:
            plot.errorbar(
                [entry.vector[first] for entry in chosen],
                [entry.vector[second] for entry in chosen],
                xerr=[entry.errors[first] if entry.errors else 0.0 for entry in chosen],
                yerr=[entry.errors[second] if entry.errors else 0.0 for entry in chosen],
                fmt="o",
                color=color,
                markersize=size,
                elinewidth=1.0,
                label=label,
                zorder=3 if color == BLUE else 2,
            )
    if picture.reference is not None:
        x, y = picture.reference[first], picture.reference[second]
        plot.plot([x], [y], "x", color=RED, markersize=7, markeredgewidth=1.8, label="reference", zorder=4)
    for axis, objective in ((plot.xaxis, first), (plot.yaxis, second)):
        better = "more" if picture.signs[objective] > 0 else "less"
        axis.set_label_text(f"{picture.names[objective]} ({better} is better)")
        axis.label.set_color(INK)
    plot.grid(True)
    plot.set_axisbelow(True)
    plot.margins(0.1)


def _shade(plot: Axes, picture: Picture) -> None:
    """Shade the region dominated by a front of two objectives, down to the reference if there is one."""
    (right, up), reference = picture.signs, picture.reference
    corners = sorted(
        (right * picture.evaluated[i].vector[0], up * picture.evaluated[i].vector[1]) for i in picture.best
    )
    if reference is not None:
        left, floor = right * reference[0], up * reference[1]
        corners = [(x, y) for x, y in corners if x > left and y > floor]
    if not corners:
        return
    stair = [corners[0]]
    for (before, _), (x, y) in pairwise(corners):
        stair += [(before, y), (x, y)]
    if reference is not None:
        stair = [(left, stair[0][1]), *stair, (stair[-1][0], floor)]
        plot.fill(
            [right * x for x, _ in [*stair, (left, floor)]],
            [up * y for _, y in [*stair, (left, floor)]],
            color=BLUE,
            alpha=0.07,
            linewidth=0,
        )
    plot.plot([right * x for x, _ in stair], [up * y for _, y in stair], color=BLUE, linewidth=1.2, alpha=0.5, zorder=1)


def _label(plot: Axes, picture: Picture, first: int, second: int, renderer: RendererBase) -> None:
    """Label the front's checkpoints, omitting labels that would cover a point or another label."""
    from matplotlib.transforms import Bbox

    inside, radius = plot.get_window_extent(), 4.0 * DPI / 72
    centres = plot.transData.transform([(entry.vector[first], entry.vector[second]) for entry in picture.evaluated])
    taken = [Bbox.from_extents(x - radius, y - radius, x + radius, y + radius) for x, y in centres]
    outward = sorted(SIDES, key=lambda side: -side[0] * picture.signs[first] - side[1] * picture.signs[second])
    for place in sorted(picture.best, key=lambda i: picture.evaluated[i].vector[first]):
        entry = picture.evaluated[place]
        note = plot.annotate(
            entry.name, (entry.vector[first], entry.vector[second]), (0, 0), textcoords="offset points"
        )
        note.set(fontsize=8, color=INK, zorder=5)
        for reach, (x, y) in product(REACH, outward):
            note.set(position=(reach * x, reach * y), ha=ALIGN_X[x], va=ALIGN_Y[y > 0])
            box = note.get_window_extent(renderer)
            if _contains(inside, box) and not box.count_overlaps(taken):
                taken.append(box)
                break
        else:
            note.remove()


def _contains(outer: Bbox, inner: Bbox) -> bool:
    return outer.x0 <= inner.x0 and outer.y0 <= inner.y0 and inner.x1 <= outer.x1 and inner.y1 <= outer.y1
