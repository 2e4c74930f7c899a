"""Faults of what is around a run are one sentence and never "a fault in NovaRL"; nothing raw reaches a terminal."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from novarl.core.checkpoint import Disk
from novarl.core.errors import LostRank, NovaError, visible
from novarl.core.surroundings import environment_fault
from novarl.core.types import Prompt, Rollout, Scored
from novarl.observe import figures
from novarl.observe.sinks.jsonl import JsonlSink
from novarl.run.judge import write_samples
from tests.compose.harness import (
    RL,
    ROOT,
    SFT,
    deterministic_metrics,
    finished,
    metrics,
    novarl,
    questions,
    summary,
    write_rows,
)
from tests.distributed.fork import run as ranks_run

STEPS = ("sft", *SFT, "task=sort", "steps=3", "save_every=1")


def deep() -> Exception:
    with pytest.raises(RecursionError) as caught:
        json.loads("[" * 200_000)
    return caught.value


def ours_too_deep() -> Exception:
    def down() -> None:
        down()

    with pytest.raises(RecursionError) as caught:
        down()
    return caught.value


def not_unicode() -> Exception:
    with pytest.raises(UnicodeEncodeError) as caught:
        "\ud800".encode()
    return caught.value


def null() -> Exception:
    with pytest.raises(ValueError, match="null") as caught:
        Path("a\0b").stat()
    return caught.value


def cut() -> Exception:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    return caught.value


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EIO, "x.jsonl: the run stopped: Input/output error (check the disk, then resume "),
        (errno.EMFILE, "x.jsonl: the run stopped: Too many open files (raise the limit of open files (ulimit -n), "),
        (errno.ENOSPC, "x.jsonl: the run stopped: No space left on device (free some space, then resume "),
        (errno.ENOENT, "x.jsonl: the run stopped: No such file or directory (fix this, then resume "),
        (errno.EISDIR, "x.jsonl: the run stopped: Is a directory (fix this, then resume "),
        (errno.ENAMETOOLONG, "x.jsonl: the run stopped: File name too long (choose a shorter name)"),
    ],
)
def test_what_the_system_refuses_is_one_sentence_wherever_it_is_noticed(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = JsonlSink.step

    def step(sink: JsonlSink, at: int, record: Mapping[str, float]) -> None:
        if at == 2:
            raise OSError(number, os.strerror(number), "x.jsonl")
        report(sink, at, record)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlSink, "step", step)
        ended = novarl(*STEPS, f"run_dir={tmp_path / 'run'}")
    assert ended.code == 2 and ended.err.count("\n") == 1 and ended.err.startswith(f"novarl: {said}")
    finished(*STEPS, f"run_dir={tmp_path / 'run'}", "resume=auto")
    finished(*STEPS, f"run_dir={tmp_path / 'whole'}")
    assert deterministic_metrics(tmp_path / "run") == deterministic_metrics(tmp_path / "whole")


def test_a_run_directory_that_vanishes_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, run = JsonlSink.step, tmp_path / "run"

    def step(sink: JsonlSink, at: int, record: Mapping[str, float]) -> None:
        report(sink, at, record)
        if at == 2:
            shutil.rmtree(run)

    monkeypatch.setattr(JsonlSink, "step", step)
    ended = novarl(*STEPS, f"run_dir={run}")
    assert ended.code == 2 and "Traceback" not in ended.err and "bug in NovaRL" not in ended.err
    assert ended.err == (
        f"novarl: run_dir={run}: the run directory was removed during the run (start again; its contents are lost)\n"
    )


def test_a_run_directory_that_vanishes_in_a_save_is_said_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = tmp_path / "run", Disk.produce

    def produce(disk: Disk, path: Path, writer: Any) -> None:
        shutil.rmtree(run)
        real(disk, path, writer)

    monkeypatch.setattr(Disk, "produce", produce)
    ended = novarl(*STEPS, f"run_dir={run}")
    what = "the run directory was removed during the run (start again; its contents are lost)"
    assert (ended.code, ended.err) == (2, f"novarl: run_dir={run}: {what}\n")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (deep, "the run stopped: an input file is nested too deeply (restore it from a copy)"),
        (cut, "the run stopped: an input file is damaged (Expecting property name"),
        (null, "the run stopped: a file name with a null character (check the names in the configuration)"),
        (not_unicode, "the run stopped: text that is not valid Unicode ('utf-8' codec can't encode"),
    ],
)
def test_text_that_cannot_be_read_is_no_fault_of_ours(error: Any, said: str) -> None:
    fault = environment_fault(error())
    assert fault is not None and fault.code == 2 and str(fault).startswith(said)


@pytest.mark.parametrize("error", [ours_too_deep, lambda: KeyError("step"), lambda: ValueError("x"), ZeroDivisionError])
def test_a_fault_of_ours_stays_one(error: Any) -> None:
    assert environment_fault(error()) is None


def leave_alone(ranks: Any) -> str:
    """Rank 1 ends; rank 0 waits for it in a collective."""
    if ranks.rank == 1:
        return "gone"
    with pytest.raises(LostRank) as caught:
        for _ in range(3):
            ranks.sum_(torch.ones(2))
            ranks.gather(1)
    return f"{caught.value.code} {caught.value}"


def test_a_lost_rank_is_named() -> None:
    said, _ = ranks_run(leave_alone)
    assert said.startswith("3 rank 0: another process of the run has terminated or does not respond (")
    assert said.endswith("resume from the last checkpoint with resume=auto)")


HOSTILE = "\x1b]0;pwned\x07\x00\x9b2J\u202eevil\u2066\ud800\r"
SHOWN = "\\x1b]0;pwned\\x07\\x00\\x9b2J\\u202eevil\\u2066\\ud800\\r"


def test_hostile_text_is_shown_escaped() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("tab\t, line\n, é, 日本, 👩‍💻, ‏") == "tab\t, line\n, é, 日本, 👩‍💻, \\u200f"
    assert str(NovaError(HOSTILE, where=HOSTILE, fix=HOSTILE)) == f"{SHOWN[:-2]} : {SHOWN[:-2]} ({SHOWN[:-2]} )"


def test_hostile_names_and_messages_reach_no_terminal_raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", HOSTILE[:-2]: "b"}] * 20)
    (tmp_path / "mine.py").write_text("def reward_fn(messages, answer):\n    raise ValueError('\\x1b]0;pwned\\x07')\n")
    words = [
        ("explain", "rl", "task=sort", "run_dir=\x1b[31m\u202e"),
        ("rl", f"x\x1b[31m\u202ey={1}"),
        ("sft", f"data={rows}", "completion_key=\x1b]0;x\x07"),
        ("rl", *RL, f"data={write_rows(tmp_path / 'q.jsonl', questions())}", "reward=mine.py:reward_fn"),
    ]
    for one in words:
        ended = novarl(*one)
        raw = [c for c in ended.out + ended.err if c in "\x1b\x07\u202e\x00"]
        assert not raw, one
        assert "Traceback" not in ended.err
        assert "\\x1b" in ended.out + ended.err, one


def test_what_is_printed_never_lands_in_a_file_of_a_run_whose_streams_are_closed(tmp_path: Path) -> None:
    """Closed streams leave their numbers to the next files that are opened."""
    (tmp_path / "loud.py").write_text(
        "import os\n\n\ndef reward_fn(messages, answer):\n"
        "    os.write(1, b'NOISE')\n    os.write(2, b'NOISE')\n    return 0.0\n"
    )
    words = (*("rl", *RL, "task=sort", "steps=1", "log.console=true"), f"reward={tmp_path / 'loud.py'}:reward_fn")
    run = shlex.join([sys.executable, "-m", "novarl", *words, f"run_dir={tmp_path / 'run'}"])
    ended = subprocess.run(f"{run} <&- >&- 2>&-", shell=True, cwd=ROOT, check=False)
    assert ended.returncode == 0 and summary(tmp_path / "run")["status"] == "done"
    noisy = [file.name for file in (tmp_path / "run").rglob("*") if file.is_file() and b"NOISE" in file.read_bytes()]
    assert noisy == []


def test_a_hostile_name_reaches_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the terminal, where the font's missing letters are named."""
    titles: list[str] = []
    monkeypatch.setattr(figures, "_figure", lambda rows, title, marks, path: titles.append(title))
    run = tmp_path / "a\x1b[31m\u202eb"
    finished(*STEPS, f"run_dir={run}")
    figures.draw(run)
    assert titles == ["a\\x1b[31m\\u202eb · sft"]


