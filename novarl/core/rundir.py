"""The run directory, the interface between training and tools. Training writes it; tools only read it.

runs/<name>/
  config.yaml  manifest.json  summary.json
  metrics.jsonl  events.jsonl  logs/train.jsonl  tb/  rollouts/  evals/
  checkpoints/  reference/  base/  figures/  samples.md
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from novarl.core import checkpoint, processor
from novarl.core.checkpoint import write_atomic
from novarl.core.documents import read_object
from novarl.core.errors import NovaError
from novarl.core.version import PACKAGE, VERSION

FORMAT = 1
"""The version of the run directory's format (docs/run_directory.md)."""

LOGS = ("metrics.jsonl", "events.jsonl", "logs", "tb", "rollouts", "evals")
"""Logs that grow during the run and are truncated to the checkpoint on resume."""

KEPT = ("reference", "base")
"""Models that a run needs to resume but that are not in checkpoints."""

FOREIGN = (
    *("manifest.json", *LOGS, "checkpoints", "figures", *KEPT),
    *("config.yaml", "summary.json", "samples.md", "front.json", "trackers.json", "config.json"),
)
"""Files that, without a run's manifest, mark a foreign directory, such as a model."""

LOOKS = 10
"""Attempts to take the lock: readers hold it for an instant."""

_claims: dict[Path, int | None] = {}
"""The directories claimed by this process, with the lock file if locking is supported."""


