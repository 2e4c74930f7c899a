"""Rollouts and users' files for the tests of rewards."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from novarl.core.types import Prompt, Rollout


def rollout(text: str, answer: Any = None, **extra: Any) -> Rollout:
    """A finished single-turn rollout whose response is `text`."""
    messages = ({"role": "user", "content": "a question about goodness"},)
    prompt = Prompt("row", (1, 2), messages, answer, extra)
    return Rollout(prompt, 0, 0, (), (*messages, {"role": "assistant", "content": text}), text)


@pytest.fixture
def say() -> Callable[..., Rollout]:
    return rollout


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a user's file and gives its path."""

    def write_file(code: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return path

    return write_file
