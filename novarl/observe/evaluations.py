"""Reads the held-out rows of evaluations (`evals/step-NNNNNN.jsonl`) and sorts runs into sides for a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from novarl.core.errors import NovaError
from novarl.observe.run import LoadedRun
from novarl.observe.sinks.jsonl import read_lines

FREE = frozenset({"run_dir", "resume", "save_every", "keep", "keep_best", "log", "threads", "seed", "device"})
"""Settings in which the runs of one side may differ."""


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    """A held-out row: its greedy answer's `text` and `score` (None if it could not be scored), and the scores of
    further `samples`."""

    prompt_id: str
    prompt: str
    score: float | None
    text: str
    samples: tuple[float, ...]


def evaluated_steps(path: Path) -> list[int]:
    """The steps after which a run was evaluated."""
    names = (file.stem.removeprefix("step-") for file in (path / "evals").glob("step-*.jsonl"))
    return sorted(int(name) for name in names if name.isdigit())


def read_rows(path: Path, step: int | None = None) -> list[HeldOutRow]:
    """The held-out rows of the evaluation after `step` (default: the last one). NovaError if there is none."""
    steps = evaluated_steps(path)
    if not steps:
        fix = "score its model with novarl eval, and compare the directories of the evaluations"
        raise NovaError("the run has no scores of held-out rows (evals/)", where=str(path), fix=fix)
    step = steps[-1] if step is None else step
    if step not in steps:
        fix = f"evaluated after steps {', '.join(map(str, steps))}"
        raise NovaError(f"no evaluation after step {step}", where=str(path), fix=fix)
    file = path / "evals" / f"step-{step:06d}.jsonl"
    rows = [_row(line, f"{file}:{number}") for number, line in enumerate(read_lines(file), start=1)]
    if not rows:
        raise NovaError("no complete line", where=str(file), fix="restore the file from a copy")
    return rows


def _row(line: Mapping[str, Any], where: str) -> HeldOutRow:
    try:
        score, samples = line["score"], tuple(float(value) for value in line.get("samples") or ())
        row = HeldOutRow(
            str(line["prompt_id"]),
            str(line.get("prompt", "")),
            None if score is None else float(score),
            str(line.get("text", "")),
            samples,
        )
    except (KeyError, TypeError, ValueError) as error:
        what = f"not a held-out row ({type(error).__name__}: {error})"
        raise NovaError(what, where=where, fix="restore the file from a copy") from None
    if not all(math.isfinite(value) for value in (*samples, row.score or 0.0)):
        raise NovaError("a score is not a finite number", where=where, fix="restore the file from a copy")
    return row


@dataclass(frozen=True, slots=True)
class Side:
    """Runs of the same settings and different seeds."""

    runs: tuple[LoadedRun, ...]
    settings: Mapping[str, Any]
    step: int | None = None

    @property
    def names(self) -> str:
        return ", ".join(run.path.name or str(run.path) for run in self.runs)


def sides_of(groups: Sequence[Sequence[LoadedRun]]) -> list[Side]:
    """One side for each group of several runs; single runs are joined where their settings are equal but for the seed.
    If that joins all runs into one side, each is a side of its own."""
    sides: list[Side] = []
    for group in groups:
        settings = [flat(run) for run in group]
        if len(group) == 1 and (same := next((s for s in sides if _equal(s.settings, settings[0])), None)):
            sides[sides.index(same)] = Side((*same.runs, *group), same.settings)
        else:
            sides.append(Side(tuple(group), settings[0]))
    if len(sides) == 1 and len(groups) > 1:
        return [Side(tuple(group), flat(group[0])) for group in groups]
    return sides


def flat(run: LoadedRun) -> dict[str, Any]:
    """The settings of a run by dotted key; empty if the run has no config.yaml."""
    return dict(leaves(run.config)) if (run.path / "config.yaml").exists() else {}


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested mappings as dotted keys and values; empty mappings stay values."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return bool(first) and not differing(first, second)


def differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """The keys in which two sides differ, without those that may differ within one."""
    names = [*first, *(key for key in second if key not in first)]
    return [key for key in names if key.partition(".")[0] not in FREE and first.get(key) != second.get(key)]


@dataclass(frozen=True, slots=True)
class Paired:
    """The scores of two or more sides on the same prompts: `scores[side][run][prompt]`, and the samples behind them.
    `dropped` prompts have no score in some run."""

    prompts: tuple[str, ...]
    scores: tuple[tuple[tuple[float, ...], ...], ...]
    samples: tuple[tuple[tuple[tuple[float, ...], ...], ...], ...]
    dropped: int


def paired(sides: Sequence[Side], *, step: int | None = None, use_samples: bool = False) -> Paired:
    """The scores of the sides, in the order of the first run's prompts. NovaError if the prompts differ."""
    tables = [[_table(run, side.step if step is None else step) for run in side.runs] for side in sides]
    first, others = tables[0][0], [table for side in tables for table in side]
    for table, run in zip(others, (run for side in sides for run in side.runs), strict=True):
        _check_prompts(first, table, sides[0].runs[0].path, run.path)
    if use_samples:
        for table, run in zip(others, (run for side in sides for run in side.runs), strict=True):
            if any(not row.samples for row in table.values()):
                what, fix = "the evaluation has no samples", "evaluate with eval.k=4, or leave out --samples"
                raise NovaError(what, where=str(run.path), fix=fix)

    def value(row: HeldOutRow) -> float | None:
        return fmean(row.samples) if use_samples else row.score

    kept = [name for name in first if all(value(table[name]) is not None for table in others)]
    if not kept:
        raise NovaError("no prompt has a score in every run", where="compare", fix="see the errors in evals/")
    return Paired(
        tuple(kept),
        tuple(tuple(tuple(value(table[name]) or 0.0 for name in kept) for table in side) for side in tables),
        tuple(tuple(tuple(table[name].samples for name in kept) for table in side) for side in tables),
        len(first) - len(kept),
    )


def _table(run: LoadedRun, step: int | None) -> dict[str, HeldOutRow]:
    rows = read_rows(run.path, step)
    table = {row.prompt_id: row for row in rows}
    if len(table) < len(rows):
        what = f"{len(rows) - len(table)} held-out rows have a prompt_id that another row has"
        raise NovaError(what, where=str(run.path / "evals"), fix="give every row its own prompt_id")
    return table


def _check_prompts(first: Mapping[str, HeldOutRow], second: Mapping[str, HeldOutRow], left: Path, right: Path) -> None:
    same = sum(name in second and second[name].prompt == row.prompt for name, row in first.items())
    if same == len(first) == len(second):
        return
    what = f"evaluated on other prompts than {left}: {same} prompts are the same, of {len(second)} and {len(first)}"
    fix = "evaluate both on the same rows, such as with novarl eval data=test.jsonl, and compare those directories"
    raise NovaError(what, where=str(right), fix=fix)
