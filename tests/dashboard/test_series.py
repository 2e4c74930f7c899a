"""Metrics are read once, as they are appended, and thinned without losing a peak."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from novarl.dashboard import growing, series as module
from novarl.dashboard.explain import explained, healthy_range
from novarl.dashboard.runs import Run
from novarl.dashboard.series import Series, positions, smoothed, thinned


def line(step: int, phase: str = "rl", **metrics: object) -> str:
    return json.dumps({"schema": 1, "phase": phase, "step": step, **metrics}) + "\n"


@pytest.fixture(params=["line by line", "at once"])
def read(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Series:
    """Both ways to parse give the same."""
    monkeypatch.setattr(module, "LARGE", 0 if request.param == "at once" else 1 << 40)
    return Series(Run("a", tmp_path, tmp_path))


def put(read: Series, text: str, mode: str = "a") -> None:
    with (read.run.path / "metrics.jsonl").open(mode) as file:
        file.write(text)


def test_appended_lines_are_added_and_an_unfinished_one_waits(read: Series) -> None:
    assert not read.update() and read.rows == 0
    put(read, line(1, kl=0.5) + line(2, kl=0.25, **{"time/tokens_per_second": 7})[:-9])
    assert read.update() and read.rows == 1
    put(read, line(2, kl=0.25, **{"time/tokens_per_second": 7})[-9:] + line(3, "sft", loss=1))
    assert read.update() and not read.update()
    assert read.rows == 3 and read.phases == ["rl", "sft"]
    assert [values.tolist() for values in read.column("kl", "rl")] == [[1, 2], [0.5, 0.25], []]
    assert read.column("tokens_per_second", "rl")[1].tolist() == [7], "under its plain name"
    assert read.names("sft") == ["loss"] and read.last() == {"loss": 1.0, "step": 3.0}


def test_values_that_are_not_finite_are_gaps_that_are_counted(read: Series) -> None:
    put(read, line(1, kl=1.5, x=None, nonfinite={"x": "nan"}) + line(2, kl=None, x=2, nonfinite={"kl": "inf"}))
    read.update()
    assert [values.tolist() for values in read.column("kl", "rl")] == [[1], [1.5], [2]]
    assert [values.tolist() for values in read.column("x", "rl")] == [[2], [2.0], [1]]


def test_a_damaged_line_is_left_out_and_named(read: Series) -> None:
    put(read, line(1, kl=1) + "{broken\n" + "[]\n" + line(2, kl=2) + '{"no": "step"}\n\xff\n' + line(3, kl="text"))
    read.update()
    assert read.column("kl", "rl")[1].tolist() == [1, 2]
    assert [said.split(" ")[0] for said in read.damaged] == [f"metrics.jsonl:{number}" for number in (2, 3, 5, 6)]


@pytest.mark.parametrize("longer", [False, True])
def test_a_log_that_a_resumed_run_has_cut_is_read_again(read: Series, longer: bool) -> None:
    put(read, "".join(line(step, kl=step) for step in range(1, 6)))
    read.update()
    put(read, "".join(line(step, kl=-step) for step in range(1, 10 if longer else 3)), "w")
    assert read.update()
    assert read.column("kl", "rl")[1].tolist() == [-step for step in range(1, 10 if longer else 3)]
    (read.run.path / "metrics.jsonl").unlink()
    assert read.update() and read.rows == 0


def test_a_large_file_is_read_in_blocks_with_a_preview_before(read: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "BLOCK", 4096)
    put(read, "".join(line(step, kl=step / 7) for step in range(1, 2001)))
    read.update(0.0)
    assert 0 < read.rows < 2000 and 0 < read.progress < 1
    across, values, _ = read.preview(50).column("kl", "rl")
    assert 40 < len(across) <= 50 and across[-1] > 1900
    assert np.allclose(values, across / 7), "samples are measured values"
    while read.progress < 1:
        read.update(0.0)
    assert np.allclose(read.column("kl", "rl")[1], np.arange(1, 2001) / 7)


def test_the_updates_of_a_step_are_spaced_within_it() -> None:
    assert positions(np.array([1.0, 1, 2, 2, 2, 2, 3])).tolist() == [0.5, 1, 1.25, 1.5, 1.75, 2, 3]
    assert positions(np.zeros(0)).tolist() == []


@pytest.mark.parametrize("count", [1, 10, 801, 12_345])
def test_thinning_keeps_every_peak_and_invents_nothing(count: int) -> None:
    generator = np.random.default_rng(0)
    across, values = np.arange(count, dtype=float), generator.normal(size=count)
    values[count // 3], values[count // 2] = 99, -99
    x, y = thinned(across, values, 800)
    assert len(x) <= 802 and (np.diff(x) > 0).all()
    assert (values[x.astype(int)] == y).all()
    assert y.max() == values.max() and y.min() == values.min()
    assert (x[0], x[-1]) == (0, count - 1)


def test_the_smooth_curve_is_a_mean_that_does_not_lag() -> None:
    across = np.arange(1000.0)
    x, y = smoothed(across, 3 * across + 1, 200)
    assert len(x) == 200 and np.allclose(y, 3 * x + 1)
    _, flat = smoothed(across, np.where(across % 2 == 0, 1.0, -1.0), 200)
    assert np.abs(flat[5:-5]).max() < 0.05


def test_healthy_ranges_are_the_numbers_of_the_glossary() -> None:
    found = {
        entry["name"]: entry for entry in explained(["kl", "clip_fraction", "effective_sample_size", "mine/x", "lr"])
    }
    assert found["kl"]["range"] == (1e-5, 1e-2) and found["kl"]["log"]
    assert found["clip_fraction"]["range"] == (None, 0.3)
    assert found["effective_sample_size"]["range"] == (0.9, None)
    assert found["lr"]["range"] is None and found["mine/x"]["section"] == "Other"
    assert healthy_range("0.95 to 1") == (0.95, 1) and healthy_range("at most 0") == (None, 0)
    for text in ("", "rises", "0", "fp32 below 1e-5, bf16 below 0.03", "from 0 to 0.6-0.9", "below half"):
        assert healthy_range(text) is None, text
    assert healthy_range("rises slowly, below 1") == (None, 1) and not math.isnan(found["kl"]["range"][0])
