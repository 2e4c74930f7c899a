"""How runs end: summary.json, what scripts may rely on, and the exit codes 0, 1, 2 and 130."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from novarl.core.checkpoint import Checkpoints, Disk, damage
from novarl.core.rundir import RunDir
from novarl.loops.evaluate import Evaluation
from novarl.observe.sinks.jsonl import JsonlSink
from novarl.run.judge import Judge
from novarl.run.session import Session
from tests.compose.harness import (
    ON_TASK,
    RL,
    ROOT,
    SFT,
    alerts,
    deterministic_metrics,
    events,
    finished,
    lightly,
    metrics,
    notes,
    novarl,
    questions,
    snapshot,
    summary,
    weights,
    write_rows,
)

COMMANDS = {
    "rl on a task": ("rl", *ON_TASK),
    "rl on rows": ("rl", *RL, "data=rows.jsonl", "reward=lexical"),
    "sft on a task": ("sft", *SFT, "task=sort"),
    "sft on rows": ("sft", *SFT, "data=rows.jsonl"),
    "eval on a task": ("eval", "task=sort", "model=tiny", "eval.n=2", "eval.k=2"),
    "eval on rows": ("eval", "data=rows.jsonl", "reward=lexical", "model=tiny", "eval.n=2", "rollout.max_tokens=4"),
    "demo": ("demo", *ON_TASK),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory of one's own, with rows in it."""
    write_rows(tmp_path / "rows.jsonl", questions())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_score(score: Mapping[str, Any], count: int) -> None:
    low, high = score["interval"]
    assert score["n"] == count and isinstance(score["score"], float)
    assert low <= score["score"] <= high


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_every_run_leaves_the_summary_that_scripts_rely_on(words: tuple[str, ...], folder: Path) -> None:
    finished(*words, "run_dir=run")
    found, training = summary(folder / "run"), words[0] != "eval"
    assert found["status"] == "done" and found["command"] == words[0].replace("demo", "rl")
    assert isinstance(found["seconds"], float) and found["seconds"] > 0
    assert found["steps"] == training
    rows = found["rows"]
    assert rows["read"] == rows["used"] + rows["refused"] > 0 and rows["truncated"] == 0
    check_score(found["after"], 2)
    if training:
        check_score(found["before"], 2)
    else:
        assert found["before"] is None
    promised = {"run_dir", "events", "samples"} | ({"metrics", "logs", "checkpoints", "model"} if training else set())
    assert promised <= found["paths"].keys()
    assert all(Path(path).exists() for path in found["paths"].values())


