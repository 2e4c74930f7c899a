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
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from novarl.core import checkpoint, processor
from novarl.core.checkpoint import write_atomic
from novarl.core.documents import read_object
from novarl.core.errors import NovaError
from novarl.core.version import PACKAGE, VERSION

LOGS = ("metrics.jsonl", "events.jsonl", "logs", "tb", "rollouts")
"""What grows while the run goes on, and is cut back to the checkpoint when it is resumed."""

KEPT = ("reference", "base")
"""Models that the run goes on from and no checkpoint holds."""

WRITTEN = (
    *LOGS,
    *("checkpoints", "figures", *KEPT),
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
        self._synced: dict[Path, int] = {}

    @classmethod
    def at(cls, name: str | Path) -> RunDir:
        """The directory `name`; where that is a link, such as `runs/latest`, the one that it leads to."""
        path, links = Path(name), 0
        while path.is_symlink() and links < 40:
            path, links = path.parent / os.readlink(path), links + 1
        if links and not path.is_dir():
            what = "leads in a circle" if path.is_symlink() else f"leads to {path}, which is not there"
            raise NovaError(f"run_dir is a link that {what}", where=f"run_dir={name}", fix="name the directory itself")
        return cls(path)

    def manifest(self) -> dict[str, Any] | None:
        """manifest.json; None where the directory holds none of a run. NovaError: it is a run's, and damaged."""
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
        """NovaError where the directory was removed: what the run writes by open files is lost, and all else would make
        a directory that is no run."""
        if not (self.path / "manifest.json").exists():
            what = "the directory was removed while the run was writing there"
            raise NovaError(what, where=f"run_dir={self.path}", fix="start again; what it held is lost")

    def has_saved(self) -> bool:
        """Whether the run says that it has saved a checkpoint, be it there or not."""
        if (self.manifest() or {}).get("saved"):
            return True
        return ((self.read_json("summary.json") or {}).get("status")) in ("done", "stopped")

    def note(self, **facts: Any) -> None:
        """Let the manifest say so, too: that there are checkpoints (`saved`), so that who finds none later knows that
        they were lost; or what is in the files that the run learns from (`files`)."""
        manifest = self.manifest()
        if manifest is not None and {**manifest, **facts} != manifest:
            self.write_json("manifest.json", {**manifest, **facts})

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
        except OSError as error:
            raise NovaError(
                f"cannot write there: {error.strerror}", where=f"run_dir={self.path}", fix="choose another run_dir"
            ) from None
        with contextlib.suppress(OSError):  # a convenience
            self._point_latest()
        if self.path.resolve() not in _claims:  # it was not there when it was looked for
            if (taken := self.claim()) is not None:
                raise taken
            self.refuse_if_taken()

    def _point_latest(self) -> None:
        """Make the link `latest` beside this directory lead here, unless something else has that name.

        Ours is a link to `./NAME`: those that lead anywhere else somebody else has made.
        """
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
        """A directory that holds a run, or somebody else's files, is never written over."""
        if self.path.exists() and not self.path.is_dir():
            raise NovaError("run_dir is a file", where=f"run_dir={self.path}", fix="name a directory")
        if self.holds_a_run():
            if any((self.path / "checkpoints").glob("*")):
                fix = "continue it with resume=auto"
            elif self.has_saved():
                fix = "its checkpoints are missing: put them back and continue it with resume=auto"
            else:
                fix = "it saved nothing: start it again with resume=auto"
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

    def write_text(self, name: str, text: str) -> None:
        write_atomic(self.path / name, text)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a JSON file of the run; None where there is no such file. NovaError: it is damaged."""
        path = self.path / name
        return read_object(path, fix="delete it: a run that goes on writes it anew") if path.exists() else None

    def log_sizes(self) -> dict[str, int]:
        """The size in bytes of every log file; saved in the checkpoint, so that a resumed run can cut back to it. What
        is counted is on the disk first, and so are the models that lie beside the checkpoints."""
        found = {path: path.stat().st_size for path in self._files((*LOGS, *KEPT))}
        grown = [path for path, size in found.items() if self._synced.get(path) != size]
        for path in (*grown, *sorted({path.parent for path in grown})):
            checkpoint.DISK.sync(path)
        self._synced = found
        names = {path.relative_to(self.path): size for path, size in found.items()}
        return {name.as_posix(): size for name, size in names.items() if name.parts[0] in LOGS}

    def lost_logs(self, sizes: Mapping[str, int]) -> str | None:
        """What `cut_logs` will not find of what was written, in a sentence."""
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
        return f"logs are shorter than when the checkpoint was saved, and the rest is lost: {', '.join(lost[:3])}{more}"

    def cut_logs(self, sizes: Mapping[str, int]) -> None:
        """Cut every log back to `sizes` (bytes), and remove the log files that did not exist then. Of lines that are
        lost, no half is left."""
        for path in self._files(LOGS):
            size, held = sizes.get(path.relative_to(self.path).as_posix()), path.stat().st_size
            if size is None:
                path.unlink()
            elif held > size:
                os.truncate(path, size)
            elif held < size and path.suffix == ".jsonl":
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def clear_logs(self) -> None:
        """Remove every log: a run that starts afresh in a directory whose first checkpoint was never finished."""
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
