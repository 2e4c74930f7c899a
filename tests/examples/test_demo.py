"""demo.py: the standard library alone, and it really learns."""

from __future__ import annotations

import ast
import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str) -> str:
    command = [sys.executable, "-I", "-S", "demo.py", *arguments]  # no site-packages: nothing but the standard library
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def test_it_imports_the_standard_library_only() -> None:
    tree = ast.parse((ROOT / "demo.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names <= sys.stdlib_module_names


def test_it_learns_and_repeats_with_its_seed() -> None:
    first = run("--seed", "0")
    without_time = [re.sub(r"in [\d.]+ s", "", text) for text in (first, run("--seed", "0"), run("--seed", "1"))]
    assert without_time[0] == without_time[1] != without_time[2]
    way = int(re.search(r"(\d+) % of the way", first)[1])  # type: ignore[index]
    assert way >= 90


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_its_expected_return_rises(demo: ModuleType, seed: int) -> None:
    _, curve = demo.train(60, seed)
    assert curve[-1] > 0 > curve[0] and curve[-1] <= demo.worth(None) + 1e-9


def test_without_advantages_it_learns_nothing(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: what is printed comes from learning, not from the script."""
    monkeypatch.setattr(demo, "advantages", lambda steps, values: [0.0] * len(steps))
    _, curve = demo.train(20, 0)
    assert curve[-1] == curve[0]


def test_its_advantages_are_generalised_advantage_estimates(demo: ModuleType) -> None:
    steps = [(0, 0, 0.0, 1.0, False), (1, 0, 0.0, 2.0, True)]
    values = [0.5, 0.25]
    last = 2.0 - 0.25
    first = 1.0 + demo.GAMMA * 0.25 - 0.5 + demo.GAMMA * demo.LAMBDA * last
    assert demo.advantages(steps, values) == pytest.approx([first, last])


def test_its_world_is_a_world(demo: ModuleType) -> None:
    for actions in demo.WORLD:
        for outcomes in actions:
            assert math.isclose(sum(probability for probability, *_ in outcomes), 1.0)
