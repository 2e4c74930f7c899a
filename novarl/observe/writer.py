"""Writes a run directory (docs/run_directory.md) for training that happens elsewhere, in another library or a loop of
your own.

    with RunWriter("runs/x", writer="my trainer 1.0") as run:
        run.step(1, {"reward_mean": 0.5, "kl": 0.01})
        run.rollouts(1, [{"prompt": "2+2=", "text": "4", "reward": 1.0, "group": 0, "index": 0}])
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from novarl.core.errors import NovaError
from novarl.core.rundir import FORMAT, RunDir
from novarl.observe.rollouts import COLUMNS
from novarl.observe.sinks.jsonl import JsonlSink
from novarl.observe.stability.monitor import Monitor


class RunWriter:
    """Appends to the run directory `folder`. `writer` names the library and its version, `kind` is rl, sft, dpo or rm.

    Raises NovaError if the directory already holds a run, unless `extend` is True.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        writer: str,
        kind: str = "rl",
        steps: int | None = None,
        config: Mapping[str, Any] | None = None,
        manifest: Mapping[str, Any] | None = None,
        extend: bool = False,
    ) -> None:
        self.path = Path(folder).expanduser()
        self._directory = RunDir(self.path)
        if (self.path / "metrics.jsonl").exists() and not extend:
            raise NovaError("the directory already holds a run", where=str(folder), fix="choose another directory")
        self.path.mkdir(parents=True, exist_ok=True)
        entries = {"format": FORMAT, "writer": writer, "kind": kind, **(manifest or {})}
        self._directory.write_json("manifest.json", entries)
        if config is not None:
            import yaml

            plain = json.loads(json.dumps(dict(config), default=str))
            self._directory.write_text("config.yaml", yaml.safe_dump(plain, sort_keys=False))
        self._lines = JsonlSink(self.path)
        self._monitor = Monitor(self.path, self.event, limit=lambda: "the length limit")
        self.event("start", run_dir=str(self.path), writer=writer)
        self.event("phase", name=kind, steps=steps, done=0)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of one update, and the alerts that they raise (docs/stability.md). Names with a meaning in
        docs/metrics.md should have that meaning. Alerts about tokens need the step's rollouts before its metrics."""
        self._lines.step(step, metrics)
        self._monitor.step(step, {name: float(value) for name, value in metrics.items()})

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event."""
        self._lines.event(kind, fields)
        self._monitor.event(kind, fields)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the answers of a step, one mapping per answer, as in docs/run_directory.md.

        Raises NovaError for a per-token column that the format does not have, or of another length than the others.
        """
        rows = list(rows)
        for number, row in enumerate(rows):
            _check_columns(row.get("columns") or {}, f"rollouts, answer {number}")
        self._write("rollouts", step, rows)

    def evaluation(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the held-out rows of an evaluation after `step`, one mapping per row, as in docs/run_directory.md.

        Raises NovaError for a row without `prompt_id` or `score`.
        """
        rows = list(rows)
        for number, row in enumerate(rows):
            if missing := [name for name in ("prompt_id", "score") if name not in row]:
                where, fix = f"evaluation, row {number}", "give every row a prompt_id and a score (or null)"
                raise NovaError(f"{missing[0]} is missing", where=where, fix=fix)
        self._write("evals", step, rows)

    def _write(self, kind: str, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        folder = self.path / kind
        folder.mkdir(exist_ok=True)
        name = folder / f"step-{step:06d}.jsonl"
        text = "".join(json.dumps(dict(row), ensure_ascii=False, default=str) + "\n" for row in rows)
        name.with_suffix(".part").write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(name.with_suffix(".part"), name)

    def close(self, status: str = "done", **entries: Any) -> None:
        """Write summary.json; `status` is done, stopped or failed."""
        self._lines.close()
        self._directory.write_json("summary.json", {"status": status, "steps": self._lines.last_step, **entries})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("done" if kind is None else "failed")


def _check_columns(columns: Mapping[str, Any], where: str) -> None:
    known = set(COLUMNS.values())
    if unknown := sorted(set(columns) - known):
        what, fix = f"unknown column {unknown[0]!r}", f"one of {', '.join(sorted(known))}"
        raise NovaError(what, where=where, fix=fix)
    if len({len(column) for column in columns.values()}) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in columns.items())
        raise NovaError(f"columns of different lengths: {lengths}", where=where, fix="one value per generated token")
