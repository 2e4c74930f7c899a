"""Reads a run directory without torch: metrics, events, rollouts and curves, also of a running or killed run.

run = novarl.load_run("runs/x")
run.metrics[-1]["reward_mean"]; run.metrics.to_pandas(); run.plot()
for row in run.rollouts(10):
    print(row.text, row.reward, row.advantages)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from novarl.core.config_files import read as read_settings
from novarl.core.errors import NovaError
from novarl.core.rundir import FORMAT, RunDir
from novarl.observe.rollouts import RolloutRow, read_rollouts
from novarl.observe.sinks.jsonl import read_lines, read_metrics

if TYPE_CHECKING:
    import pandas

T = TypeVar("T")


class Table(Sequence[T], Generic[T]):
    """A sequence of rows; `to_pandas()` converts them to a DataFrame if pandas is installed."""

    def __init__(self, rows: Sequence[T]) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} rows)"

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a DataFrame. NovaError if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise NovaError("pandas is not installed", where="to_pandas", fix="pip install pandas") from error
        return pandas.DataFrame([row if isinstance(row, Mapping) else _columns(row) for row in self])


class Metrics(Table[dict[str, Any]]):
    """One dictionary per update, with `phase`, `step` and the metrics (docs/metrics.md)."""

    def series(self, name: str, phase: str | None = None) -> list[float]:
        """One metric over the updates that have it. NovaError if no update has it."""
        rows = [row for row in self if phase in (None, row.get("phase"))]
        found = [row[name] for row in rows if name in row]
        if not found:
            known = sorted({key for row in rows for key in row if isinstance(row[key], float)})
            raise NovaError(f"no update has the metric {name!r}", where="metrics", fix=f"one of {', '.join(known)}")
        return found


class Rollouts(Table[RolloutRow]):
    """The answers of one step."""


class LoadedRun:
    """The current contents of a run directory; every property reads it again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"LoadedRun({str(self.path)!r})"

    @property
    def summary(self) -> dict[str, Any] | None:
        """summary.json; None if the run has not ended or was killed."""
        return RunDir(self.path).read_json("summary.json")

    @property
    def config(self) -> Mapping[str, Any]:
        """config.yaml."""
        return read_settings(self.path / "config.yaml")[0]

    @property
    def manifest(self) -> Mapping[str, Any]:
        """manifest.json: versions, seed, device, files."""
        return RunDir(self.path).read_json("manifest.json") or {}

    @property
    def metrics(self) -> Metrics:
        """The metrics of every update so far."""
        file = self.path / "metrics.jsonl"
        return Metrics(list(read_metrics(file)) if file.exists() else [])

    @property
    def events(self) -> Table[dict[str, Any]]:
        """Events: saves, evaluations, alerts, failed rollouts."""
        file = self.path / "events.jsonl"
        return Table(list(read_lines(file)) if file.exists() else [])

    def plot(self) -> list[Path]:
        """Draw the curves, one PNG per phase in `figures/`, and return the paths."""
        from novarl.observe.figures import draw

        return draw(self.path)

    def steps(self) -> list[int]:
        """The steps whose rollouts were logged."""
        return sorted(int(file.stem.removeprefix("step-")) for file in (self.path / "rollouts").glob("step-*.jsonl"))

    def rollouts(self, step: int | None = None) -> Rollouts:
        """The answers of a step; None: of the last logged one. NovaError if the step was not logged."""
        logged = self.steps()
        if step is None and logged:
            step = logged[-1]
        if step not in logged:
            kept = ", ".join(map(str, logged)) or "none"
            what = "no rollouts were logged" if step is None else f"the rollouts of step {step} were not logged"
            raise NovaError(what, where=str(self.path), fix=f"logged steps: {kept}; see log.rollouts_every")
        stem = self.path / "rollouts" / f"step-{step:06d}"
        return Rollouts(read_rollouts(stem))


def load_run(path: str | Path) -> LoadedRun:
    """The run in a directory. NovaError if there is none."""
    folder = Path(path).expanduser()
    if not any((folder / name).exists() for name in ("metrics.jsonl", "manifest.json", "summary.json")):
        what = "the directory contains no run" if folder.is_dir() else "no such directory"
        raise NovaError(what, where=str(path), fix="give a run directory, such as runs/latest")
    run = LoadedRun(folder)
    written = run.manifest.get("format", FORMAT)
    if written != FORMAT:
        what = f"run directory format {written}; this version of NovaRL reads format {FORMAT}"
        raise NovaError(what, where=str(path), fix="upgrade NovaRL: pip install --upgrade novarl")
    return run


def _columns(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}
