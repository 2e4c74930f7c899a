"""`novarl sample`: whoever stops reading ends it quietly, and an answer that the context cut short is said."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from novarl.compose import sample as talk
from novarl.config.load import load as load_config
from novarl.config.tree import SampleConfig
from novarl.models.load import Policy, load
from novarl.run import answers
from novarl.tasks.registry import find_task
from tests.compose.harness import SFT, finished


def test_a_reader_that_leaves_ends_it(tmp_path: Any) -> None:
    words = [sys.executable, "-m", "novarl", "sample", "model=tiny", "sampling.max_tokens=2"]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.write("hello\n" * 200)
    process.stdin.close()
    process.stdout.readline()
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (0, "")


@pytest.mark.parametrize(("context", "said"), [(32, True), (400, False)])
def test_answers_that_the_context_cuts_short_are_told(
    context: int, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def short(*args: Any, **options: Any) -> Policy:
        return replace(load(*args, **options), context=context, eos_ids=())

    monkeypatch.setattr(talk, "load", short)
    talk.run_sample(load_config(SampleConfig, None, ["model=tiny", "prompt=hi", "n=2", "sampling.max_tokens=64"]))
    found = capsys.readouterr().err
    expected = "novarl: 2 of 2 answers are shorter than 64 tokens because the model's context of 32 tokens was full\n"
    assert found == (expected if said else "")


@pytest.mark.parametrize(("terminal", "shown"), [(True, "a\\x1b[2J\\u202eb\n"), (False, "a\x1b[2J\u202eb\n")])
def test_an_answer_is_shown_escaped_on_a_terminal_alone(
    terminal: bool, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answers, "turn_text", lambda *_, **__: "a\x1b[2J\u202eb")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    talk.run_sample(load_config(SampleConfig, None, ["model=tiny", "prompt=hi", "sampling.max_tokens=2"]))
    assert capsys.readouterr().out == shown


def test_in_a_terminal_it_says_how_to_ask_and_how_to_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an example prompt where the run behind the model tells its task; answers alone are on stdout."""
    run = tmp_path / "run"
    finished("sft", *SFT, "task=sort", "steps=1", f"run_dir={run}")
    typed = iter(["sort: ba\n", "\n", ""])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: next(typed)))
    capsys.readouterr()
    model = run / "checkpoints/latest/model"
    talk.run_sample(load_config(SampleConfig, None, [f"model={model}", "sampling.max_tokens=2"]))
    out, err = capsys.readouterr()
    example = find_task("sort").rows("held_out", 1)[0]["messages"][0]["content"]
    assert len(out.splitlines()) == 1
    assert err.splitlines() == [
        "Type a prompt and press Enter. Ctrl-D to end.",
        f"This model was trained on task=sort. Example prompt: {example}",
        "> > > ",
    ]
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: ""))
    talk.run_sample(load_config(SampleConfig, None, ["model=tiny"]))
    assert capsys.readouterr().err == "Type a prompt and press Enter. Ctrl-D to end.\n> \n"
