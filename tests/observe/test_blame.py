"""An error is shown with the place in the user's code, however deep in libraries it was raised."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from novarl.observe.blame import blame
from tests.compose.harness import ON_TASK, finished, summary

CODE = """import json


def helper(text):
    {body}


def reward_fn(messages, answer):
    if "a" in messages[-1]["content"]:
        return 1.0
    return helper("not JSON")
"""


@pytest.mark.parametrize("body", ["return json.loads(text)", "raise ValueError(text)", "return {}[text]"])
def test_the_users_line_is_named(tmp_path: Path, body: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE.format(body=body))
    names: dict[str, Callable[..., object]] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    try:
        names["reward_fn"]([{"content": "b"}], "")
    except (ValueError, KeyError) as error:
        said = f"raised {type(error).__name__}: {error}"
        assert blame(f"{said}\n{traceback.format_exc()}") == f"{said} ({file}, line 5)"
    assert blame("returned None") == "returned None"
    try:
        json.loads("{")
    except ValueError as error:
        inside = traceback.format_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        assert blame("raised it\n" + "".join(inside)) == "raised it", "no frame is the user's"


def test_the_summary_names_the_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE.format(body="return {}[text]"))
    run = tmp_path / "run"
    ended = finished("rl", *ON_TASK, f"reward={file}:reward_fn", f"run_dir={run}", "log.console=true", "seed=3")
    said = f"reward 'reward_fn' raised KeyError: 'not JSON' ({file}, line 5)"
    assert summary(run)["first_failure"] == said
    assert f"First error: {said}" in " ".join(ended.out[ended.out.index("Failed rollouts") :].split())
