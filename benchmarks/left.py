"""What a run has left in its directory, without what the clock, the machine and the place decide.

It is equal for two runs that are the same, whether they were stopped on the way or not.

Left out: metrics under `time/` and what the glossary does not call deterministic; timestamps, seconds, paths, host
names and process ids; of events, those that say that the run began, went on or was stopped (`start`, `phase`, `alert`,
`save_failed`); pictures, which show times; abandoned checkpoints are compared, unfinished ones are a difference.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from novarl.observe.glossary import deterministic

OF_THE_PROCESS = ("start", "phase", "alert", "save_failed")
"""Events that a run which was stopped has more of."""
CLOCK = frozenset({"timestamp", "seconds", "time", "argv", "code", "run_dir", "resume", "paths", "logs"})


def left(run: Path) -> dict[str, Any]:
    """Every file and link of a run by its name, as what two equal runs have in common."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run).as_posix()
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found |= _content(name, path)
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of the files in which two runs differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _content(name: str, path: Path) -> dict[str, Any]:
    if name.startswith("tb/"):
        return {"tb/": True}  # one file a process; its scalars are those of metrics.jsonl
    if name.startswith("figures/"):
        return {name: True}
    if path.suffix == ".jsonl" and not name.startswith("rollouts/"):
        rows = [json.loads(line) for line in path.read_text("utf-8", "surrogatepass").splitlines()]
        return {name: [_stable(row) for row in rows if row.get("kind") not in OF_THE_PROCESS]}
    if path.name == "MANIFEST":  # the digests of what is compared here, state.json's with its logs' sizes
        return {name: sorted(json.loads(path.read_text()))}
    if path.suffix == ".json" and "/model/" not in name:
        return {name: _stable(json.loads(path.read_text()))}
    if name == "config.yaml":
        lines = path.read_text().splitlines()
        return {name: [line for line in lines if not line.startswith(("run_dir:", "resume:"))]}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()}


def _stable(value: Any) -> Any:
    """Without the clock's fields; in the order of its keys, which is compared too."""
    if isinstance(value, Mapping):
        return [
            (key, _stable(item))
            for key, item in value.items()
            if key not in CLOCK and not key.startswith("time/") and deterministic(key)
        ]
    return [_stable(item) for item in value] if isinstance(value, list) else value
