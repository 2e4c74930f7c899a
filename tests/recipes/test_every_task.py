"""The benchmark that runs every algorithm on every task notices what it is there to notice."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.every_task import STEPS, distance, run, shown, trouble


def records(**changes: Any) -> list[dict[str, Any]]:
    return [{"step": step + 1, "grad_norm": 0.5, "reward_mean": 0.2, **changes} for step in range(STEPS)]


@pytest.mark.parametrize(
    ("found", "changes", "says"),
    [
        ({}, {}, ""),
        ({"varied": 0.0}, {}, "no group"),
        ({"moved": 0.0}, {}, "have not moved"),
        ({}, {"grad_norm": 0.0}, "no gradient"),
        ({}, {"reward_mean": math.nan}, "not finite: reward_mean"),
        ({}, {"step": 1}, "not every step"),
    ],
)
def test_trouble_is_seen(found: dict[str, float], changes: dict[str, Any], says: str) -> None:
    said = trouble({"varied": 0.5, "moved": 0.1, **found}, records(**changes))
    assert says in said and bool(says) == bool(said)


def test_weights_that_moved(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("other", 1.25)):
        (tmp_path / name).mkdir()
        save_file({"weight": torch.full((2, 2), value)}, tmp_path / name / "model.safetensors")
    assert distance(tmp_path / "one", tmp_path / "other") == 0.25
    assert distance(tmp_path / "one", tmp_path / "one") == 0.0


def test_a_refusal_is_reported_and_no_crash(tmp_path: Path) -> None:
    found = run(tmp_path, {"sort": tmp_path / "nothing"}, ("sort", "grpo"))
    assert found["trouble"].startswith("refused: ") and shown(found) == "NO"
