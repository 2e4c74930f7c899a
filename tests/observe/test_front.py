"""The picture of a front: what is strong and what pale, where the shade lies, and no label over another."""

from __future__ import annotations

import itertools
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from novarl.control.front_figure import BLUE, PALE, draw_front
from novarl.control.pareto import Directions, Evaluated
from novarl.core.errors import NovaError
from novarl.observe.figures import RED

RUNS = [
    Evaluated("careful", (0.4, 0.1), (0.02, 0.01)),
    Evaluated("middling", (0.7, 0.2), (0.02, 0.01)),
    Evaluated("bold", (0.9, 0.4), (0.02, 0.01)),
    Evaluated("lost", (0.3, 0.3), (0.02, 0.01)),
]
UP_DOWN: Directions = ("max", "min")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, to be looked into."""
    kept: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: object, **options: object) -> None:
        kept.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return kept


def points(plot: Axes, color: str) -> set[tuple[float, float]]:
    """The markers of a color."""
    lines = [line for line in plot.get_lines() if line.get_color() == color and line.get_marker() not in ("None", "")]
    return {(float(x), float(y)) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)}


def labels(plot: Axes) -> list[Annotation]:
    return [text for text in plot.texts if isinstance(text, Annotation)]


def test_the_front_is_strong_and_named_and_the_rest_pale(tmp_path: Path, drawn: list[Figure]) -> None:
    """Less KL is better: were it taken for a reward, `careful` would be dominated and pale."""
    volume = draw_front(
        RUNS, tmp_path / "f.png", ["score", "KL"], directions=UP_DOWN, reference=(0.2, 0.5), title="sort"
    )
    assert volume == pytest.approx(0.2 * 0.4 + 0.3 * 0.3 + 0.2 * 0.1)
    data = (tmp_path / "f.png").read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG") and width > height > 500
    (plot,) = drawn[0].axes
    assert points(plot, BLUE) == {(0.4, 0.1), (0.7, 0.2), (0.9, 0.4)}
    assert points(plot, PALE) == {(0.3, 0.3)} and points(plot, RED) == {(0.2, 0.5)}
    assert {note.get_text(): note.xy for note in labels(plot)} == {run.name: run.vector for run in RUNS[:3]}
    assert (plot.get_xlabel(), plot.get_ylabel()) == ("score (more is better)", "KL (less is better)")
    assert drawn[0].get_suptitle() == "sort"
    caption = "3 of 4 checkpoints are non-dominated · bars: ± 1 standard error · hypervolume 0.19 over (0.2, 0.5)"
    assert drawn[0].get_supxlabel() == caption


def test_the_shade_is_the_hypervolume(tmp_path: Path, drawn: list[Figure]) -> None:
    """Its area by the shoelace formula; a point of the front that is not above the reference casts none."""
    runs = [*RUNS, Evaluated("far", (0.1, 0.01)), Evaluated("wild", (0.99, 0.6))]
    volume = draw_front(runs, tmp_path / "f.png", ["score", "KL"], directions=UP_DOWN, reference=(0.2, 0.5))
    (shade,) = drawn[0].axes[0].patches
    corners = shade.get_path().vertices
    area = sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in itertools.pairwise(corners)) / 2
    assert abs(area) == pytest.approx(volume)
    assert len(points(drawn[0].axes[0], BLUE)) == 5


def test_without_reference_a_line_and_no_shade(tmp_path: Path, drawn: list[Figure]) -> None:
    bare = [Evaluated(run.name, run.vector) for run in RUNS]
    assert draw_front(bare, tmp_path / "f.png", ["score", "KL"], directions=UP_DOWN) is None
    (plot,) = drawn[0].axes
    assert not plot.patches and not points(plot, RED)
    stair = max(plot.get_lines(), key=lambda line: len(line.get_xdata()))
    corners = [(0.4, 0.1), (0.4, 0.2), (0.7, 0.2), (0.7, 0.4), (0.9, 0.4)]
    assert list(zip(stair.get_xdata(), stair.get_ydata(), strict=True)) == [pytest.approx(corner) for corner in corners]
    assert drawn[0].get_supxlabel() == "3 of 4 checkpoints are non-dominated"


def test_error_bars_are_one_standard_error(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_front(RUNS[:1], tmp_path / "f.png", ["score", "KL"])
    spans = {tuple(map(tuple, lines.get_segments()[0].round(9))) for lines in drawn[0].axes[0].collections}
    assert spans == {((0.38, 0.1), (0.42, 0.1)), ((0.4, 0.09), (0.4, 0.11))}


@pytest.mark.parametrize(("objectives", "panels"), [(2, 1), (3, 3), (4, 6)])
def test_a_panel_for_each_pair(tmp_path: Path, drawn: list[Figure], objectives: int, panels: int) -> None:
    names = ["a", "b", "c", "d"][:objectives]
    runs = [Evaluated(f"r{i}", tuple(float((i * k) % 5) for k in range(1, objectives + 1))) for i in range(5)]
    draw_front(runs, tmp_path / "f.png", names, reference=(-1.0,) * objectives)
    pairs = [(plot.get_xlabel()[0], plot.get_ylabel()[0]) for plot in drawn[0].axes]
    assert pairs == list(itertools.combinations(names, 2)) and len(pairs) == panels


def test_no_label_covers_another_or_leaves_its_panel(tmp_path: Path, drawn: list[Figure]) -> None:
    """60 checkpoints in three objectives: far more names than there is room for."""
    source = random.Random(0)
    runs = [Evaluated(f"checkpoint-{i}", tuple(source.random() for _ in range(3))) for i in range(60)]
    draw_front(runs, tmp_path / "f.png", ["a", "b", "c"])
    for plot in drawn[0].axes:
        boxes = [note.get_window_extent() for note in labels(plot)]
        assert len(boxes) > 3
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        inside = plot.get_window_extent()
        assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)


@pytest.mark.parametrize(
    ("runs", "names"),
    [([], ["a", "b"]), (RUNS, ["a"]), (RUNS, ["a", "b", "c"]), ([*RUNS, Evaluated("odd", (1.0,))], "ab")],
)
def test_mistakes_are_said(tmp_path: Path, runs: list[Evaluated], names: list[str]) -> None:
    with pytest.raises(NovaError, match=r"two objectives|scores: "):
        draw_front(runs, tmp_path / "f.png", names)


def test_no_torch(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from novarl.control.pareto import ParetoArchive
from novarl.control.front_figure import draw_front
assert "matplotlib" not in sys.modules
archive = ParetoArchive()
archive.add("a", (1.0, 2.0))
draw_front(archive.front(), Path(sys.argv[1]), ["x", "y"])
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "f.png")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
