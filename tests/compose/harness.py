"""Runs through the command line inside this process: what a user types, at a fraction of the cost of a new process."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from novarl import cli
from novarl.compose import preference, sft
from novarl.core import checkpoint, rundir
from novarl.core.processor import exact_products
from novarl.observe.sinks.jsonl import read_lines, read_metrics
from novarl.run import report
from novarl.tasks.task import Task

ROOT = Path(__file__).parents[2]
QUIET = ("log.console=false", "log.tensorboard=false")
RL = ("prompts_per_rollout=2", "responses_per_prompt=2", "rollout.max_tokens=4", "steps=1", "eval.n=2", *QUIET)
SFT = ("batch_size=2", "steps=1", "eval.n=2", *QUIET)
ON_TASK = ("task=sort", "warmup=2", *RL)
"""The smallest runs: a third of a second each on one thread."""
FEW = 40
"""Rows and demonstrations of a built-in task here; thousands would only take time."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def lightly() -> Iterator[pytest.MonkeyPatch]:
    """One thread, few rows, short samples, no picture, fsync or git; what a run sets in its process is put back."""
    threads, rows, demonstrations = torch.get_num_threads(), Task.rows, Task.demonstrations
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            patch.setenv(name, "1")
        patch.setenv("MKL_CBWR", os.environ.get("MKL_CBWR", exact_products()))
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setattr(Task, "rows", lambda self, split, n=None, seed=0: rows(self, split, n or FEW, seed))
        patch.setattr(Task, "demonstrations", lambda self, n=None, seed=0: demonstrations(self, n or FEW, seed))
        patch.setattr(report, "draw", lambda folder: [])
        patch.setattr(rundir, "_code_state", dict)
        patch.setattr(sft, "SHOWN_TOKENS", 4)
        patch.setattr(preference, "SHOWN_TOKENS", 4)
        patch.setattr(checkpoint.Disk, "sync", lambda self, path: None)
        try:
            yield patch
        finally:
            torch.set_num_threads(threads)


def novarl(*words: str) -> Ended:
    """Run a command, `lightly`. An error of ours, which the command line lets through, is raised here too."""
    out, err = io.StringIO(), io.StringIO()
    with lightly(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    return Ended(code, out.getvalue(), err.getvalue())


def finished(*words: str) -> Ended:
    """Run a command that must succeed."""
    ended = novarl(*words)
    assert ended.code == 0, ended.err
    return ended


def write_rows(file: Path, rows: Iterable[Any]) -> Path:
    """A JSONL file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def questions(count: int = 20) -> list[dict[str, str]]:
    """Rows that fit every purpose."""
    return [{"prompt": f"What is {i}?", "completion": f"It is {i}.", "answer": str(i)} for i in range(count)]


def snapshot(folder: Path) -> dict[str, str]:
    """Everything under a folder: the digest of each file, the target of each link."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def metrics(run: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run / "metrics.jsonl"))


def deterministic_metrics(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock decides."""
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")}
        for row in read_lines(run / "metrics.jsonl")
    ]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_lines(run / "events.jsonl") if row["kind"] == kind]


def notes(run: Path) -> list[str]:
    """`alerts` without those of the monitor, which have names."""
    named = {event["message"] for event in events(run, "alert") if "alert" in event}
    return [message for message in alerts(run) if message not in named]


def alerts(run: Path) -> list[str]:
    """What a run said should be known of it, but for the columns of `questions` that a run by rewards does not use."""
    said = [event["message"] for event in events(run, "alert")]
    return [message for message in said if not message.startswith("unused data columns: completion")]


def summary(run: Path) -> dict[str, Any]:
    """summary.json, read as strictly as other languages read JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    found: dict[str, Any] = json.loads((run / "summary.json").read_text(), parse_constant=refuse)
    return found


def weights(run: Path) -> dict[str, Tensor]:
    """The weights of the latest checkpoint."""
    return load_file(run / "checkpoints" / "latest" / "model" / "model.safetensors")


def largest_difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
