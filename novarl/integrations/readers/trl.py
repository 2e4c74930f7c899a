"""TRL: `completions/completions_00001.parquet` (`log_completions=True`) and `trainer_state.json`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from novarl.core.errors import NovaError
from novarl.integrations.conversations import spoken
from novarl.integrations.names import TRL, TRL_HELD_OUT, translate
from novarl.integrations.readers.reading import Reading, Row, by_step, count, number, some, span, whole
from novarl.integrations.trl_logs import divided, kind_of

STATE = "trainer_state.json"
FIXED = ("step", "prompt", "completion", "advantage")


def recognises(source: Path) -> bool:
    """Whether `source` has answers or metrics of TRL."""
    return bool(_state(source)) or any(_has_columns(file) for file in _tables(source)[:1])


def read(source: Path) -> Reading:
    """The answers and the metrics in an output directory of TRL, or in one of its files."""
    found = Reading("trl")
    state = _state(source)
    rewards: dict[int, float] = {}
    names: list[str] | None = None
    if state is not None:
        logs = _read_state(state, found)
        names = sorted({name.split("/")[1] for log in logs for name in log if re.fullmatch("rewards/[^/]+/mean", name)})
        rewards = {log["step"]: log["reward"] for log in logs if isinstance(log.get("reward"), float)}
    else:
        found.absent.append(f"metrics: there is no {STATE}, which TRL saves with its checkpoints")
    tables = _tables(source)
    if tables:
        _read_tables(tables, found, names or None, rewards)
    elif found.kind == "rl":
        found.absent.append("answers: there is no completions/*.parquet, which TRL writes with log_completions=True")
    return found


def _state(source: Path) -> Path | None:
    """The newest trainer_state.json in an output directory, or the file itself."""
    if source.name == STATE and source.is_file():
        return source
    if (source / STATE).is_file():
        return source / STATE
    folder = source.parent if source.name == "completions" else source
    saved = [file for file in folder.glob(f"checkpoint-*/{STATE}") if re.fullmatch(r"checkpoint-\d+", file.parent.name)]
    return max(saved, key=lambda file: int(file.parent.name.removeprefix("checkpoint-")), default=None)


def _tables(source: Path) -> list[Path]:
    if source.suffix == ".parquet":
        return [source]
    return sorted([*source.glob("completions_*.parquet"), *source.glob("completions/completions_*.parquet")])


def _has_columns(file: Path) -> bool:
    return {"step", "prompt", "completion"} <= set(_table(file).schema.names)


def _table(file: Path) -> Any:
    import pyarrow.parquet
    from pyarrow import ArrowException

    try:
        return pyarrow.parquet.read_table(file)
    except (ArrowException, OSError) as error:
        raise NovaError(f"cannot be read ({error})", where=str(file), fix="give a complete Parquet file") from None


def _read_state(file: Path, found: Reading) -> list[dict[str, Any]]:
    """The log_history, in order; fills in the metrics."""
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        logs = [dict(log) for log in state["log_history"]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        what = f"not a state of a trainer ({type(error).__name__}: {error})"
        raise NovaError(what, where=str(file), fix="give the file of a checkpoint") from None
    kind, found.kind = kind_of(name for log in logs for name in log)
    for place, log in enumerate(logs):
        step = whole(log.get("step"), f"{file} log_history[{place}].step")
        parts = divided(log)
        if parts.training:
            line = translate(parts.training, TRL, "trl", kind)
            found.metrics[step] = found.metrics.get(step, {}) | line.metrics
            found.renamed |= line.renamed
        if parts.held_out:
            found.held_out[step] = found.held_out.get(step, {}) | translate(parts.held_out, TRL_HELD_OUT, "trl").metrics
        found.summary |= parts.totals
    found.config = {name: value for name, value in state.items() if isinstance(value, int | float | str)}
    found.read.append(
        f"{file.name}: {count(len(found.metrics), 'line')} of metrics, {count(len(found.held_out), 'evaluation')}"
    )
    found.absent.append("the settings of the trainer: TRL saves them in a format that can run code")
    if kind == "unknown":
        found.notes.append("which trainer wrote it is not recorded; its loss keeps the name trl/loss")
    if kind == "sft":
        found.notes.append("loss is taken as the cross-entropy, TRL's default; the loss_type is not recorded")
    if kind == "online":
        found.notes.append("whether GRPO or RLOO wrote it is not recorded; their kl and clip_ratio keep TRL's names")
    return logs


def _read_tables(
    files: Sequence[Path], found: Reading, names: Sequence[str] | None, means: Mapping[int, float]
) -> None:
    """The answers. `names` are the rewards, if the metrics name them; `means` the reward that TRL logged."""
    rows = [(place, row) for file in files for place, row in _rows(file)]
    numeric = [
        name
        for name in (rows[0][1] if rows else {})
        if name not in FIXED and all(_numeric(row[name]) for _, row in rows)
    ]
    chosen = [name for name in (numeric if names is None else names) if name in numeric]
    if names is None and len(chosen) > 1:
        found.notes.append(f"taken as rewards, because numeric: {some(chosen)}")
    answers = [(whole(row["step"], place), _answer(row, chosen)) for place, row in rows]
    sums = len(chosen) == 1 or _sums_are_logged(answers, means)
    for _, answer in answers:
        values = [value for value in answer["rewards"].values() if value is not None]
        answer["reward"] = sum(values) if sums and values else None
    if not sums:
        found.absent.append("reward: the weights of the rewards are not recorded, and their plain sum was not logged")
    found.rollouts = by_step(answers)
    if rows:
        answered = f"{count(len(rows), 'answer')}, {span(found.rollouts)}"
        found.read.append(f"{count(len(files), 'Parquet file')}: {answered}")
    found.absent.append("tokens and log-probabilities: TRL does not write them")


def _rows(file: Path) -> Iterator[tuple[str, Row]]:
    table = _table(file)
    if missing := {"step", "prompt", "completion"} - set(table.schema.names):
        fix = "give files that TRL wrote with log_completions=True"
        raise NovaError(f"the column {sorted(missing)[0]!r} is missing", where=str(file), fix=fix)
    for place, row in enumerate(table.to_pylist()):
        yield f"{file} row {place}", row


def _answer(row: Row, rewards: Sequence[str]) -> Row:
    return {
        **spoken(row["prompt"], row["completion"]),
        "rewards": {name: number(row[name], name) for name in rewards},
        "extra": {name: value for name, value in row.items() if name not in (*FIXED[:3], *rewards)},
    }


def _numeric(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _sums_are_logged(answers: Sequence[tuple[int, Row]], means: Mapping[int, float]) -> bool:
    """Whether the plain sums of the rewards have the means that TRL logged, so that all weights are 1."""
    steps: dict[int, list[float]] = {}
    for step, answer in answers:
        steps.setdefault(step, []).append(sum(value or 0.0 for value in answer["rewards"].values()))
    both = [step for step in steps if step in means]
    return bool(both) and all(math.isclose(fmean(steps[step]), means[step], abs_tol=1e-4) for step in both)