@pytest.mark.parametrize(("scores", "named"), [((0.5, 0.9, 0.1, 0.1), True), ((0.5, 0.1, 0.9, 0.9), False)])
def test_the_best_checkpoint_is_named_where_it_is_better_than_the_last(
    scores: tuple[float, ...], named: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured before, after each of two steps, and after."""
    left = list(scores)
    real = Judge.__call__

    def measured(judge: Judge) -> Evaluation:
        return replace(real(judge), score=left.pop(0))

    monkeypatch.setattr(Judge, "__call__", measured)
    finished(*COMMANDS["rl on rows"], "steps=2", "eval_every=1", "run_dir=run")
    found = summary(folder / "run")
    assert not left and found["after"]["score"] == scores[-1]
    assert ("best" in found["paths"]) is named


@pytest.mark.parametrize(("scores", "failing"), [((0.5, 0.9), {2}), ((0.5, 0.9, 0.7), {2}), ((0.5, 0.9, 0.4), {2, 3})])
def test_the_best_checkpoint_is_the_best_of_those_that_could_be_saved(
    scores: tuple[float, ...], failing: set[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses some tries of a save. The last save of a run is tried once more at its end."""
    left, tries = [0.1, *scores, 0.1], [0]
    real, fill = Judge.__call__, Checkpoints._fill

    def measured(judge: Judge) -> Evaluation:
        return replace(real(judge), score=left.pop(0))

    def full(self: Checkpoints, *args: Any) -> None:
        tries[0] += 1
        if tries[0] in failing:
            raise OSError(28, "No space left on device")
        fill(self, *args)

    monkeypatch.setattr(Judge, "__call__", measured)
    monkeypatch.setattr(Checkpoints, "_fill", full)
    finished(*COMMANDS["rl on rows"], f"steps={len(scores)}", "eval_every=1", "save_every=1", "run_dir=run")
    checkpoints = folder / "run" / "checkpoints"
    saved = {int(path.name[5:]) for path in checkpoints.glob("step-*")}
    best = max(saved, key=lambda step: scores[step - 1])
    assert len(scores) in saved and os.readlink(checkpoints / "best") == f"step-{best:06d}"
    state = json.loads((checkpoints / "latest" / "state.json").read_text())
    assert state["state"]["facts"]["best"] == scores[best - 1] and state["best"] is (best == len(scores))


def test_without_a_run_dir_every_run_has_its_own(folder: Path) -> None:
    finished(*COMMANDS["rl on rows"])
    (run,) = (folder / "runs").glob("rl-*")
    assert summary(run)["status"] == "done" and (folder / "runs" / "latest").resolve() == run


@pytest.mark.parametrize("words", [COMMANDS["rl on a task"], COMMANDS["sft on rows"]], ids=["rl", "sft"])
def test_a_finished_run_that_is_resumed_ends_at_once_and_more_steps_go_on(words: tuple[str, ...], folder: Path) -> None:
    finished(*words, "run_dir=run")
    before = snapshot(folder)
    finished(*words, "run_dir=run", "resume=auto")
    assert snapshot(folder) == before
    finished(*words, "run_dir=run", "resume=auto", "steps=2")
    assert summary(folder / "run")["steps"] == 2 and metrics(folder / "run")[-1]["step"] == 2


def test_a_run_that_went_back_goes_on_from_its_new_branch(folder: Path) -> None:
    """With the old branch's checkpoints, of later steps, still there."""
    words = (*COMMANDS["sft on rows"], "run_dir=run", "save_every=1", "keep=9")
    finished(*words, "steps=5")
    ended = finished(*words, "steps=3", "resume=run/checkpoints/step-000002", "optim.lr=1e-4")
    assert ended.code == 0
    (said,) = (text for event in events(folder / "run", "alert") if "moved aside" in (text := event["message"]))
    assert said.startswith("Resuming from step-000002; later checkpoints are moved aside: abandoned-1-step-000003")
    finished(*words, "steps=4", "resume=auto", "optim.lr=1e-4")
    assert [row["step"] for row in metrics(folder / "run")] == [1, 2, 3, 4]
    assert (folder / "run" / "checkpoints" / "latest").resolve().name == "step-000004"


def test_what_a_resumed_run_changes_is_said_and_other_rows_are_refused(folder: Path) -> None:
    words = COMMANDS["rl on rows"]
    finished(*words, "run_dir=run")
    same = finished(*words, "run_dir=run", "resume=auto")
    assert "To train longer: steps=2" in same.out and "Note" not in same.out
    idle = finished(*words, "run_dir=run", "resume=auto", "optim.lr=1e-4")
    assert "Note: Resuming with optim.lr=0.0001 (previously null) (no effect on a complete run)" in idle.out
    finished(*words, "run_dir=run", "resume=auto", "steps=2", "save_every=7", "optim.lr=1e-4", "adv.norm_std=true")
    said = notes(folder / "run")
    assert said == [
        "Resuming with optim.lr=0.0001 (previously null)",
        "Resuming with adv.norm_std=true (previously null)",
    ]
    write_rows(folder / "rows.jsonl", questions(30))
    before = snapshot(folder)
    ended = novarl(*words, "run_dir=run", "resume=auto", "steps=3")
    assert ended.code == 2 and snapshot(folder) == before
    assert "run_dir=run: this run was started with 18 training rows, but now has 28" in ended.err


def test_files_that_change_between_resumes_are_said(folder: Path) -> None:
    """As many rows as before, and the same names; once said, they are the ones to compare with."""
    reward = folder / "mine.py"
    reward.write_text("def reward_fn(messages, answer): return 1.0\n")
    template = folder / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    words = ("rl", *RL, "data=rows.jsonl", "reward=mine.py:reward_fn", "chat_template=mine.jinja")
    words = (*words, "run_dir=run", "resume=auto")
    names = ("mine.jinja", "mine.py", "rows.jsonl")
    finished(*words)
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    assert json.loads((folder / "run" / "manifest.json").read_text())["files"] == digests
    finished(*words, "steps=2")
    assert not [event for event in events(folder / "run", "alert") if "changed" in event["message"]]
    reward.write_text("def reward_fn(messages, answer): return 0.5\n")
    template.write_text("{% for m in messages %}{{ m.content }}.\n{% endfor %}")
    write_rows(folder / "rows.jsonl", [{**row, "answer": "other"} for row in questions()])
    finished(*words, "steps=3")
    said = alerts(folder / "run")
    now = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in digests}
    expected = [
        f"{name} has changed since the run last started (sha256 {now[name][:12]}, previously {digests[name][:12]})"
        for name in names
    ]
    assert said[-3:] == expected
    finished(*words, "steps=4")
    assert alerts(folder / "run") == said


