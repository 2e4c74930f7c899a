"""A disk that fills up, and a checkpoint that is torn: said, survived, and nothing else changed by it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from novarl.core import checkpoint
from novarl.core.checkpoint import Disk, damage
from novarl.observe.sinks import jsonl
from tests.compose.harness import (
    RL,
    deterministic_metrics,
    events,
    finished,
    notes,
    novarl,
    questions,
    summary,
    weights,
    write_rows,
)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", questions())


class FullDisk(Disk):
    """Without room for operation `name` (all of them where it is empty) of the saves in `saves`, counted from 1."""

    def __init__(self, name: str, saves: set[int]) -> None:
        self.name, self.saves, self.save = name, saves, 0

    def _room(self, name: str) -> None:
        if self.save in self.saves and self.name in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def produce(self, path: Path, writer: Callable[[Path], None]) -> None:
        self.save += path.name == "model"
        super().produce(path, writer)
        self._room(f"produce {path.name}")

    def write(self, path: Path, data: bytes) -> None:
        super().write(path, data[:10])
        if "checkpoints" in path.parts:
            self._room(f"write {path.name}")
        super().write(path, data)

    def rename(self, source: Path, target: Path) -> None:
        if "checkpoints" in target.parts:
            self._room(f"rename {target.name}")
        super().rename(source, target)


class SmallDisk(FullDisk):
    """Refuses in earnest: the operating system lets no file of those saves grow."""

    def produce(self, path: Path, writer: Callable[[Path], None]) -> None:
        self.save += path.name == "model"
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.save in self.saves:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            Disk.produce(self, path, writer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


THREE = (*RL, "reward=lexical", "steps=3", "save_every=1", "keep=3")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps, each saved, on a disk with room."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finished("rl", *THREE, f"data={write_rows(folder / 'rows.jsonl', questions())}", f"run_dir={folder / 'run'}")
    return folder / "run"


def same_run(run: Path, other: Path) -> bool:
    ours, theirs = weights(run), weights(other)
    return deterministic_metrics(run) == deterministic_metrics(other) and all(
        torch.equal(ours[name], theirs[name]) for name in theirs
    )


@pytest.mark.parametrize(
    ("disk", "operation"),
    [
        (FullDisk, "produce model"),
        (FullDisk, "produce tensors"),
        (FullDisk, "write state"),
        (FullDisk, "write MANIFEST"),
        (FullDisk, "rename step"),
        (FullDisk, "rename latest"),
        (SmallDisk, ""),
    ],
)
def test_a_disk_that_is_full_for_a_while(
    disk: type[FullDisk],
    operation: str,
    undisturbed: Path,
    tmp_path: Path,
    rows: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "DISK", disk(operation, {2}))
    run = tmp_path / "run"
    ended = finished("rl", *THREE, f"data={rows}", f"run_dir={run}")
    why = os.strerror(errno.ENOSPC if disk is FullDisk else errno.EFBIG)
    assert ended.err.startswith("novarl: checkpoint step-000002 could not be written (") and why in ended.err
    assert ended.err.endswith("; the last good one is kept\n") and ended.err.count("\n") == 1
    (event,) = events(run, "save_failed")
    assert event["name"] == "step-000002" and why in event["reason"]
    whole = {"step-000001", "step-000003"} | ({"step-000002"} if operation == "rename latest" else set())
    folder = run / "checkpoints"
    assert {path.name for path in folder.iterdir() if not path.is_symlink()} == whole
    assert os.readlink(folder / "latest") == "step-000003" and all(damage(folder / name) is None for name in whole)
    assert same_run(run, undisturbed), "it changed nothing else"
    assert summary(run)["status"] == "done"


@pytest.mark.parametrize(("saves", "left"), [({3, 4}, "step-000002"), ({2, 3, 4}, "step-000001"), ({1, 2, 3, 4}, None)])
def test_a_disk_that_is_full_at_the_end(
    saves: set[int],
    left: str | None,
    undisturbed: Path,
    tmp_path: Path,
    rows: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last save is tried twice; then the run is neither done nor lost: it goes on once there is room."""
    run = tmp_path / "run"
    words = ("rl", *THREE, f"data={rows}", f"run_dir={run}")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "DISK", FullDisk("produce", saves))
        ended = novarl(*words)
    *failures, last = ended.err.splitlines()
    assert ended.code == 2 and len(failures) == len(saves)
    assert last == (
        f"novarl: {run}: the checkpoint of step 3 could not be written, so the last updates are lost "
        "(free disk space, then resume from the last checkpoint with resume=auto)"
    )
    assert summary(run)["status"] == "unsaved"
    latest = run / "checkpoints" / "latest"
    assert (os.readlink(latest) if latest.is_symlink() else None) == left
    assert ("model" in summary(run)["paths"]) == (left is not None)
    finished(*words, "resume=auto")
    assert summary(run)["status"] == "done" and same_run(run, undisturbed)


def test_a_disk_that_has_room_again_at_the_end(
    undisturbed: Path, tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "DISK", FullDisk("produce", {3}))
    run = tmp_path / "run"
    ended = finished("rl", *THREE, f"data={rows}", f"run_dir={run}")
    assert ended.err.count("\n") == 1 and summary(run)["status"] == "done" and same_run(run, undisturbed)


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl"])
def test_a_disk_without_room_for_a_log(file: str, tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what happened can be written: stop, in one line."""
    write = jsonl._write

    def full(stream: Any, line: Any) -> None:
        if Path(stream.name).name == file and line["step"] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(stream, line)

    run = tmp_path / "run"
    words = ("rl", *THREE, f"data={rows}", f"run_dir={run}", "log.samples_every=1", "rollout.reward_timeout=5")
    with monkeypatch.context() as patch:
        patch.setattr(jsonl, "_write", full)
        ended = novarl(*words)
    assert ended.code == 2 and ended.err.count("\n") == 1 and "Traceback" not in ended.err
    assert (
        "No space left on device (free some space, then resume from the last checkpoint with resume=auto)" in ended.err
    )
    assert damage(run / "checkpoints" / "latest") is None


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")])
def test_memory_that_runs_out_where_nothing_can_be_split(
    error: Exception, tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimiser's state: one sentence, and the run goes on elsewhere from what it has saved."""

    def full(self: Any) -> None:
        raise error

    monkeypatch.setattr("novarl.learn.optim.Optimizer.step", full)
    ended = novarl("rl", *THREE, f"data={rows}", f"run_dir={tmp_path / 'run'}")
    assert ended.code == 2 and ended.err.count("\n") == 1 and "Traceback" not in ended.err
    assert ended.err.startswith("novarl: the run stopped: out of memory (") and "micro.max_tokens" in ended.err


def test_a_torn_checkpoint_is_passed_over_and_said(undisturbed: Path, tmp_path: Path, rows: Path) -> None:
    run = tmp_path / "run"
    words = ("rl", *THREE, f"data={rows}", f"run_dir={run}")
    finished(*words)
    torn = run / "checkpoints" / "step-000003" / "tensors.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    finished(*words, "resume=auto")
    (alert,) = notes(run)
    assert alert.endswith("step-000003: the checksum of tensors.safetensors does not match")
    assert damage(run / "checkpoints" / "step-000003") is None and same_run(run, undisturbed)
