"""Enhanced RL2's `ExperimentTracker` (`RL2/experiment_tracking.py`) over a run directory and the tracker sinks."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from novarl.core.config_files import dump
from novarl.core.errors import NovaError, visible
from novarl.core.rundir import RunDir
from novarl.core.version import VERSION
from novarl.observe.trackers.redact import redacted
from novarl.observe.trackers.registry import Tracking, check, notes, open_trackers
from novarl.observe.trackers.sink import TrackerSink
from novarl.observe.writer import RunWriter


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """The settings of an `ExperimentTracker`, which takes them as keyword arguments too."""

    experiment_name: str = "experiment"
    run_name: str | None = None
    enable_mlflow: bool = False
    enable_wandb: bool = False
    enable_trackio: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    run_dir: str | Path | None = None


class ExperimentTracker:
    """Records an experiment in a run directory (`path`), and in MLflow, W&B or trackio.

    A tracker that is missing or fails is reported on stderr in one line and never raises.
    """

    def __init__(self, experiment_name: str | ExperimentConfig = "experiment", **settings: Any) -> None:
        if isinstance(experiment_name, ExperimentConfig):
            config = experiment_name
        else:
            known = ExperimentConfig.__dataclass_fields__
            if unknown := sorted(set(settings) - set(known)):
                fix = f"one of {', '.join(known)}"
                raise NovaError(f"unknown argument {unknown[0]!r}", where="ExperimentTracker", fix=fix)
            config = ExperimentConfig(experiment_name, **settings)
        self.config = config
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.path = Path(config.run_dir or f"runs/{config.experiment_name}-{stamp}")
        self.params: dict[str, Any] = dict(config.params)
        self._writer = RunWriter(self.path, writer=f"novarl.compat {VERSION}", config=self.params)
        self._sinks: list[TrackerSink] | None = None
        self._step = 0

    def log_params(self, params: Mapping[str, Any]) -> None:
        """Record hyperparameters, before the first metrics."""
        self.params |= params
        RunDir(self.path).write_text("config.yaml", dump(self.params))
        if self._sinks:
            _say("log_params came after the first record: the parameters are in config.yaml, but not in the trackers")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record numbers at a step (default: one more than the last)."""
        self._step = self._step + 1 if step is None else step
        try:
            values = {name: float(value) for name, value in metrics.items()}
        except (TypeError, ValueError) as error:
            raise NovaError(f"not a number: {error}", where="log_metrics", fix="use log_text for text") from None
        self._writer.step(self._step, values)
        for sink in self._open():
            sink.step(self._step, values)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Record a table; the run directory has it as an event of kind `table`."""
        clean = [list(redacted(list(row))) for row in rows]
        self._writer.event("table", name=name, columns=list(columns), rows=clean)
        for sink in self._open():
            sink.table(name, list(columns), clean)

    def log_text(self, name: str, text: str) -> None:
        """Record a text, as the file `texts/<name>.txt` of the run directory."""
        file = self.path / "texts" / f"{Path(name).name}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text(str(redacted(text)), encoding="utf-8", errors="backslashreplace")
        for sink in self._open():
            sink.artifact(file, file.stem)

    def log_artifact(self, path: str | Path, name: str | None = None) -> None:
        """Store a file or folder in the trackers."""
        file = Path(path)
        if not file.exists():
            raise NovaError("no such file", where=f"log_artifact {path}", fix="write it first")
        self._writer.event("artifact", path=str(file))
        for sink in self._open():
            sink.artifact(file, name or file.stem)

    def finish(self, status: str = "done") -> None:
        """End the experiment: `done`, `stopped` or `failed`. Waits for the trackers, within their limits."""
        for sink in self._open():
            sink.event("summary", {"status": status})
            sink.close()
        self._writer.close(status)

    def _open(self) -> list[TrackerSink]:
        """The trackers, started with the parameters so far."""
        if self._sinks is None:
            config = self.config
            chosen = {"mlflow": config.enable_mlflow, "wandb": config.enable_wandb, "trackio": config.enable_trackio}
            names = tuple(name for name, enabled in chosen.items() if enabled and _installed(name))
            for note in notes(names):
                _say(note)
            tracking = Tracking(names, config.experiment_name, config.run_name, config=self.params)
            self._sinks = open_trackers(tracking, self.path)
        return self._sinks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish("done" if kind is None else "failed")


def _installed(name: str) -> bool:
    try:
        check([name])
    except NovaError as error:
        _say(f"{error.what}, so the experiment is not recorded there ({error.fix})")
        return False
    return True


def _say(message: str) -> None:
    print(f"novarl: {visible(message)}", file=sys.stderr)
