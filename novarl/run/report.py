"""The sinks of a run, and its summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.types import Sink
from novarl.observe.figures import draw
from novarl.observe.sinks.console import ConsoleSink
from novarl.observe.sinks.jsonl import JsonlSink
from novarl.observe.sinks.notebook import NotebookSink, in_notebook
from novarl.observe.sinks.tensorboard import TensorBoardSink
from novarl.observe.stability.monitor import Monitor
from novarl.observe.trackers.registry import Tracking, open_trackers
from novarl.observe.trackers.sink import TrackerSink
from novarl.run.session import Session


def open_sinks(session: Session, *, console: bool, tensorboard: bool, tracking: Tracking) -> list[Sink]:
    """The sinks of rank 0. metrics.jsonl and events.jsonl are always written, and alerts are always raised. The monitor
    is last, so that its alerts follow the metrics that raised them."""
    folder = session.rundir.path
    sinks: list[Sink] = [JsonlSink(folder)]
    if tensorboard:
        sinks.append(TensorBoardSink(folder / "tb"))
    if console:
        sinks.append(NotebookSink() if in_notebook() else ConsoleSink())
    sinks += open_trackers(tracking, folder)
    return [*sinks, Monitor(folder, session.bus.event, limit=lambda: session.limit)]


def finish(session: Session, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Draw the curves, list the files, and write and print the summary. Without the last checkpoint it is "unsaved"."""
    folder = session.rundir.path
    if session.saved_order != session.order:
        entries = {**entries, "status": "unsaved"}
    if session.ranks.rank != 0:
        return dict(entries)
    entries = {**entries, "findings": [finding._asdict() for finding in session.findings()]}
    if failure := session.first_failure():
        entries["first_failure"] = failure
    paths = {"run_dir": folder, "metrics": folder / "metrics.jsonl", "logs": folder / "logs" / "train.jsonl"}
    paths |= {"events": folder / "events.jsonl", "tensorboard": folder / "tb", "checkpoints": folder / "checkpoints"}
    model = folder / "checkpoints" / "latest" / "model"
    # A module of the user's own has weights there and no configuration: only its owner can make it again.
    paths["model" if (model / "config.json").exists() else "weights"] = model
    after = entries.get("after")
    if after and session.facts.get("best", float("-inf")) > after["score"]:
        paths["best"] = folder / "checkpoints" / "best" / "model"
    paths |= {"samples": folder / "samples.md", "rollouts": folder / "rollouts", "front": folder / "front.json"}
    with session.drawing("the curves"):
        draw(folder)
    paths["figures"] = folder / "figures"
    there = {name: str(path) for name, path in paths.items() if path.exists()}
    summary = session.summarize({**entries, "paths": there})
    for sink in session.bus.sinks:
        if isinstance(sink, TrackerSink) and (said := sink.conclude()):
            session.bus.event("alert", message=said)
    return summary


def check_end(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary of a completed run. NovaError if its last checkpoint could not be written or a guard stopped it;
    KeyboardInterrupt if a signal stopped it, after everything is saved."""
    if summary["status"] == "unsaved":
        raise NovaError(
            f"the checkpoint of step {summary['steps']} could not be written, so the last updates are lost",
            where=summary.get("paths", {}).get("run_dir"),
            fix="free disk space, then resume from the last checkpoint with resume=auto",
        )
    if cause := summary.get("stopped_by"):
        raise NovaError(
            f"the guard stopped the run after {summary['stopped_after']}; everything is saved. {cause['evidence']}",
            where=f"guard.on_alert.{cause['alert']}",
            fix="docs/stability.md says what to try; resume=auto continues, also with other settings",
        )
    if summary["status"] == "stopped":
        raise KeyboardInterrupt(f"stopped after {summary['stopped_after']}; everything is saved")
    return summary
