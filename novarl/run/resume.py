"""The run directory and the checkpoint to resume from."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from novarl.core.checkpoint import Checkpoint, Checkpoints, open_checkpoint
from novarl.core.errors import NovaError, visible
from novarl.core.rundir import RunDir
from novarl.distributed.ranks import Ranks
from novarl.observe.sinks.jsonl import read_lines
from novarl.run.changes import changes
from novarl.run.input_files import changed, digests
from novarl.run.settings import RunSettings


@dataclass
class Opened:
    """A run directory before anything is written, and the checkpoint to resume from."""

    rundir: RunDir
    checkpoint: Checkpoint | None
    notes: list[str]
    """Notes for the user: damaged checkpoints, changed settings and files."""
    files: dict[str, str] = field(default_factory=dict)
    """The sha256 of each input file."""

    @cached_property
    def state(self) -> dict[str, Any] | None:
        """The contents of the checkpoint, read once."""
        return self.checkpoint.load() if self.checkpoint else None

    def finished(self, phase: str, *, steps: int, model: str) -> dict[str, Any] | None:
        """The summary of a run of `model` that is complete, or None. A damaged or missing last checkpoint is written
        again."""
        summary = self.rundir.read_json("summary.json") if self.checkpoint else None
        if self.checkpoint is None or summary is None or summary.get("status") != "done":
            return None
        saved = self.checkpoint.outline()
        at_end = saved["phase"] == phase and saved["loop"]["step"] >= steps
        if not at_end or saved["facts"].get("model", model) != model:
            return None
        done = summary["steps"]
        said = f"The run is already complete after {done} step{'s' * (done != 1)}. To train longer: steps={2 * done}"
        print(visible(f"{self.rundir.path}: {said}"))
        for note in self.notes:
            print(visible(f"Note: {note} (no effect on a complete run)"))
        return summary


def open_run(settings: RunSettings, ranks: Ranks) -> Opened:
    """Find the directory and the checkpoint to resume from. Writes nothing except to complete an interrupted save.

    Without `resume`, a directory that holds a run is refused. `auto` resumes where the run stopped, or starts a new
    run; a path names one checkpoint, which must be complete and belong to the run in `run_dir`.
    """
    kind, run_dir, resume = settings.kind, settings.run_dir, settings.resume
    if resume not in (None, "auto"):
        checkpoint = open_checkpoint(Path(resume))
        homes = [RunDir.at(path.parent.parent) for path in (checkpoint.path.absolute(), checkpoint.path.resolve())]
        rundir = next((home for home in homes if home.holds_a_run()), homes[-1])
        home = rundir.path.resolve()
        if run_dir is not None and Path(run_dir).resolve() != home:
            raise NovaError(
                f"the checkpoint belongs to the run {home}",
                where=f"run_dir={run_dir}",
                fix="remove run_dir, or start a new run with model=<checkpoint>/model",
            )
        rundir = RunDir.at(run_dir) if run_dir else rundir
        if not rundir.holds_a_run():
            raise NovaError(
                "the checkpoint is not inside a run directory",
                where=f"resume={resume}",
                fix="move it back, or start a new run with model=<checkpoint>/model",
            )
        _check_kind(rundir, kind)
        with _claimed(rundir, ranks):
            _mend(rundir, ranks)
            return _resumed(settings, rundir, checkpoint, ranks)
    name = run_dir or f"runs/{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    rundir = RunDir.at(ranks.from_first(name))
    with _claimed(rundir, ranks):
        if resume is not None:
            return _newest(settings, rundir, ranks)
        rundir.refuse_if_taken()
        return Opened(rundir, None, [], _digests(settings, ranks))


def _newest(settings: RunSettings, rundir: RunDir, ranks: Ranks) -> Opened:
    """`resume=auto`: from the newest checkpoint that is whole."""
    rundir.refuse_strangers()
    _check_kind(rundir, settings.kind)
    found, troubles = _mend(rundir, ranks)
    if found is None and troubles:
        raise NovaError(
            f"no usable checkpoint ({troubles[0]})",
            where=f"run_dir={rundir.path}",
            fix="restore one, or start a new run in another run_dir",
        )
    if found is None and rundir.has_saved():
        raise _missing(rundir)
    if found is None:
        what = "has no checkpoint yet and starts over" if rundir.holds_a_run() else "does not exist yet and is started"
        return Opened(rundir, None, [f"resume=auto: the run {rundir.path} {what}"], _digests(settings, ranks))
    opened = _resumed(settings, rundir, open_checkpoint(found.path), ranks)
    why = f"Resuming from {found.path.name}, because a newer checkpoint is damaged"
    opened.notes[:0] = [f"{why}: {trouble}" for trouble in troubles]
    return opened


def _resumed(settings: RunSettings, rundir: RunDir, checkpoint: Checkpoint, ranks: Ranks) -> Opened:
    """A run to resume from `checkpoint`, with notes on changed settings and lost logs."""
    files = _digests(settings, ranks)
    others = [f"Resuming {change}" for change in changes(settings.values, rundir, settings.named_by_user)]
    others += changed((rundir.manifest() or {}).get("files", {}), files)
    return Opened(rundir, checkpoint, [*others, *_lost(rundir, checkpoint)], files)


def _digests(settings: RunSettings, ranks: Ranks) -> dict[str, str]:
    """Hashes of the input files, which may be large; only on the first rank, which records them."""
    return digests(settings.values) if ranks.rank == 0 else {}


def _mend(rundir: RunDir, ranks: Ranks) -> tuple[Checkpoint | None, list[str]]:
    """Complete an interrupted save. Returns the newest complete checkpoint, and why newer ones were skipped."""
    checkpoints = Checkpoints(rundir.path / "checkpoints", keep=1)
    return ranks.from_first(checkpoints.mend() if ranks.rank == 0 else (None, []))


def _missing(rundir: RunDir) -> NovaError:
    """The run has saved checkpoints but there are none; nothing may be cleared."""
    folder = rundir.path / "checkpoints"
    how = "is empty" if folder.is_dir() else "does not exist"
    if folder.is_symlink() and not folder.exists():
        how = f"is a link to {os.readlink(folder)}, which does not exist"
    return NovaError(
        f"the run has saved checkpoints, but {folder} {how}",
        where=f"run_dir={rundir.path}",
        fix="restore them (is the disk mounted?), or start a new run in another run_dir",
    )


def _lost(rundir: RunDir, checkpoint: Checkpoint) -> list[str]:
    """Notes on logs that are shorter than at the checkpoint. NovaError if a log cannot be read."""
    sizes = checkpoint.outline()["logs"]
    for _ in read_lines(rundir.path / "metrics.jsonl", most=sizes.get("metrics.jsonl", 0)):
        pass
    lost = rundir.lost_logs(sizes)
    return [lost] if lost else []


@contextmanager
def _claimed(rundir: RunDir, ranks: Ranks) -> Iterator[None]:
    """Nobody else may go on with the run from now on, unless this fails. Raises NovaError, on every rank."""
    if (taken := ranks.from_first(rundir.claim() if ranks.rank == 0 else None)) is not None:
        raise taken
    try:
        yield
    except BaseException:
        rundir.release()
        raise


def _check_kind(rundir: RunDir, kind: str) -> None:
    """Refuse to resume a run of another command, whose state might fit but mean something else."""
    held = (rundir.manifest() or {}).get("kind", kind)
    if held != kind:
        raise NovaError(
            f"the existing run is a novarl {held} run, but the command is novarl {kind}",
            where=f"run_dir={rundir.path}",
            fix=f"resume it with novarl {held}, or choose another run_dir",
        )
