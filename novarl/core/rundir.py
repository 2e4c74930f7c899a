"""The run directory: the contract between training and every tool. Training writes it, tools only read it.

runs/<name>/
  config.yaml  manifest.json  summary.json
  metrics.jsonl  events.jsonl  logs/train.jsonl  tb/  rollouts/
  checkpoints/  reference/  base/  figures/  samples.md
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import novarl
from novarl.core import processor
from novarl.core.checkpoint import write_atomic
from novarl.core.errors import NovaError

LOGS = ("metrics.jsonl", "events.jsonl", "logs", "tb", "rollouts")
"""What grows while the run goes on, and is cut back to the checkpoint when it is resumed."""

WRITTEN = (
    *LOGS,
    *("checkpoints", "figures", "reference", "base"),
    *("config.yaml", "summary.json", "samples.md", "front.json"),
)
"""What a run writes beside its manifest, which comes first: found without one, it is somebody else's."""

FOREIGN = ("manifest.json", *WRITTEN, "config.json")
"""What stands in a directory that is somebody else's: also the folder of a model."""

_claims: dict[Path, int | None] = {}
"""The directories that this process works in, each with the open file that locks it, if it can be locked."""


def let_go() -> None:
    """Other processes may write to the directories that this one has claimed."""
    while _claims:
        if (number := _claims.popitem()[1]) is not None:
            os.close(number)


class RunDir:
    """One run's directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def holds_a_run(self) -> bool:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return "novarl" in json.loads((self.path / "manifest.json").read_text())
        return False

    def claim(self) -> NovaError | None:
        """Keep every other process from writing here until `let_go`, or this one's end; the error to raise where one is
        at work already."""
        place = self.path.resolve()
        if place in _claims or not place.is_dir():
            return None
        number = None
        try:
            number = os.open(place, os.O_RDONLY)
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert number is not None
            os.close(number)
            what, fix = "another process is writing this run", "wait for it, or end it"
            return NovaError(what, where=f"run_dir={self.path}", fix=fix)
        except OSError:  # not to be read, or on a file system without locks: nobody can know
            pass
        _claims[place] = number
        return None

    def create(self) -> None:
        """Make the directory, and point `latest` beside it here. A NovaError where it cannot be written, or another
        process has just done so."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            latest = self.path.parent / "latest"
            if latest.is_symlink() or not latest.exists():
                beside = latest.with_name(f".latest.{os.getpid()}")
                beside.unlink(missing_ok=True)
                beside.symlink_to(self.path.name)
                os.replace(beside, latest)
        except OSError as error:
            raise NovaError(
                f"cannot write there: {error.strerror}", where=f"run_dir={self.path}", fix="choose another run_dir"
            ) from None
        if self.path.resolve() not in _claims:  # it was not there when it was looked for
            if (taken := self.claim()) is not None:
                raise taken
            self.refuse_if_taken()

    def refuse_if_taken(self) -> None:
        """A directory that holds a run, or somebody else's files, is never written over."""
        if self.path.exists() and not self.path.is_dir():
            raise NovaError("run_dir is a file", where=f"run_dir={self.path}", fix="name a directory")
        if self.holds_a_run():
            saved = any((self.path / "checkpoints").glob("*"))
            fix = "continue it with resume=auto" if saved else "it saved nothing: start it again with resume=auto"
            raise NovaError(
                "the directory already holds a run",
                where=f"run_dir={self.path}",
                fix=f"{fix}, or choose another run_dir",
            )
        self.refuse_strangers()

    def refuse_strangers(self) -> None:
        """Files of the names that a run uses, where there is no run, are not ours to cut, clear or replace."""
        found = next((name for name in FOREIGN if (self.path / name).exists()), None)
        if found == "config.json" and "model_type" not in (self.path / found).read_text(errors="replace"):
            found = None  # of this run, where somebody keeps it so
        if found is not None and not self.holds_a_run():
            raise NovaError(
                f"the directory holds {found}, which no run has written",
                where=f"run_dir={self.path}",
                fix="choose another run_dir",
            )

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write strict JSON, which knows neither NaN nor infinities: they become null."""
        write_atomic(self.path / name, json.dumps(_strict(value), indent=2, default=str, allow_nan=False) + "\n")

    def read_json(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        return json.loads(path.read_text()) if path.is_file() else None

    def log_sizes(self) -> dict[str, int]:
        """The size in bytes of every log file; saved in the checkpoint, so that a resumed run can cut back to it."""
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in self._log_files()}

    def cut_logs(self, sizes: Mapping[str, int]) -> None:
        """Cut every log back to `sizes` (bytes), and remove the log files that did not exist then."""
        for path in self._log_files():
            size = sizes.get(path.relative_to(self.path).as_posix())
            if size is None:
                path.unlink()
            elif path.stat().st_size > size:
                os.truncate(path, size)

    def clear_logs(self) -> None:
        """Remove every log: a run that starts afresh in a directory whose first checkpoint was never finished."""
        for name in (*LOGS, "checkpoints"):
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def _log_files(self) -> list[Path]:
        found: list[Path] = []
        for name in LOGS:
            path = self.path / name
            found += (
                sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path] * path.is_file()
            )
        return found


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value


def environment() -> dict[str, Any]:
    """Versions, hardware and code state: everything outside the config that bit-identity depends on."""
    packages = ("torch", "transformers", "safetensors", "numpy", "tokenizers")
    return {
        "novarl": novarl.__version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "platform": platform.platform(),
        "processor": processor.name(),
        "cores": os.cpu_count(),
        "variables": {
            name: os.environ.get(name) for name in ("MKL_CBWR", "OMP_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG")
        },
        "argv": sys.argv,
        "code": _code_state(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _code_state() -> dict[str, Any]:
    """The git commit of the library's own checkout and whether it was changed since; empty for an installed package."""
    root = Path(novarl.__file__).parent.parent
    if not (root / ".git").exists():
        return {}

    def git(*words: str) -> str:
        return subprocess.run(
            ("git", "-C", str(root), *words), capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {}
