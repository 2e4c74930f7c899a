"""The directory that a run writes, and the checkpoint that it goes on from."""

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
    """A run directory before anything was written: what it holds, and the checkpoint to go on from."""

    rundir: RunDir
    checkpoint: Checkpoint | None
    notes: list[str]
    """What whoever resumes should know: checkpoints that are damaged, settings and files that are others now."""
    files: dict[str, str] = field(default_factory=dict)
    """The sha256 of each file that the run learns from."""

    @cached_property
    def state(self) -> dict[str, Any] | None:
        """What the checkpoint holds, read once."""
        return self.checkpoint.load() if self.checkpoint else None

    def finished(self, phase: str, *, steps: int, model: str) -> dict[str, Any] | None:
        """The summary of a run of `model` that is resumed once more with nothing left to do, or None.

        Only where the checkpoint is that of the last step: one that was damaged or never written is made good.
        """
        summary = self.rundir.read_json("summary.json") if self.checkpoint else None
        if self.checkpoint is None or summary is None or summary.get("status") != "done":
            return None
        saved = self.checkpoint.outline()
        at_end = saved["phase"] == phase and saved["loop"]["step"] >= steps
        if not at_end or saved["facts"].get("model", model) != model:
            return None
        done = summary["steps"]
        said = f"this run is finished, after {done} step{'s' * (done != 1)}; to go on, give it more: steps={2 * done}"
        print(visible(f"{self.rundir.path}: {said}"))
        for note in self.notes:
            print(visible(f"Note: {note}, which changes nothing any more"))
        return summary


def open_run(settings: RunSettings, ranks: Ranks) -> Opened:
    """Find the directory and the checkpoint to resume from. Writes nothing but what an interrupted save left undone.

    Without `resume`, a directory that holds a run is refused. `auto` goes on where the run stopped, or starts afresh
    where none was ever written; a path names one checkpoint, which must be whole and belong to the run in `run_dir`.
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
                fix="leave run_dir out, or start a new run with model=<checkpoint>/model",
            )
        rundir = RunDir.at(run_dir) if run_dir else rundir
        if not rundir.holds_a_run():
            raise NovaError(
                "the checkpoint does not lie in the directory of a run",
                where=f"resume={resume}",
                fix="put it back, or start a new run with model=<checkpoint>/model",
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
            f"none of its checkpoints can be used ({troubles[0]})",
            where=f"run_dir={rundir.path}",
            fix="restore one, or start again in another run_dir",
        )
    if found is None and rundir.has_saved():
        raise _missing(rundir)
    if found is None:
        what = "has saved nothing to go on from, and starts anew" if rundir.holds_a_run() else "is new: none was there"
        return Opened(rundir, None, [f"resume=auto: the run {rundir.path} {what}"], _digests(settings, ranks))
    opened = _resumed(settings, rundir, open_checkpoint(found.path), ranks)
    why = f"resuming from {found.path.name}, because a checkpoint is damaged"
    opened.notes[:0] = [f"{why}: {trouble}" for trouble in troubles]
    return opened


def _resumed(settings: RunSettings, rundir: RunDir, checkpoint: Checkpoint, ranks: Ranks) -> Opened:
    """A run that goes on from `checkpoint`, with what has changed since and what of its logs was lost."""
    files = _digests(settings, ranks)
    others = [f"resuming {change}" for change in changes(settings.values, rundir, settings.named_by_user)]
    others += changed((rundir.manifest() or {}).get("files", {}), files)
    return Opened(rundir, checkpoint, [*others, *_lost(rundir, checkpoint)], files)


def _digests(settings: RunSettings, ranks: Ranks) -> dict[str, str]:
    """Of the files that the run learns from, on the first rank, which notes them: they may be large."""
    return digests(settings.values) if ranks.rank == 0 else {}


def _mend(rundir: RunDir, ranks: Ranks) -> tuple[Checkpoint | None, list[str]]:
    """Do what an interrupted save has left undone; the newest whole checkpoint, and why newer ones were passed over."""
    checkpoints = Checkpoints(rundir.path / "checkpoints", keep=1)
    return ranks.from_first(checkpoints.mend() if ranks.rank == 0 else (None, []))


def _missing(rundir: RunDir) -> NovaError:
    """The run says that it has saved checkpoints, and there are none: nothing of it may be cleared."""
    folder = rundir.path / "checkpoints"
    how = "is empty" if folder.is_dir() else "is not there"
    if folder.is_symlink() and not folder.exists():
        how = f"is a link to {os.readlink(folder)}, which is not there"
    return NovaError(
        f"the run has saved checkpoints, and {folder} {how}",
        where=f"run_dir={rundir.path}",
        fix="bring them back (is the disk mounted?), or start again in another run_dir",
    )


def _lost(rundir: RunDir, checkpoint: Checkpoint) -> list[str]:
    """What is said of logs that are not as the checkpoint knows them. NovaError: what is there cannot be read, so that
    nothing may be appended."""
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
    """Refuse to go on with a run of another command: its state would fit, and mean something else."""
    held = (rundir.manifest() or {}).get("kind", kind)
    if held != kind:
        raise NovaError(
            f"the run there is one of novarl {held}, and this is novarl {kind}",
            where=f"run_dir={rundir.path}",
            fix=f"continue it with novarl {held}, or choose another run_dir",
        )
