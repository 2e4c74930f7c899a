"""notebooks/stability_dashboard.ipynb, cell by cell, on a run written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from novarl.observe.writer import RunWriter

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "stability_dashboard.ipynb"


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in found), "the notebook is stored without outputs"
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, shown: list[Any]) -> dict[str, Any]:
    monkeypatch.setenv("NOVARL_RUN", str(folder))
    monkeypatch.setattr("IPython.display.display", lambda item: shown.append(item.data))
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells():
        exec(compile(cell, str(NOTEBOOK), "exec"), names)
    return names


def test_it_shows_curves_alerts_and_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {
        "pieces": ["<b>", "x"],
        "advantages": [1.0, -0.5],
        "old_logp": [-1.0, -1.0],
        "behavior_logp": [-1.0, -2.0],
    }
    row = {"prompt": "p", "text": "<b>x", "reward": 1.0, "group": 0, "index": 0, "columns": columns}
    with RunWriter(tmp_path / "run", writer="mine 1") as writer:
        for step in range(1, 21):
            writer.rollouts(step, [row])
            writer.step(step, {"reward_mean": 0.1, "kl": 5.0 if step == 15 else 0.002, "entropy": 1.0})
    shown: list[str] = []
    names = run(tmp_path / "run", monkeypatch, shown)
    assert "step 15: kl_explosion" in capsys.readouterr().out
    assert "&lt;b&gt;" in shown[0] and "<b>x" not in shown[0] and "text-decoration:underline" in shown[0]
    assert names["found"] == {
        "healthy": [],
        "KL explosion": ["kl_explosion"],
        "gradient spike": ["gradient_spike"],
        "not a number": ["nan"],
    }


def test_a_run_without_rollouts_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunWriter(tmp_path / "run", writer="mine 1") as writer:
        writer.step(1, {"reward_mean": 0.1})
    run(tmp_path / "run", monkeypatch, [])
    out = capsys.readouterr().out
    assert "no alerts" in out and "logged no rollouts" in out
