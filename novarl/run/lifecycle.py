"""The lifecycle of a training run, shared by RL, SFT, DPO and reward models.

`Run` drives a `Training`, which `compose` creates: it opens the directory, writes the common files, goes through the
phases, and yields the record of each update, so that the caller may stop between updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from novarl.core.bus import Bus
from novarl.core.checkpoint import Checkpoints
from novarl.core.event_loop import EventLoop
from novarl.core.types import Engine, Record, Update
from novarl.data.rows import Rows
from novarl.distributed.ranks import Ranks
from novarl.distributed.shard import gather
from novarl.loops.evaluate import Evaluation
from novarl.loops.state import LoopState
from novarl.models.forward import attention_of, modules_of
from novarl.models.load import Policy, save
from novarl.observe.trackers.registry import notes
from novarl.run.fingerprint import fingerprint
from novarl.run.interrupts import Interrupts, Stopped
from novarl.run.machine import flush_denormals, start
from novarl.run.publish import link
from novarl.run.report import finish, open_sinks
from novarl.run.resume import Opened, open_run
from novarl.run.session import Session, Snapshot
from novarl.run.settings import RunSettings


@dataclass(frozen=True, slots=True)
class Machine:
    """The environment of a run, before anything is loaded."""

    device: torch.device
    ranks: Ranks
    opened: Opened
    loop: EventLoop


@dataclass(slots=True)
class Phase:
    """A loop of `steps` steps and the state for its checkpoints. The `last` phase is evaluated and saved at its end."""

    name: str
    loop: Iterator[Record]
    state: LoopState
    steps: int
    snapshot: Snapshot
    prefix: str = "step"
    last: bool = True


class Training(ABC):
    """The parts of one kind of run. Creating one writes nothing, so an invalid configuration leaves no files behind."""

    policy: Policy
    rows: Rows[Any]
    steps: int
    engine: Engine
    """The engine that generates answers."""
    longest: int
    """Tokens that an answer may have."""
    loop_state: LoopState

    @property
    @abstractmethod
    def notes(self) -> Sequence[str]:
        """Notes that are printed when the run starts."""

    def write_model(self, folder: Path) -> None:
        """Write the current model to a folder that other tools can load."""
        save(self.policy, folder)

    @abstractmethod
    def begin(self, session: Session) -> None:
        """Write and compute whatever this kind of run needs before its first phase."""

    @abstractmethod
    def phases(self, session: Session) -> Iterator[Phase]:
        """The phases in order. Code between two yields runs between the phases."""

    @property
    @abstractmethod
    def evaluate(self) -> Callable[[], Evaluation] | None:
        """Evaluates the model on held-out rows; None if there are none."""

    @abstractmethod
    def show(self, session: Session, found: Evaluation | None) -> None:
        """Write samples.md and figures of a completed run."""

    @abstractmethod
    def entries(self, session: Session) -> Mapping[str, Any]:
        """Additional entries of summary.json, also for a stopped run."""

    def publish(self) -> None:
        """Have `engine` sample from the weights of this moment. All ranks call it."""
        link(self.policy.model, self.engine)(self.loop_state.update)

    def manifest(self) -> Mapping[str, Any]:
        """Additional entries of manifest.json."""
        return {}

    def about(self) -> Mapping[str, Any]:
        """Additional fields of the start event."""
        return {}

    def facts(self) -> Mapping[str, Any]:
        """Additional facts in the checkpoints."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """End processes and tasks."""


class Run:
    """One run: an iterator over the records of its updates, which are the same on every rank. `summary` is None until
    the run has ended. `close` on an unfinished run writes a checkpoint to resume from, then calls the given `close`."""

    def __init__(
        self, settings: RunSettings, prepare: Callable[[Machine], Training], *, close: Callable[[], None] | None = None
    ) -> None:
        self.settings, self._prepare = settings, prepare
        self.interrupts = Interrupts()
        self.training: Training | None = None
        self.session: Session | None = None
        self.summary: dict[str, Any] | None = None
        self._open = ExitStack()
        if close is not None:
            self._open.callback(close)
        self._records = self._drive()

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        try:
            self.prepare()
            with self.interrupts:  # not while the caller runs its own code
                return next(self._records)
        except StopIteration:
            raise
        except BaseException:
            self._open.close()
            raise

    def finish(self) -> dict[str, Any]:
        """Run to the end and return the contents of summary.json. Its `status` is "done", "stopped" (by a signal) or
        "unsaved" (the last checkpoint could not be written)."""
        self.prepare()
        with self.interrupts:
            for _ in self:
                pass
        assert self.summary is not None
        return self.summary

    def close(self) -> None:
        """Save an unfinished run and end its processes."""
        try:
            self._records.close()
        finally:
            self._open.close()

    def prepare(self) -> tuple[Training | None, Session | None]:
        """Load and check everything; nothing is written yet. Returns no training if the run is already complete."""
        if self.training is not None or self.summary is not None:
            return self.training, self.session
        settings = self.settings
        device, ranks = start(settings.device, settings.threads, settings.seed)
        self._open.callback(ranks.stop)
        opened = open_run(settings, ranks)
        self.rundir = opened.rundir
        self._open.callback(opened.rundir.release)
        if settings.steps is not None and self._finished(opened, settings.steps):
            return None, None
        self.loop = EventLoop(flush_denormals)
        self._open.callback(self.loop.close)
        training = self._prepare(Machine(device, ranks, opened, self.loop))
        self._open.callback(training.close)
        if settings.steps is None and self._finished(opened, training.steps):
            return None, None
        self.training = training
        self.session = Session(
            rundir=opened.rundir,
            ranks=ranks,
            bus=Bus(),
            interrupts=self.interrupts,
            checkpoints=Checkpoints(opened.rundir.path / "checkpoints", keep=settings.keep),
            write_model=training.write_model,
            gather_model=lambda: gather(training.policy.model),
            save_every=settings.save_every,
            eval_every=settings.eval_every,
            keep_best=settings.keep_best,
        )
        self._open.callback(self.session.bus.close)
        self._opened = opened
        return self.training, self.session

    def _finished(self, opened: Opened, steps: int) -> bool:
        self.summary = opened.finished(self.settings.kind, steps=steps, model=self.settings.model)
        if self.summary is not None:
            opened.rundir.release()
        return self.summary is not None

    def _drive(self) -> Generator[Update, None, None]:
        training, session = self.prepare()
        if training is None or session is None:
            return
        status, found, phase = "stopped", None, None
        try:
            self._begin(training, session)
            for phase in training.phases(session):
                session.enter(phase.name, phase.snapshot, prefix=phase.prefix, steps=phase.steps, done=phase.state.step)
                if phase.last and phase.state.step > phase.steps:
                    done = f"This run has already trained for {phase.state.step} steps"
                    session.bus.event("alert", message=f"{done}; with steps={phase.steps} there is nothing to train.")
                judge = training.evaluate if phase.last else None
                if judge is not None and "before" not in session.facts:
                    session.note("before", judge(), phase.state.step)
                yield from session.follow(phase.loop, phase.state, judge)
                if phase.last:
                    session.save(phase.state)
                    if judge is not None:
                        found = judge()
                        session.note("after", found, phase.state.step)
            training.show(session, found)
            status = "done"
        except Stopped:
            pass
        except GeneratorExit:  # the caller stopped early
            if phase is None:
                raise
            session.save(phase.state)
            session.stop_at(phase.state)
            self.summary = self._finish(training, session, status)
            raise
        self.summary = self._finish(training, session, status)
        session.rundir.release()

    def _finish(self, training: Training, session: Session, status: str) -> dict[str, Any]:
        entries = {"status": status, **training.entries(session)}
        return finish(session, {**entries, "from_python": True} if self.settings.from_python else entries)

    def _begin(self, training: Training, session: Session) -> None:
        """Create the directory, the manifest and the sinks."""
        settings, policy, state = self.settings, training.policy, self._opened.state
        device = next(policy.model.parameters()).device
        manifest = {
            "kind": settings.kind,
            "seed": settings.seed,
            "threads": torch.get_num_threads(),
            "ranks": session.ranks.size,
            "device": str(device),
            "model": fingerprint(policy),
            "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
            "rows": training.rows.summary(),
            **training.manifest(),
        }
        session.begin(self._opened, state, manifest, settings.text)
        if session.ranks.rank == 0:
            session.bus.sinks += open_sinks(
                session, console=settings.console, tensorboard=settings.tensorboard, tracking=settings.tracking
            )
        session.announce(
            [*self._opened.notes, *policy.notes(), *training.notes, *notes(settings.tracking.names)],
            device=str(device),
            seed=settings.seed,
            model=settings.model,
            **training.about(),
            attention=attention_of(policy.model),
            modules=modules_of(policy.model),
        )
        if state is None:
            training.rows.report(session.bus)
            session.facts |= {**training.rows.facts(), "model": settings.model, **training.facts()}
        training.begin(session)
