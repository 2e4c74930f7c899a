"""One run in progress: its directory, its reports and its checkpoints.

The loops yield after each update; a Session then reports, evaluates, saves and handles Ctrl-C.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from novarl.control.guards import AlarmGuard, Raised
from novarl.core import collector
from novarl.core.bus import Bus
from novarl.core.checkpoint import Checkpoints
from novarl.core.errors import NotFinite, visible
from novarl.core.rundir import FORMAT, RunDir, environment
from novarl.core.types import Record, Update
from novarl.distributed.ranks import Ranks
from novarl.loops.evaluate import Evaluation
from novarl.loops.state import LoopState
from novarl.observe.blame import blame
from novarl.observe.sinks.jsonl import read_lines, read_metrics
from novarl.observe.stability.ending import Finding, findings
from novarl.observe.stability.monitor import alert_fields
from novarl.observe.stability.rules import RULES
from novarl.observe.summary import rose
from novarl.run.held_out import write_rows
from novarl.run.interrupts import Interrupts, Stopped
from novarl.run.resume import Opened

_RSS_PER_MB = 1024**2 if sys.platform == "darwin" else 1024
"""The kernel reports resident memory in bytes on macOS, in KiB elsewhere."""
Snapshot = Callable[[], dict[str, Any]]


@dataclass(slots=True)
class Session:
    """A run in progress: its measurements so far, how often to save and evaluate, and the state for checkpoints."""

    rundir: RunDir
    ranks: Ranks
    bus: Bus
    interrupts: Interrupts
    checkpoints: Checkpoints
    write_model: Callable[[Path], None]
    gather_model: Callable[[], object] = lambda: None
    """What all ranks do before the first one calls `write_model`."""
    save_every: int | None = None
    eval_every: int | None = None
    keep_best: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    order: int = 0
    step_seconds: float = 0.0
    saved_order: int = -1
    better: tuple[int, float] = (-1, -math.inf)
    noted_saved: bool = False
    started: float = field(default_factory=time.perf_counter)
    snapshot: Snapshot = dict
    prefix: str = "step"
    phase: str = ""
    limit: str = "max_new_tokens"
    """The setting that truncates answers, in words."""
    usual_lr: float | None = None
    guard: AlarmGuard | None = None
    """Acts on alerts in the current phase."""
    stopped_after: str | None = None
    stopped_by: Raised | None = None
    """The alert for which the guard ended the run."""
    rewound: list[str] = field(default_factory=list)

    def begin(
        self, opened: Opened, state: Mapping[str, Any] | None, manifest: Mapping[str, Any], config_text: str
    ) -> None:
        """Create the directory, or truncate its logs to the checkpoint. Nothing is written before."""
        if state is not None and opened.checkpoint is not None:
            self.facts, self.order, self.noted_saved = dict(state["facts"]), opened.checkpoint.order, True
            self.saved_order = self.order
        collector.started()
        self.ranks.wait()  # until all ranks have checked the directory: a late rank would find this run in it
        if self.ranks.rank == 0:
            self.rundir.create()
            if state is not None and opened.checkpoint is not None:
                if aside := self.checkpoints.abandon(opened.checkpoint.order):
                    what = f"Resuming from {opened.checkpoint.path.name}; later checkpoints are moved aside"
                    self.rewound.append(f"{what}: {', '.join(sorted(aside))}")
                self.checkpoints.prune()
                self.rundir.cut_logs(state["logs"])
                self.rundir.note(saved=True, files=opened.files)
            else:
                self.rundir.clear_logs()
                self.rundir.write_json(
                    "manifest.json", {"format": FORMAT, **environment(), **manifest, "files": opened.files}
                )
            self.rundir.write_text("config.yaml", config_text)
        self.ranks.wait()

    def announce(self, notes: Sequence[str], **about: Any) -> None:
        """Report that the run starts or resumes, with its notes: the first events of its sinks."""
        self.bus.event("start", run_dir=str(self.rundir.path), **about)
        for note in (*notes, *self.rewound):
            self.bus.event("alert", message=note)

    def enter(self, name: str, snapshot: Snapshot, *, prefix: str, steps: int, done: int) -> None:
        """Start or re-enter a phase: checkpoints are now named `<prefix>-<step>` and contain `snapshot()`."""
        self.phase, self.prefix = name, prefix
        self.snapshot = lambda: {"phase": name, **snapshot()}
        self.bus.event("phase", name=name, steps=steps, done=done)

    def follow(
        self, loop: Iterator[Record], state: LoopState, evaluate: Callable[[], Evaluation] | None = None
    ) -> Iterator[Update]:
        """Yield each record of a loop after reporting it, and evaluating and saving if due. Raises Stopped."""
        self.step_seconds = 0.0 if state.pending is None else math.nan
        for record in self._watched(loop, state):
            whole = state.pending is None
            step = state.step if whole else state.step + 1
            record = {**record, "update": float(state.update)}
            if whole and "episodes" in record and ("rollouts" in self.facts or state.step == 1):
                self._count(record)
            if whole and evaluate is not None and self.eval_every and state.step % self.eval_every == 0:
                found = evaluate()
                self._write_rows(state.step, found)
                record = self._evaluated(record, found)
            reported = self._report(step, record, whole=whole)
            if whole and (self._best() is not None or (self.save_every and state.step % self.save_every == 0)):
                self.save(state)
            self.stopped_by = None if self.guard is None else self.guard.stop
            if any(self.ranks.gather(self.interrupts.wanted)) or self.stopped_by is not None:
                self.save(state)
                self.stop_at(state)
                raise Stopped
            yield reported

    def _watched(self, loop: Iterator[Record], state: LoopState) -> Iterator[Record]:
        """The records of a loop. A number that is not finite ends it with an alert, since its update has no record."""
        try:
            yield from loop
        except NotFinite as error:
            what = error.what[:1].upper() + error.what[1:]
            self.bus.event("alert", **alert_fields(RULES["nan"].alert(what, state.step + 1)))
            raise

    def stop_at(self, state: LoopState) -> None:
        """Record where the run was stopped."""
        self.stopped_after = f"{'warm-up ' * (self.prefix == 'warmup')}step {state.step}"

    def findings(self) -> list[Finding]:
        """Warning signs in the metrics of the current phase, from its first step on."""
        improved = rose(self.facts.get("before"), self.facts.get("after"))
        return findings(self._records(), improved=improved, limit=self.limit, usual_lr=self.usual_lr)

    def first_failure(self) -> str | None:
        """The error of the run's first failed rollout, with its place in the user's code."""
        if not self.facts.get("rollouts", {}).get("failed"):
            return None
        events = read_lines(self.rundir.path / "events.jsonl")
        return next((blame(str(event.get("error"))) for event in events if event["kind"] == "failed_rollout"), None)

    def first_and_last(self, *names: str) -> dict[str, list[float]]:
        """The first and last value of each metric in the phase; empty on ranks other than the first."""
        records = self._records()
        return {name: [records[0][name], records[-1][name]] for name in names if records}

    def _records(self) -> list[Record]:
        """The phase's metrics from its first step on; empty on ranks that do not write them."""
        self.bus.flush()
        log = self.rundir.path / "metrics.jsonl"
        if self.ranks.rank > 0 or not log.exists():
            return []
        return [record for record in read_metrics(log) if record.get("phase") == self.phase]

    def _count(self, record: Record) -> None:
        """Add a step's rollouts to the totals. `flat`: every group of several answers had identical rewards."""
        before = self.facts.get("rollouts", {"sampled": 0, "failed": 0})
        could = record["groups_kept"] < record["episodes"]
        self.facts["rollouts"] = {
            "sampled": before["sampled"] + int(record["episodes"]),
            "failed": before["failed"] + int(record["failed_rollouts"]),
            "flat": could and record["zero_variance_groups"] == record["groups_kept"],
        }

    def _evaluated(self, record: Record, found: Evaluation) -> Record:
        """The record with the evaluation. Remembers a new best score, if the best checkpoint is to be kept."""
        low, high = found.interval
        record = record | {
            "eval/score": found.score,
            "eval/score_low": low,
            "eval/score_high": high,
            "eval/n": float(found.n),
        }
        record |= {f"eval/pass_at_{k}": value for k, value in found.pass_at.items()}
        record |= {f"eval/{name}": value for name, value in found.measures().items()}
        if answers := [item.rollout for item in found.rows]:
            lengths = [sum(sum(sequence.mask) for sequence in answer.sequences) for answer in answers]
            record["eval/length_mean"] = fmean(lengths)
            record["eval/truncated_fraction"] = fmean(answer.status == "truncated" for answer in answers)
        if self.keep_best and found.score > self.facts.get("best", -math.inf):
            self.better = (self.order + 1, found.score)  # the update that is being reported
        return record

    def _best(self) -> float | None:
        """The score of the current weights if no saved ones are better; a failed save does not change it."""
        order, score = self.better
        return score if order == self.order else None

    def note(self, name: str, found: Evaluation, step: int) -> None:
        """Record and report a measurement at `step`, named "before" or "after"."""
        self.facts[name] = found.summary()
        self._write_rows(step, found)
        self.bus.event("eval", name=name, **found.summary())

    def _write_rows(self, step: int, found: Evaluation) -> None:
        if self.ranks.rank == 0:
            write_rows(self.rundir.path, step, found)

    def _report(self, step: int, record: Record, *, whole: bool) -> Update:
        """Send one update's record to the sinks with its stage times; the last update of a step also has the speed."""
        times = self.bus.take_times()
        seconds = sum(times.values())
        times["time/step_s"] = seconds
        self.step_seconds += seconds
        if whole and self.step_seconds > 0:  # unknown if the step started in an earlier process
            times["tokens_per_second"] = record.get("completion_tokens", record.get("tokens", 0.0)) / self.step_seconds
            if "episodes" in record:
                times["episodes_per_second"] = record["episodes"] / self.step_seconds
        self.step_seconds = 0.0 if whole else self.step_seconds
        times["memory_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _RSS_PER_MB
        if torch.cuda.is_initialized():
            times["memory_device_mb"] = torch.cuda.max_memory_allocated() / 2**20
        self.order += 1
        record = record | times
        self.bus.step(step, record)
        return {"phase": self.phase, "step": float(step), **record}

    def save(self, state: LoopState) -> bool:
        """Save now; True where it was written. A full disk is said, and the last good checkpoint is kept. All ranks
        compute what is saved, and the first one writes it."""
        if self.saved_order == self.order:
            return True
        self.gather_model()
        held = self.snapshot()
        best = self._best()
        facts = self.facts if best is None else {**self.facts, "best": best}
        name = f"{self.prefix}-{state.step:06d}" + (f"-update-{state.pending.used}" if state.pending else "")
        written = True
        if self.ranks.rank == 0:
            self.bus.flush()
            self.rundir.check_is_there()
            try:
                document = {**held, "facts": facts, "logs": self.rundir.log_sizes()}
                self.checkpoints.save(name, document, self.write_model, order=self.order, best=best is not None)
                self._note_saved()
            except OSError as error:
                self.rundir.check_is_there()
                written = False
                self.bus.event("save_failed", name=name, reason=str(error))
                kept = "the last good one is kept" if self.noted_saved else "there is no earlier one"
                what = f"novarl: checkpoint {name} could not be written ({error}); {kept}"
                print(visible(what), file=sys.stderr)
        written = self.ranks.from_first(written)
        if written:
            self.saved_order, self.facts = self.order, facts
        return written

    def _note_saved(self) -> None:
        """Record once, outside the checkpoint folder (which may get lost), that a checkpoint was saved."""
        if not self.noted_saved:
            with suppress(OSError):  # the next save tries again
                self.rundir.note(saved=True)
                self.noted_saved = True

    @contextmanager
    def drawing(self, what: str) -> Iterator[None]:
        """Report an error of plotting code instead of raising it, since the run itself has succeeded."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever a plot wants
            self.bus.event("alert", message=f"Could not draw {what} ({type(error).__name__}: {error})")

    def summarize(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Write summary.json, also for a stopped run."""
        summary = {"seconds": round(time.perf_counter() - self.started, 3), **entries}
        if self.stopped_after is not None:
            summary["stopped_after"] = self.stopped_after
        if self.stopped_by is not None:
            summary["stopped_by"] = {"alert": self.stopped_by.alert, "evidence": self.stopped_by.evidence}
        if self.ranks.rank == 0:
            self.rundir.write_json("summary.json", summary)
            self.bus.event("summary", **summary)
        return summary