def test_samples_are_shown_escaped(tmp_path: Path) -> None:
    prompt = Prompt("a", (1,), ({"role": "user", "content": HOSTILE},), HOSTILE)
    rollout = Rollout(
        prompt=prompt, group=0, index=0, sequences=(), messages=prompt.messages, text=HOSTILE, status="finished",
        finish_reason="stop", role="policy", info={},
    )  # fmt: skip
    write_samples(tmp_path / "samples.md", [Scored(rollout, {}, 1.0)])
    text = (tmp_path / "samples.md").read_text()
    assert text.count(SHOWN) == 3 and visible(text) == text


def test_a_terminal_that_closes_saves_as_sigterm_does(tmp_path: Path) -> None:
    report = JsonlSink.step

    def step(sink: JsonlSink, at: int, record: Mapping[str, float]) -> None:
        report(sink, at, record)
        if at == 2:
            signal.raise_signal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup
    run, words = tmp_path / "run", ("sft", *SFT, "task=sort", "steps=4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonlSink, "step", step)
        ended = novarl(*words, f"run_dir={run}")
    assert ended.code == 130 and ended.err.endswith("novarl: stopped after step 2; everything is saved\n")
    assert summary(run)["status"] == "stopped" and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    signal.signal(signal.SIGHUP, before)
    finished(*words, f"run_dir={run}", "resume=auto")
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""
    report = JsonlSink.step

    def step(sink: JsonlSink, at: int, record: Mapping[str, float]) -> None:
        report(sink, at, record)
        signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(JsonlSink, "step", step)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        finished("sft", *SFT, "task=sort", "steps=2", f"run_dir={tmp_path / 'run'}")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(metrics(tmp_path / "run")) == 2
