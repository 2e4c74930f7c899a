"""Which trackers there are, and how a run opens them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError, nearest
from novarl.core.rundir import RunDir
from novarl.observe.evaluations import leaves
from novarl.observe.trackers.redact import redacted
from novarl.observe.trackers.sink import TrackerSink
from novarl.observe.trackers.tracker import About, Tracker

NAMES = ("trackio", "wandb", "mlflow")
FILE = "trackers.json"
"""The id under which trackers know the run, so that a resumed run continues there."""


@dataclass(frozen=True, slots=True)
class Tracking:
    """The trackers of a run. `config`: its settings, from which secrets are removed before anything is sent."""

    names: tuple[str, ...] = ()
    project: str = "novarl"
    run_name: str | None = None
    artifacts: bool = False
    config: Mapping[str, Any] | None = None


def check(names: Sequence[str]) -> None:
    """NovaError for an unknown tracker, or one whose library is not installed. Imports nothing."""
    for name in names:
        if name not in NAMES:
            raise NovaError(f"unknown tracker {name!r}", where="log.trackers", fix=nearest(name, NAMES))
        if importlib.util.find_spec(name) is None:
            raise NovaError(f"{name} is not installed", where="log.trackers", fix="pip install 'novarl[track]'")


def notes(names: Sequence[str], environment: Mapping[str, str] = os.environ) -> list[str]:
    """What the user should know before the run starts."""
    from novarl.observe.trackers.wandb_tracker import mode

    if "wandb" in names and "WANDB_MODE" not in environment and mode(environment) == "offline":
        how = "set WANDB_API_KEY, or upload it afterwards with wandb sync"
        return [
            f"W&B has no API key, so the run is recorded offline in {environment.get('WANDB_DIR', '.')}/wandb; {how}"
        ]
    return []


def open_trackers(
    tracking: Tracking, folder: Path, *, make: Callable[[str], Tracker] | None = None
) -> list[TrackerSink]:
    """A sink for each tracker of the run in `folder`."""
    if not tracking.names:
        return []
    directory = RunDir(folder)
    held = directory.read_json(FILE) or {}
    number = str(held.get("id") or uuid.uuid4().hex[:12])
    if not held:
        directory.write_json(FILE, {"id": number})
    config = redacted(dict(leaves(tracking.config or {})))
    manifest = redacted({f"manifest.{key}": value for key, value in leaves(directory.read_json("manifest.json") or {})})
    manifest["manifest.argv"] = redacted((directory.read_json("manifest.json") or {}).get("argv") or [], key="argv")
    about = About(
        project=tracking.project,
        name=tracking.run_name or folder.resolve().name,
        id=number,
        folder=folder,
        config=json.loads(json.dumps({**config, **manifest}, default=str)),
        resumed=bool(held),
    )
    build = make or _make
    return [TrackerSink(name, build(name), about, artifacts=tracking.artifacts) for name in tracking.names]


def _make(name: str) -> Tracker:
    module = importlib.import_module(f"novarl.observe.trackers.{name}_tracker")
    made: Tracker = getattr(module, f"{name.capitalize()}Tracker")()
    return made
