"""Reads a run directory without torch: metrics, events, rollouts and curves, also of a running or killed run.

run = novarl.load_run("runs/x")
run.metrics[-1]["reward_mean"]; run.metrics.to_pandas(); run.plot()
for row in run.rollouts(10):
    print(row.text, row.reward, row.advantages)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from novarl.core.config_files import read as read_settings
from novarl.core.errors import NovaError
from novarl.core.rundir import RunDir
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


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """One answer: its prompt, text and rewards; and for each sampled token what was known when it was learnt from.

    `tokens`, `behavior_logp` (under the policy that sampled), `old_logp` and `ref_logp` (of the policy and the
    reference before the step's first update), `values` and `advantages` have one entry for each token that the policy
    chose; they are empty for what was not learnt from (failed, a group that was left out), and where nobody computed
    them.
    """

    prompt_id: str
    prompt: str
    text: str
    answer: str | None
    reward: float | None
    rewards: dict[str, Any]
    status: str
    group: int
    index: int
    messages: list[dict[str, Any]]
    error: str | None
    tokens: tuple[int, ...] = ()
    behavior_logp: tuple[float, ...] = ()
    old_logp: tuple[float, ...] = ()
    ref_logp: tuple[float, ...] = ()
    values: tuple[float, ...] = ()
    advantages: tuple[float, ...] = ()

    @property
    def advantage(self) -> float | None:
        """The mean over its tokens; None if the answer was not trained on."""
        return sum(self.advantages) / len(self.advantages) if self.advantages else None


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
        return RunDir(self.path).manifest() or {}

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

    def rollouts(self, step: int) -> Rollouts:
        """The answers of a step. NovaError if the step was not logged."""
        stem = self.path / "rollouts" / f"step-{step:06d}"
        if not stem.with_suffix(".jsonl").is_file():
            kept = ", ".join(map(str, self.steps())) or "none"
            fix = f"logged steps: {kept}; see log.rollouts_every"
            raise NovaError(f"the rollouts of step {step} were not logged", where=str(self.path), fix=fix)
        lines = list(read_lines(stem.with_suffix(".jsonl")))
        tensors = stem.with_suffix(".safetensors")
        trained = _trained(lines, tensors) if tensors.is_file() else {}
        return Rollouts([_row(line, trained.get(place, {})) for place, line in enumerate(lines)])


def load_run(path: str | Path) -> LoadedRun:
    """The run in a directory. NovaError if there is none."""
    folder = Path(path).expanduser()
    if not any((folder / name).exists() for name in ("metrics.jsonl", "manifest.json", "summary.json")):
        what = "the directory contains no run" if folder.is_dir() else "no such directory"
        raise NovaError(what, where=str(path), fix="give a run directory, such as runs/latest")
    return LoadedRun(folder)


def _row(line: Mapping[str, Any], trained: Mapping[str, tuple[Any, ...]]) -> RolloutRow:
    messages = line["messages"]
    asked = next((message for message in messages if message.get("role") == "user"), messages[0] if messages else {})
    about: dict[str, Any] = {
        "prompt": str(asked.get("content", "")),
        "rewards": dict(line["rewards"]),
        "messages": messages,
        "error": line.get("error"),
        **{name: line.get(name) for name in ("prompt_id", "text", "answer", "reward", "status", "group", "index")},
        **trained,
    }
    return RolloutRow(**about)


NAMES = {
    "tokens": "tokens",
    "behavior_logp": "behavior_logp",
    "old_logp": "old_logp",
    "ref_logp": "ref_logp",
    "values": "values",
    "advantage": "advantages",
}


def _trained(lines: Sequence[Mapping[str, Any]], file: Path) -> dict[int, dict[str, tuple[Any, ...]]]:
    """The columns of each answer that was trained on, by line number. The batch has the answers in the order of the
    lines, without those that were excluded."""
    from safetensors.numpy import load_file

    batch = load_file(file)
    names = {column: name for column, name in NAMES.items() if column in batch}
    bounds, trajectory = batch["cu_seqlens"], batch["traj"]
    found: dict[int, dict[str, tuple[Any, ...]]] = {}
    for number, place in enumerate(_places(lines, batch)):
        columns: dict[str, list[Any]] = {name: [] for name in names.values()}
        for sequence in (trajectory == number).nonzero()[0]:
            span = slice(int(bounds[sequence]), int(bounds[sequence + 1]))
            chosen = batch["mask"][span]
            for column, name in names.items():
                columns[name] += batch[column][span][chosen].tolist()
        found[place] = {name: tuple(values) for name, values in columns.items()}
    return found


def _places(lines: Sequence[Mapping[str, Any]], batch: Mapping[str, Any]) -> Iterator[int]:
    """The line of each trajectory."""
    waiting: dict[tuple[int, bool], list[int]] = {}
    for place, line in enumerate(lines):
        if line["reward"] is not None:
            waiting.setdefault((line["group"], line["role"] == "baseline"), []).append(place)
    for group, baseline in zip(batch["group"].tolist(), batch["baseline"].tolist(), strict=True):
        yield waiting[group, bool(baseline)].pop(0)


def _columns(row: Any) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}