def test_too_few_rows_to_hold_one_out_are_said(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", questions(9))
    finished(*COMMANDS["rl on rows"], "run_dir=run")
    (said,) = alerts(folder / "run")
    assert said.startswith("fewer than 10 rows: no held-out split, so evaluation is skipped")
    finished(*COMMANDS["rl on rows"], "run_dir=unasked", "eval.n=0")
    assert not alerts(folder / "unasked")


def test_resume_in_an_empty_directory_starts_afresh(folder: Path) -> None:
    (folder / "run").mkdir()
    finished(*COMMANDS["rl on rows"], "run_dir=run", "resume=auto")
    assert summary(folder / "run")["steps"] == 1


def test_a_fault_of_ours_is_raised_and_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(judge: Judge) -> Evaluation:
        raise ZeroDivisionError

    (folder / "mine.py").write_text("def reward_fn(messages, answer): return 1.0")
    handlers = (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError) as raised:
        patch.setattr(Judge, "__call__", fault)
        novarl("rl", *RL, "data=rows.jsonl", "reward=mine.py:reward_fn", "run_dir=run")
    assert "This is a bug in NovaRL" in raised.value.__notes__[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    finished("rl", *RL, "data=rows.jsonl", "reward=mine.py:reward_fn", "run_dir=run", "resume=auto")


# ------------------------------------------------------------------------------------------------ stopped by Ctrl-C

LONGER = {
    "in the warm-up": (("rl", *ON_TASK, "warmup=4", "steps=2"), 2, "warm-up step 2"),
    "at a step": (("rl", *RL, "data=rows.jsonl", "reward=lexical", "steps=4"), 2, "step 2"),
    "between two updates of a step": (
        ("rl", *RL, "data=rows.jsonl", "reward=lexical", "steps=2", "updates_per_rollout=2", "algo=grpo"),
        3,
        "step 1",
    ),
    "in fine-tuning": (("sft", *SFT, "data=rows.jsonl", "steps=4"), 2, "step 2"),
}


def pressing_at(update: int) -> Callable[[JsonlSink, int, Mapping[str, float]], None]:
    """JsonlSink.step, which presses Ctrl-C once `update` updates were reported."""
    report, count = JsonlSink.step, 0

    def step(sink: JsonlSink, number: int, record: Mapping[str, float]) -> None:
        nonlocal count
        report(sink, number, record)
        count += 1
        if count == update:
            signal.raise_signal(signal.SIGINT)

    return step


@pytest.mark.parametrize(("words", "update", "after"), LONGER.values(), ids=LONGER)
def test_ctrl_c_saves_and_resume_gives_the_run_that_was_never_stopped(
    words: tuple[str, ...], update: int, after: str, folder: Path
) -> None:
    finished(*words, "run_dir=whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonlSink, "step", pressing_at(update))
        ended = novarl(*words, "run_dir=run")
    run = folder / "run"
    assert ended.code == 130 and len(metrics(run)) == update
    first, last = ended.err.split("\n", 2)[1:]
    assert first == "Stopping after this update, then saving. Press Ctrl-C again to stop immediately."
    assert last == f"novarl: stopped after {after}; everything is saved\n"
    assert summary(run)["status"] == "stopped" and damage(run / "checkpoints" / "latest") is None
    finished(*words, "run_dir=run", "resume=auto")
    check_same_run(run, folder / "whole")


def check_same_run(run: Path, whole: Path) -> None:
    """Bit for bit: weights, and every metric that the clock does not decide."""
    assert deterministic_metrics(run) == deterministic_metrics(whole)
    ours, theirs = weights(run), weights(whole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    a, b = summary(run), summary(whole)
    assert [a[name] for name in ("status", "steps", "updates", "rows", "before", "after")] == [
        b[name] for name in ("status", "steps", "updates", "rows", "before", "after")
    ]


def test_ctrl_c_twice_stops_at_once(folder: Path) -> None:
    def step(sink: JsonlSink, number: int, record: Mapping[str, float]) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JsonlSink, "step", step)
        ended = novarl(*COMMANDS["rl on rows"], "run_dir=run")
    assert ended.code == 130 and ended.err.endswith("novarl: stopped\n") and "Traceback" not in ended.err
    assert not (folder / "run" / "checkpoints").exists()


# --------------------------------------------------------------------------------------------------- as users run it


NO_FIGURES = "from novarl.run import report; report.draw = lambda folder: []"


def start(*words: str, planted: str = NO_FIGURES) -> subprocess.Popen[str]:
    """A process of its own. `planted` is code that runs before the command."""
    with lightly():  # its environment
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = f"import sys; from novarl import cli\n{planted}\nraise SystemExit(cli.main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_process_stopped_by_ctrl_c_resumes_to_the_bit(folder: Path) -> None:
    words = ("rl", *RL, "data=rows.jsonl", "reward=lexical", "steps=15", "save_every=5")
    stopped = start(*words, "run_dir=run")
    log = folder / "run" / "metrics.jsonl"
    while stopped.poll() is None and not (log.exists() and log.read_text().count("\n") >= 2):
        time.sleep(0.01)
    stopped.send_signal(signal.SIGINT)
    ended = max(json.loads(line)["step"] for line in log.read_text().splitlines()[:2])
    _, err = stopped.communicate(timeout=300)
    steps = summary(folder / "run")["steps"]
    assert stopped.returncode == 130, err
    assert ended <= steps < 15, "it stops after the step that it is in"
    assert err.endswith(f"novarl: stopped after step {steps}; everything is saved\n") and "Traceback" not in err
    for process in (start(*words, "run_dir=run", "resume=auto"), start(*words, "run_dir=whole")):
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    check_same_run(folder / "run", folder / "whole")
    assert events(folder / "run", "phase")[-1]["done"] == steps


def test_a_run_whose_curves_cannot_be_drawn_is_no_failed_one(folder: Path) -> None:
    planted = f"{NO_FIGURES}\nreport.draw = lambda folder: __import__('no_such_library')"
    process = start(*COMMANDS["rl on rows"], "run_dir=run", planted=planted)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0 and summary(folder / "run")["status"] == "done", err
    (alert,) = notes(folder / "run")
    assert "Could not draw the curves (ModuleNotFoundError" in alert


def test_a_fault_of_ours_is_code_1(folder: Path) -> None:
    planted = "from novarl.run.judge import Judge; Judge.__call__ = lambda judge: 1 / 0"
    process = start(*COMMANDS["rl on rows"], "run_dir=run", planted=planted)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "Traceback" in err and "This is a bug in NovaRL" in err


@pytest.mark.parametrize("words", ["rl on a task", "rl on rows"])
def test_without_evaluation_the_same_is_learnt(words: str, folder: Path) -> None:
    """On a task to the bit; of a file, the rows that are not held out are learnt from."""
    for name, count in (("measured", 2), ("not", 0)):
        finished(*COMMANDS[words], "steps=2", f"eval.n={count}", f"run_dir={name}")
    assert summary(folder / "measured")["after"] is not None
    without = summary(folder / "not")
    assert without["before"] is without["after"] is None and without["rows"]["held_out"] == 0
    assert not any(key.startswith("eval/") for line in metrics(folder / "not") for key in line)
    if words == "rl on a task":
        one, other = weights(folder / "measured"), weights(folder / "not")
        assert one and all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())


def test_a_run_whose_reader_has_gone_goes_on(folder: Path) -> None:
    """As in `novarl rl ... | head -1`."""
    words = [word for word in RL if word != "log.console=false"]
    process = start("rl", *words, "data=rows.jsonl", "reward=lexical", "steps=3", "run_dir=run")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith("Starting RLHF training run")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=300) == 0
    assert summary(folder / "run")["status"] == "done" and len(metrics(folder / "run")) == 3


def test_two_processes_do_not_write_one_run(folder: Path) -> None:
    """Another process is in the midst of the run: whoever would go on with it is sent away, and nothing has changed.
    When that one is killed, the run is free; and it is free again when a run of this process has ended."""
    finished("sft", *SFT, "task=sort", "run_dir=run", "steps=1")
    words = (sys.executable, "-c", "from novarl.core.rundir import *; print(RunDir(Path('run')).claim()); input()")
    claim = partial(subprocess.Popen, words, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with claim(env={**os.environ, "PYTHONPATH": str(ROOT)}) as other:
        assert other.stdout is not None and other.stdout.readline() == "None\n"
        before = snapshot(folder)
        assert RunDir(folder / "run").claim() is not None and RunDir(folder / "run").claim() is not None
        for more in ((), ("resume=auto",), (f"resume={next((folder / 'run/checkpoints').glob('step-*'))}",)):
            ended = novarl("sft", *SFT, "task=sort", "run_dir=run", "steps=2", *more)
            assert ended.code == 2
            assert "run_dir=run: another process is writing to this run (wait for it, or stop it)" in ended.err
        assert snapshot(folder) == before
        other.kill()
    assert len(metrics(folder / "run")) == 1
    finished("sft", *SFT, "task=sort", "run_dir=run", "resume=auto", "steps=2")
    assert len(metrics(folder / "run")) == 2
    with claim(env={**os.environ, "PYTHONPATH": str(ROOT)}) as other:
        assert other.communicate("\n")[0] == "None\n"


def test_who_would_go_on_is_told_that_nothing_is_there(folder: Path) -> None:
    def notes() -> list[str]:
        return [event["message"] for event in events(folder / "run", "alert")]

    finished("sft", *SFT, "task=sort", "run_dir=run", "steps=1", "resume=auto")
    assert "resume=auto: the run run does not exist yet and is started" in notes()

    def killed(session: Session, *_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "save", killed)
        assert novarl("sft", *SFT, "task=sort", "run_dir=killed", "steps=1").code == 130
    finished("sft", *SFT, "task=sort", "run_dir=killed", "steps=1", "resume=auto")
    (said,) = (event["message"] for event in events(folder / "killed", "alert"))
    assert said == "resume=auto: the run killed has no checkpoint yet and starts over"
    assert len(metrics(folder / "killed")) == 1


@pytest.mark.parametrize("how", ["removed", "emptied", "a link to a disk that is not there"])
@pytest.mark.parametrize("ended", ["done", "killed"])
def test_a_run_whose_checkpoints_are_missing_is_not_cleared(how: str, ended: str, folder: Path) -> None:
    words = ("sft", *SFT, "task=sort", "run_dir=run", "steps=2")
    finished(*words)
    checkpoints = folder / "run" / "checkpoints"
    if ended == "killed":
        (folder / "run" / "summary.json").unlink()
    checkpoints.rename(folder / "elsewhere")
    said = "does not exist"
    if how == "emptied":
        checkpoints.mkdir()
        said = "is empty"
    elif how != "removed":
        checkpoints.symlink_to("/unmounted/checkpoints")
        said = "is a link to /unmounted/checkpoints, which does not exist"
    before = snapshot(folder)
    ended_now = novarl(*words, "resume=auto")
    assert ended_now.code == 2 and snapshot(folder) == before
    assert ended_now.err == (
        f"novarl: run_dir=run: the run has saved checkpoints, but run/checkpoints {said} "
        "(restore them (is the disk mounted?), or start a new run in another run_dir)\n"
    )
    if checkpoints.is_symlink():
        checkpoints.unlink()
    elif checkpoints.exists():
        checkpoints.rmdir()
    checkpoints.symlink_to(folder / "elsewhere")  # mounted again
    assert finished(*words[:-1], "steps=3", "resume=auto").code == 0
    assert [row["step"] for row in metrics(folder / "run")] == [1, 2, 3]


def test_the_links_of_a_run_are_set_right_when_it_is_opened(folder: Path) -> None:
    """Killed before the last rename of its last save; and found by a run that has nothing left to do."""
    words = ("sft", *SFT, "task=sort", "run_dir=run", "save_every=1")
    finished(*words, "steps=2")
    latest = folder / "run" / "checkpoints" / "latest"
    for status in ("killed", "done"):
        latest.unlink()
        latest.symlink_to("step-000001")
        if status == "killed":
            (folder / "run" / "summary.json").unlink()
        finished(*words, "steps=2", "resume=auto")
        assert os.readlink(latest) == "step-000002"
        assert Path(summary(folder / "run")["paths"]["model"]).resolve().parent.name == "step-000002"


@pytest.mark.parametrize("file", ["state.json", "MANIFEST", "tensors.safetensors", "model/model.safetensors"])
def test_a_fall_back_to_an_older_checkpoint_is_said(file: str, folder: Path) -> None:
    words = ("sft", *SFT, "task=sort", "run_dir=run", "save_every=1")
    finished(*words, "steps=2")
    (folder / "run" / "checkpoints" / "step-000002" / file).write_bytes(b"")
    finished(*words, "steps=3", "resume=auto")
    (said,) = (event["message"] for event in events(folder / "run", "alert"))
    why = "its MANIFEST is damaged: not JSON" if file == "MANIFEST" else f"the checksum of {file} does not match"
    assert said.startswith(f"Resuming from step-000001, because a newer checkpoint is damaged: step-000002: {why}")
    assert [row["step"] for row in metrics(folder / "run")] == [1, 2, 3]


# ------------------------------------------------------------------------------------------ logs that were cut or lost


SHORT = "logs are shorter than when the checkpoint was saved; the rest is lost: "


def test_logs_that_are_shorter_than_the_checkpoint_says_are_named_and_no_half_line_stays(folder: Path) -> None:
    words = ("sft", *SFT, "task=sort", "run_dir=run")
    finished(*words, "steps=3")
    log, train = folder / "run" / "metrics.jsonl", folder / "run" / "logs" / "train.jsonl"
    whole, lines = log.stat().st_size, log.read_bytes().splitlines(keepends=True)
    log.write_bytes(lines[0] + lines[1][:40])
    train.unlink()
    held = log.stat().st_size
    finished(*words, "steps=4", "resume=auto")
    (said,) = (event["message"] for event in events(folder / "run", "alert"))
    assert said == f"{SHORT}metrics.jsonl has {held:,} of {whole:,} bytes, logs/train.jsonl is missing"
    assert [row["step"] for row in metrics(folder / "run")] == [1, 4]
    assert log.read_bytes().startswith(lines[0] + b'{"schema"')


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"\x00\x00\x00\n", "not JSON: Expecting value"),
        (b"\xff\n", "not UTF-8 text"),
        (b"[1]\n", "not a line written by a run"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
    ],
)
def test_a_log_that_cannot_be_read_is_named_before_anything_is_appended(line: bytes, said: str, folder: Path) -> None:
    words = ("sft", *SFT, "task=sort", "run_dir=run")
    finished(*words, "steps=2")
    log = folder / "run" / "metrics.jsonl"
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0] + line + b" " * 10_000)
    before = snapshot(folder)
    ended = novarl(*words, "steps=3", "resume=auto")
    assert (ended.code, ended.err) == (
        2,
        f"novarl: run/metrics.jsonl:2: {said} (restore the file from a copy, or remove the line)\n",
    )
    assert snapshot(folder) == before


