"""`novarl runs`: the runs in a directory, the newest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from novarl.core.errors import wrapped
from novarl.observe.listing import Overview
from novarl.observe.sinks.gauge import clock_text
from novarl.observe.terminal.tables import ABSENT, table

HEAD = ("run", "what", "status", "steps", "score", "time")


def render_runs(runs: Sequence[Overview], folder: Path) -> str:
    """A table of the runs, and a sentence for each that cannot be read."""
    rows = [_row(run, folder) for run in runs]
    lines = table(HEAD, rows, right=(3, 4, 5))
    problems = [run.problem for run in runs if run.problem]
    for problem in problems:
        lines += ["", *wrapped(problem)]
    count = f"{len(runs)} run{'s' * (len(runs) != 1)}. Score: before -> last held-out score."
    return "\n".join([*lines, "", *wrapped(count)]) + "\n"


def _row(run: Overview, folder: Path) -> tuple[str, ...]:
    inside = run.path.relative_to(folder) if run.path != folder else Path(folder.name or str(folder))
    return (
        str(inside),
        " ".join(part for part in (run.kind, run.algo, run.subject) if part) or ABSENT,
        run.status,
        steps_text(run),
        score_text(run),
        ABSENT if run.seconds is None else clock_text(run.seconds),
    )


def steps_text(run: Overview) -> str:
    """`steps done/planned`, with the phase if it is a warm-up."""
    if run.steps is None:
        return ABSENT
    phase = "warm-up " if run.phase == "warmup" else ""
    return f"{phase}{run.steps}" + ("" if run.total is None else f"/{run.total}")


def score_text(run: Overview) -> str:
    """`before -> last`, three decimals each."""
    if run.before is None and run.after is None:
        return ABSENT
    before, after = (ABSENT if value is None else f"{value:.3f}" for value in (run.before, run.after))
    return after if run.kind == "eval" else f"{before} -> {after}"


def as_json(run: Overview) -> dict[str, Any]:
    """The run for `--json`."""
    found = asdict(run)
    del found["config"]
    return {**found, "path": str(run.path)}