class RunDir:
    """The directory of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._synced: dict[Path, int] = {}
        self._claimed: Path | None = None

    @classmethod
    def at(cls, name: str | Path) -> RunDir:
        """The directory `name`; links such as `runs/latest` are resolved."""
        path, links = Path(name), 0
        while path.is_symlink() and links < 40:
            path, links = path.parent / os.readlink(path), links + 1
        if links and not path.is_dir():
            what = "is circular" if path.is_symlink() else f"points to {path}, which does not exist"
            raise NovaError(f"run_dir is a link that {what}", where=f"run_dir={name}", fix="use the directory itself")
        return cls(path)

    def manifest(self) -> dict[str, Any] | None:
        """manifest.json, or None if the directory holds no run. Raises NovaError if the manifest is damaged."""
        file = self.path / "manifest.json"
        if not file.exists():
            return None
        try:
            found = read_object(file, fix="restore it from a copy, or start a new run with model=<checkpoint>/model")
        except NovaError:
            if any((self.path / name).exists() for name in ("checkpoints", "metrics.jsonl")):
                raise
            return None
        return found if "novarl" in found else None

    def holds_a_run(self) -> bool:
        return self.manifest() is not None

    def check_is_there(self) -> None:
        """Raise NovaError if the directory was removed: writes to open files are lost, others would recreate it."""
        if not (self.path / "manifest.json").exists():
            what = "the run directory was removed during the run"
            raise NovaError(what, where=f"run_dir={self.path}", fix="start again; its contents are lost")

    def has_saved(self) -> bool:
        """Whether the run has ever saved a checkpoint, even if it is now missing."""
        if (self.manifest() or {}).get("saved"):
            return True
        return ((self.read_json("summary.json") or {}).get("status")) in ("done", "stopped")

    def note(self, **facts: Any) -> None:
        """Add facts to the manifest, such as that checkpoints were `saved`, so that missing ones are noticed."""
        manifest = self.manifest()
        if manifest is not None and {**manifest, **facts} != manifest:
            self.write_json("manifest.json", {**manifest, **facts})

    def claim(self) -> NovaError | None:
        """Keep everybody else from writing here until `release`, or this process's end; the error to raise where a run
        is at work already."""
        place = self.path.resolve()
        if place in _claims:
            what, fix = "another run of this process is writing there", "close it first, or choose another run_dir"
            return NovaError(what, where=f"run_dir={self.path}", fix=fix)
        if not place.is_dir():
            return None
        number = None
        try:
            number = os.open(place, os.O_RDONLY)
            _lock(number)
        except BlockingIOError:
            assert number is not None
            os.close(number)
            what, fix = "another process is writing to this run", "wait for it, or stop it"
            return NovaError(what, where=f"run_dir={self.path}", fix=fix)
        except OSError:  # unreadable, or no locks on this file system: cannot be determined
            pass
        _claims[place] = number
        self._claimed = place
        return None

    def is_claimed(self) -> bool:
        """Whether a process is writing here. Holds a shared lock for an instant, which `claim` waits for."""
        try:
            number = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks on this file system
            return False
        finally:
            os.close(number)
        return False

    def release(self) -> None:
        """Others may write here again."""
        if self._claimed is not None and (number := _claims.pop(self._claimed, None)) is not None:
            os.close(number)
        self._claimed = None

    def create(self) -> None:
        """Create the directory and point the link `latest` to it. Raises NovaError if it cannot be written or another
        process has just created it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise NovaError(
                f"cannot write to it: {error.strerror}", where=f"run_dir={self.path}", fix="choose another run_dir"
            ) from None
        with contextlib.suppress(OSError):  # a convenience
            self._point_latest()
        if self._claimed is None:  # it was not there when it was looked for
            if (taken := self.claim()) is not None:
                raise taken
            self.refuse_if_taken()

    def _point_latest(self) -> None:
        """Point the link `latest` beside this directory here, unless something else has the name: our links are
        `./NAME`."""
        latest = self.path.parent / "latest"
        if self.path.name in ("", "..", "latest"):
            return
        if os.path.lexists(latest) and not (latest.is_symlink() and os.readlink(latest).startswith("./")):
            return
        beside = latest.with_name(f".latest.{os.getpid()}")
        beside.unlink(missing_ok=True)
        beside.symlink_to(f"./{self.path.name}")
        os.replace(beside, latest)

    def refuse_if_taken(self) -> None:
        """Raise NovaError for a directory that holds a run or foreign files."""
        if self.path.exists() and not self.path.is_dir():
            raise NovaError("run_dir is a file", where=f"run_dir={self.path}", fix="use a directory")
        if self.holds_a_run():
            if any((self.path / "checkpoints").glob("*")):
                fix = "resume it with resume=auto"
            elif self.has_saved():
                fix = "its checkpoints are missing: restore them and use resume=auto"
            else:
                fix = "it has no checkpoint: restart it with resume=auto"
            raise NovaError(
                "the directory already contains a run",
                where=f"run_dir={self.path}",
                fix=f"{fix}, or choose another run_dir",
            )
        self.refuse_strangers()

    def refuse_strangers(self) -> None:
        """Raise NovaError if files with names used by a run exist without a run; they must not be overwritten."""
        found = next((name for name in FOREIGN if (self.path / name).exists()), None)
        if found == "config.json" and "model_type" not in (self.path / found).read_text(errors="replace"):
            found = None  # belongs to this run
        if found is not None and not self.holds_a_run():
            raise NovaError(
                f"the directory contains {found}, which was not written by a run",
                where=f"run_dir={self.path}",
                fix="choose another run_dir",
            )

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write strict JSON: NaN and infinities become null."""
        write_atomic(self.path / name, json.dumps(_strict(value), indent=2, default=str, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        write_atomic(self.path / name, text)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of the run, or None if there is no such file. Raises NovaError if it is damaged."""
        path = self.path / name
        return read_object(path, fix="delete it; a resumed run writes it again") if path.exists() else None

    def log_sizes(self) -> dict[str, int]:
        """The size in bytes of every log file; saved in the checkpoint, so that a resumed run can truncate to it. The
        logs, and models outside checkpoints, are synced to disk first."""
        found = {path: path.stat().st_size for path in self._files((*LOGS, *KEPT))}
        grown = [path for path, size in found.items() if self._synced.get(path) != size]
        for path in (*grown, *sorted({path.parent for path in grown})):
            checkpoint.DISK.sync(path)
        self._synced = found
        names = {path.relative_to(self.path): size for path, size in found.items()}
        return {name.as_posix(): size for name, size in names.items() if name.parts[0] in LOGS}

    def lost_logs(self, sizes: Mapping[str, int]) -> str | None:
        """A sentence about log data that `cut_logs` will find missing."""
        lost = []
        for name, size in sizes.items():
            path = self.path / name
            held = path.stat().st_size if path.is_file() else None
            if held is None:
                lost.append(f"{name} is missing")
            elif held < size:
                lost.append(f"{name} has {held:,} of {size:,} bytes")
        if not lost:
            return None
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        return f"logs are shorter than when the checkpoint was saved; the rest is lost: {', '.join(lost[:3])}{more}"

    def cut_logs(self, sizes: Mapping[str, int]) -> None:
        """Truncate every log to `sizes` (bytes) and remove newer log files and partial lines."""
        for path in self._files(LOGS):
            size, held = sizes.get(path.relative_to(self.path).as_posix()), path.stat().st_size
            if size is None:
                path.unlink()
            elif held > size:
                os.truncate(path, size)
            elif held < size and path.suffix == ".jsonl":
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def clear_logs(self) -> None:
        """Remove every log, to restart in a directory without a complete checkpoint."""
        for name in LOGS:
            if os.path.lexists(self.path / name):
                checkpoint.DISK.remove(self.path / name)

    def _files(self, names: Iterable[str]) -> list[Path]:
        found: list[Path] = []
        for name in names:
            path = self.path / name
            found += (
                sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path] * path.is_file()
            )
        return found


def _lock(number: int) -> None:
    """Take the exclusive lock of an open file. BlockingIOError if another process holds it, and not just for the
    instant in which a reader asks whether it is held (`RunDir.is_claimed`)."""
    for _ in range(LOOKS):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.02)
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, list | tuple) else value


def environment() -> dict[str, Any]:
    """Versions, hardware and code state: everything besides the config that affects reproducibility."""
    packages = ("torch", "transformers", "safetensors", "numpy", "tokenizers")
    return {
        "novarl": VERSION,
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
    root = PACKAGE.parent
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
