"""The picture: drawn from the files alone, one per phase, the panels that the run has numbers for."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from novarl.observe import figures
from novarl.observe.figures import draw
from novarl.observe.sinks.jsonl import JsonlSink


def a_run(run: Path, *, updates: int = 1, steps: int = 5) -> Path:
    sink = JsonlSink(run)
    sink.event("phase", {"name": "warmup", "steps": 3})
    for step in range(1, 4):
        sink.step(step, {"loss": 4.0 / step, "entropy": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 9.0})
    sink.event("eval", {"name": "before", "score": 0.05, "interval": [0.03, 0.07], "n": 500})
    sink.event("phase", {"name": "rl", "steps": steps})
    for step in range(1, steps + 1):
        for update in range(1, updates + 1):
            reward = {"reward_raw_mean": 0.1 * step, "reward_mean": 0.1 * step}
            loss = {"total_loss": 0.0, "kl": 1e-4, "entropy": 1.0, "length_mean": 3.0, "clip_fraction": 0.1}
            measured = {"eval/score": 0.3, "eval/score_low": 0.2, "eval/score_high": 0.4} if step == 2 else {}
            last = measured if update == updates else {}
            sink.step(step, {**reward, **loss, **last, "update": (step - 1.0) * updates + update})
    sink.event("eval", {"name": "after", "score": 0.9, "interval": [0.8, 0.95], "n": 500})
    sink.close()
    return run


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


def titles(figure: Figure) -> list[str]:
    return [plot.get_title(loc="left") for plot in figure.axes]


def test_one_picture_a_phase_and_the_last_is_curves(tmp_path: Path, drawn: list[Figure]) -> None:
    paths = draw(a_run(tmp_path))
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == ["figures/warmup.png", "figures/curves.png"]
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        assert width > height > 300
    warmup, curves = map(titles, drawn)
    assert warmup == ["Loss", "Entropy", "Gradient norm", "Learning rate", "Speed"]
    assert curves == ["Reward", "Loss", "KL divergence", "Entropy", "Answer length", "Clip fraction"]


def test_a_run_on_pairs_shows_whether_they_are_told_apart(tmp_path: Path, drawn: list[Figure]) -> None:
    sink = JsonlSink(tmp_path)
    told = {"preference_accuracy": 0.75, "reward_margin": 0.5, "reward_chosen_mean": 0.2, "reward_rejected_mean": -0.3}
    for step in range(1, 4):
        sink.step(step, {"loss": 0.7 / step, **told, "grad_norm": 1.0, "lr": 1e-6})
    sink.close()
    draw(tmp_path)
    (curves,) = drawn
    wanted = ["Loss", "Accuracy", "Reward margin", "Reward of answers", "Gradient norm", "Learning rate"]
    assert titles(curves) == wanted
    assert [plot.get_ylabel() for plot in curves.axes[:2]] == ["", "share"], "the loss of pairs is not one of tokens"


@pytest.mark.parametrize("kind", ["dpo", "sft"])
def test_held_out_scores_of_runs_without_a_reward_are_drawn_too(tmp_path: Path, drawn: list[Figure], kind: str) -> None:
    sink = JsonlSink(tmp_path)
    told = {"preference_accuracy": 0.75} if kind == "dpo" else {"accuracy": 0.75}
    sink.event("eval", {"name": "before", "score": 0.25, "interval": [0.125, 0.375], "n": 50})
    for step in range(1, 5):
        measured = {"eval/score": 0.5, "eval/score_low": 0.4, "eval/score_high": 0.6} if step == 2 else {}
        sink.step(step, {"loss": 0.7 / step, **told, **measured, "grad_norm": 1.0, "lr": 1e-6})
    sink.close()
    draw(tmp_path)
    (curves,) = drawn
    where = "Accuracy" if kind == "dpo" else "Held-out log-likelihood per token"
    (plot,) = [plot for plot in curves.axes if plot.get_title(loc="left") == where]
    (bars,) = plot.containers
    assert [tuple(point) for point in bars.lines[0].get_xydata()] == [(2.0, 0.5), (0.0, 0.25)]
    assert sum(bool(plot.containers) for plot in curves.axes) == 1


def test_the_curves_are_the_numbers_of_the_run(tmp_path: Path, drawn: list[Figure]) -> None:
    draw(a_run(tmp_path))
    reward = drawn[1].axes[0]
    line = reward.get_lines()[0]
    assert list(line.get_xdata()) == [1, 2, 3, 4, 5]
    assert list(line.get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    labels = [text.get_text() for text in reward.get_legend().get_texts()]
    assert labels == ["all rollouts", "held-out"], "a filtered mean equal to the raw one is not drawn over it"


@pytest.mark.parametrize(
    ("to_reference", "labels"),
    [(None, ["update"]), (0.5, ["update", "to the reference"])],
    ids=["no reference", "a reference"],
)
def test_a_distance_to_a_reference_is_drawn_where_there_is_one(
    to_reference: float | None, labels: list[str], tmp_path: Path, drawn: list[Figure]
) -> None:
    sink = JsonlSink(tmp_path)
    for step, moved in enumerate((1e-4, float("nan"), 3e-4), start=1):
        sink.step(step, {"kl": moved, "kl_mean": moved if to_reference is None else to_reference * step})
    sink.close()
    draw(tmp_path)
    (panel,) = drawn[0].axes
    assert [text.get_text() for text in panel.get_legend().get_texts()] == labels


@pytest.mark.parametrize(("updates", "places"), [(1, [2.0, 0.0, 5.0]), (3, [6.0, 0.0, 15.0])])
def test_held_out_scores_stand_where_they_were_measured(
    tmp_path: Path, drawn: list[Figure], updates: int, places: list[float]
) -> None:
    draw(a_run(tmp_path, updates=updates))
    reward = drawn[1].axes[0]
    assert reward.get_xlabel() == ("step" if updates == 1 else "update")
    assert list(reward.containers[0].lines[0].get_xdata()) == places
    assert [note.get_text() for note in reward.texts] == ["before 0.05", "after 0.90"]


def test_a_long_noisy_run_is_smoothed_without_lag() -> None:
    line = [float(place) for place in range(200)]
    assert figures._smooth(line) == pytest.approx(line)
    assert figures._smooth(line[:30]) == []
    holes = [float("nan") if place % 7 == 0 else float(place) for place in range(200)]
    assert figures._smooth(holes) == pytest.approx(line)


def test_the_same_run_gives_the_same_picture(tmp_path: Path) -> None:
    pictures = [draw(a_run(tmp_path / name / "run", steps=60))[1].read_bytes() for name in "ab"]
    assert pictures[0] == pictures[1]


def test_a_run_with_holes_and_no_events_is_drawn(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path)
    for step in (1, 2):
        sink.step(step, {"loss": float("nan") if step == 1 else float("inf"), "grad_norm": 0.0})
    sink.close()
    (tmp_path / "events.jsonl").unlink()
    assert [path.name for path in draw(tmp_path)] == ["curves.png"]


@pytest.mark.parametrize("text", [None, ""])
def test_a_run_without_metrics_has_no_picture(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert draw(tmp_path) == []
    assert not (tmp_path / "figures").exists()