def test_logs_are_on_the_disk_before_their_length_is_noted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every log that a checkpoint names was synced when it was as long as the checkpoint says."""

    class Noting(Disk):
        synced: ClassVar[dict[Path, int]] = {}

        def sync(self, path: Path) -> None:
            self.synced[path] = path.stat().st_size

        def write(self, path: Path, data: bytes) -> None:
            if path.name == "state.json":
                sizes = json.loads(data)["state"]["logs"]
                assert {"metrics.jsonl", "events.jsonl", "logs/train.jsonl"} <= sizes.keys()
                assert any(name.startswith("rollouts/") for name in sizes)
                assert {name: self.synced.get(Path("run") / name) for name in sizes} == sizes
                written.append(path)
            super().write(path, data)

    written: list[Path] = []
    monkeypatch.setattr("novarl.core.checkpoint.DISK", Noting())
    words = ("rl", *RL, "data=rows.jsonl", "reward=lexical", "steps=2", "save_every=1", "log.rollouts_every=1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("novarl.core.checkpoint.Disk.sync", Noting.sync)
        finished(*words, "run_dir=run")
    assert len(written) == 2


DAMAGED = {
    "cut": ('{"status": "do', "is damaged: not JSON ("),
    "a list": ("[]", "is damaged: not a JSON object ("),
    "deep": ("[" * 100_000, "is damaged: it is nested too deeply ("),
    "not text": ("\udcff", "is damaged: not UTF-8 text ("),
    "empty": ("", "is damaged: not JSON ("),
}


@pytest.mark.parametrize(("text", "said"), DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("file", ["summary.json", "manifest.json"])
def test_a_damaged_file_of_a_run_is_named(file: str, text: str, said: str, folder: Path) -> None:
    words = ("sft", *SFT, "task=sort", "run_dir=run")
    finished(*words)
    path = folder / "run" / file
    path.write_text(text, errors="surrogateescape")
    before = snapshot(folder)
    ended = novarl(*words, "resume=auto")
    assert ended.code == 2 and ended.err.count("\n") == 1 and snapshot(folder) == before
    assert ended.err.startswith(f"novarl: run/{file}: {said}")
    fix = "delete it" if file == "summary.json" else "restore it from a copy, or start a new run with model="
    assert fix in ended.err
    if file == "summary.json":
        path.unlink()
        finished(*words, "resume=auto")
        assert summary(folder / "run")["status"] == "done"


def test_a_config_that_was_cut_is_named_with_what_to_do(folder: Path) -> None:
    words = ("sft", *SFT, "task=sort", "run_dir=run")
    finished(*words)
    (folder / "run" / "config.yaml").write_text("")
    ended = novarl(*words, "resume=auto", "steps=2")
    assert ended.code == 2 and "run/config.yaml: the file is empty (restore it from a copy, or delete it" in ended.err
    (folder / "run" / "config.yaml").unlink()
    finished(*words, "resume=auto", "steps=2")
    assert "steps: 2" in (folder / "run" / "config.yaml").read_text()


@pytest.mark.parametrize("write", [1, 2])
def test_a_kill_while_metadata_is_written_leaves_the_old_file_or_the_new_one(write: int, folder: Path) -> None:
    """config.yaml, on the first start and on resume."""

    class Killed(BaseException):
        pass

    real = Disk.write

    def torn(disk: Disk, path: Path, data: bytes) -> None:
        if "config.yaml" in path.name:
            real(disk, path, data[:20])
            raise Killed
        real(disk, path, data)

    words = ("sft", *SFT, "task=sort", "run_dir=run")
    if write == 2:
        finished(*words)
    held = (folder / "run" / "config.yaml").read_bytes() if write == 2 else None
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Disk, "write", torn)
        novarl(*words, "resume=auto", "steps=2")
    file = folder / "run" / "config.yaml"
    assert (file.read_bytes() if file.exists() else None) == held
    finished(*words, "resume=auto", "steps=2")
    assert "steps: 2" in file.read_text()


# -------------------------------------------------------------------------------------------------- how a run is named


def test_the_link_to_the_latest_run_can_be_resumed(folder: Path) -> None:
    finished(*COMMANDS["rl on rows"])
    latest = folder / "runs" / "latest"
    (run,) = (folder / "runs").glob("rl-*")
    finished(*COMMANDS["rl on rows"], "run_dir=runs/latest", "resume=auto", "steps=2")
    assert latest.is_symlink() and latest.resolve() == run and len(metrics(run)) == 2
    assert summary(run)["paths"]["run_dir"] == f"runs/{run.name}"
    finished(*COMMANDS["rl on rows"], "resume=runs/latest/checkpoints/latest", "steps=3")
    assert latest.resolve() == run and len(metrics(run)) == 3
    again = novarl(*COMMANDS["rl on rows"], "run_dir=runs/latest")
    assert again.code == 2 and "the directory already contains a run" in again.err


@pytest.mark.parametrize("target", ["/etc", "mine", "../elsewhere", "gone", None])
def test_a_link_that_somebody_else_made_stays(target: str | None, folder: Path) -> None:
    (folder / "runs" / "mine").mkdir(parents=True)
    latest = folder / "runs" / "latest"
    latest.symlink_to(target) if target else latest.mkdir()
    for name in ("a", "b"):
        finished(*COMMANDS["rl on rows"], f"run_dir=runs/{name}")
    assert (os.readlink(latest) if target else latest.is_dir() and not list(latest.iterdir())) == (target or True)


def test_the_link_follows_the_newest_run_also_when_its_run_was_removed(folder: Path) -> None:
    for name in ("a", "b"):
        finished(*COMMANDS["rl on rows"], f"run_dir=runs/{name}")
        assert (folder / "runs" / "latest").resolve().name == name
        shutil.rmtree(folder / "runs" / name)


@pytest.mark.parametrize("name", [".", "./", "../inner", "sub/..", "sub/../"])
def test_the_current_directory_can_be_the_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "inner" / "sub").mkdir(parents=True)
    monkeypatch.chdir(folder / "inner")
    finished("sft", *SFT, "task=sort", f"run_dir={name}")
    finished("sft", *SFT, "task=sort", f"run_dir={name}", "resume=auto", "steps=2")
    assert len(metrics(folder / "inner")) == 2 and not os.path.lexists(folder / "inner" / "sub" / "latest")
    assert not os.path.lexists(folder / "inner" / "latest")


@pytest.mark.parametrize(
    ("target", "said"), [("loop", "is circular"), ("/gone/run", "points to /gone/run, which does not exist")]
)
def test_a_run_dir_that_is_a_link_to_nothing(target: str, said: str, folder: Path) -> None:
    (folder / "loop").symlink_to(target)
    ended = novarl("sft", *SFT, "task=sort", "run_dir=loop")
    assert (ended.code, ended.err) == (
        2,
        f"novarl: run_dir=loop: run_dir is a link that {said} (use the directory itself)\n",
    )


def test_a_summary_counts_rollouts_that_failed_and_sees_that_none_differ(folder: Path) -> None:
    """Over the whole run, however often it was stopped and however many updates a step has."""
    (folder / "some.py").write_text(
        "def lazy(completions, **columns):\n"
        "    return [None if i % 4 == 0 else 1.0 for i in range(len(completions))]\n"
        "def digits(completions, **columns):\n"
        "    return [float(sum(map(ord, text)) % 7) for text in completions]\n"
    )
    words = ("rl", *RL, "data=rows.jsonl", "algo=ppo_clip", "updates_per_rollout=2", "responses_per_prompt=4")
    finished(*words, "reward=some.py:lazy", "prompts_per_rollout=2", "steps=1", "run_dir=run")
    finished(*words, "reward=some.py:lazy", "prompts_per_rollout=2", "steps=3", "run_dir=run", "resume=auto")
    per_step = {row["step"]: row for row in metrics(folder / "run")}
    failed = sum(row["failed_rollouts"] for row in per_step.values())
    assert failed > 0
    assert summary(folder / "run")["rollouts"] == {"sampled": 24, "failed": failed, "flat": True}
    finished(*words, "reward=some.py:digits", "prompts_per_rollout=2", "steps=2", "run_dir=other")
    differ = [row["zero_variance_groups"] < row["groups_kept"] for row in metrics(folder / "other")]
    assert summary(folder / "other")["rollouts"] == {"sampled": 16, "failed": 0, "flat": not differ[-1]}
    assert any(differ), "rewards that never differ show nothing"


@pytest.mark.parametrize("lacking", ["locks", "the right to read"])
def test_a_directory_that_cannot_be_locked_holds_runs_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    open_file = os.open

    def refuse_directories(path: Any, *arguments: Any, **options: Any) -> int:
        if isinstance(path, Path) and path.is_dir():
            raise PermissionError(13, "Permission denied")
        return open_file(path, *arguments, **options)

    def no_locks(number: int, operation: int) -> None:
        raise OSError(9, "Bad file descriptor")

    if lacking == "locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    else:
        monkeypatch.setattr(os, "open", refuse_directories)
    finished("sft", *SFT, "task=sort", "run_dir=run", "steps=1")
    finished("sft", *SFT, "task=sort", "run_dir=run", "resume=auto", "steps=2")
    assert len(metrics(folder / "run")) == 2


def test_the_speed_of_a_step_is_that_of_all_its_updates(folder: Path) -> None:
    words = ("rl", *RL, "data=rows.jsonl", "algo=ppo_clip", "updates_per_rollout=2", "reward=lexical", "steps=3")
    finished(*words, "run_dir=run")
    rows = metrics(folder / "run")
    assert [("tokens_per_second" in row, "episodes_per_second" in row) for row in rows] == [
        (last, last) for _ in range(3) for last in (False, True)
    ]
    for first, last in zip(rows[::2], rows[1::2], strict=True):
        seconds = first["time/step_s"] + last["time/step_s"]
        assert last["tokens_per_second"] == pytest.approx(last["completion_tokens"] / seconds)
        assert last["episodes_per_second"] == pytest.approx(last["episodes"] / seconds)
