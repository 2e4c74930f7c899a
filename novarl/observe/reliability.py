"""The reliability diagram of a reward model: how well its probabilities are calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from novarl.observe.figures import FAINT, INK, STYLE


def draw_reliability(path: Path, bins: Sequence[tuple[int, float, float]], caption: str) -> None:
    """Write a PNG. Each bin (rows, mean probability, fraction of good answers) is a point whose area grows with its
    rows; a histogram of the probabilities is below. `caption` is the title."""
    import matplotlib
    from matplotlib.figure import Figure

    filled = [(rows, said, seen) for rows, said, seen in bins if rows]
    most = max((rows for rows, _, _ in filled), default=1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, 5.4), dpi=130, layout="constrained", facecolor="white")
        figure.suptitle(caption, x=0.01, ha="left", fontsize=10, color=INK)
        plot, spread = figure.subplots(2, 1, height_ratios=(4, 1), sharex=True)
        plot.plot([0, 1], [0, 1], color=FAINT, linewidth=1, linestyle="--")
        said, seen = [said for _, said, _ in filled], [seen for _, _, seen in filled]
        plot.plot(said, seen, color="#2563eb", linewidth=1.2)
        plot.scatter(said, seen, s=[12 + 90 * rows / most for rows, _, _ in filled], color="#2563eb", zorder=3)
        plot.set(xlim=(0, 1), ylim=(0, 1), ylabel="fraction of good answers")
        width = 1 / max(1, len(bins))
        spread.bar(
            [(place + 0.5) * width for place in range(len(bins))],
            [rows for rows, _, _ in bins],
            width=0.92 * width,
            color="#93c5fd",
        )
        spread.set(xlabel="predicted probability", ylabel="rows")
        figure.savefig(path, metadata={"Software": None})
