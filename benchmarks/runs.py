"""Run the command line as a user would, in a process of its own, and read what it left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def novarl(*words: str, timeout: float | None = None, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    """`python -m novarl words...`; raises with the command's own words where it does not end with 0."""
    command = [sys.executable, "-m", "novarl", *words]
    done = subprocess.run(command, text=True, capture_output=quiet, timeout=timeout, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout or ''}\n{done.stderr or ''}")
    return done


def summary(run_dir: Path) -> dict[str, Any]:
    """summary.json of a run."""
    return json.loads((run_dir / "summary.json").read_text())


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
