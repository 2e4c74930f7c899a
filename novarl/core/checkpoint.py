"""Atomic checkpoints.

A checkpoint is a directory: `model/` (Hugging Face safetensors), `tensors.safetensors` (optimizer moments and all other
tensors), `state.json` (everything else), `MANIFEST` (the sha256 of each file, written last). It is written to a
temporary directory, synced and renamed, so a kill at any time leaves either the new checkpoint or the old one. No
pickle is ever written or read.

The links `latest` and `best` are for users and tools. A run never reads them: it derives them from the checkpoints, and
repairs them when it resumes (`Checkpoints.mend`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novarl.core.documents import read_object
from novarl.core.errors import NovaError

FORMAT = 1
"""Incremented when a change makes older checkpoints unreadable."""


def disk_error(error: BaseException) -> OSError | None:
    """The disk error that `error` is or wraps: safetensors reports it only in its message."""
    if isinstance(error, OSError):
        return error
    said = re.search(r"\(os error (\d+)\)", str(error)) if type(error).__name__ == "SafetensorError" else None
    return OSError(int(said[1]), os.strerror(int(said[1]))) if said else None


class Disk:
    """The file operations of a save. Tests interrupt the process or fill the disk at each of them."""

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def produce(self, path: Path, writer: Callable[[Path], None]) -> None:
        """Let `writer` create the file or directory `path`. Disk errors are raised as OSError."""
        try:
            writer(path)
        except Exception as error:
            refused = disk_error(error)
            if refused is None or refused is error:
                raise
            raise refused from error

    def sync(self, path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, path: Path, target: str) -> None:
        path.symlink_to(target, target_is_directory=True)

    def remove(self, path: Path) -> None:
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


DISK = Disk()

POINTERS = ("latest", "best")
"""The links next to the checkpoints; directories, if the run was copied by following links."""

NAME = re.compile(r"[a-z]+-\d{6,}(-update-\d+)?")
"""Checkpoint names: phase, step, and the number of completed updates of the next step."""

UNFINISHED = re.compile(r"\..+\.(saving|replaced|dropped|writing)")
"""Names of files left by an interrupted save. Other hidden files are never removed."""

ASIDE = "abandoned-"
"""The name prefix of checkpoints abandoned by resuming from an earlier one."""


def write_atomic(path: Path, text: str) -> None:
    """Replace a small text file atomically: readers see the old text or the new one."""
    beside = path.with_name(f".{path.name}.writing")
    DISK.write(beside, text.encode())
    DISK.sync(beside)
    DISK.rename(beside, path)
    DISK.sync(path.parent)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk. `order` counts optimiser updates over all phases of the run."""

    path: Path
    order: int

    @property
    def model(self) -> Path:
        return self.path / "model"

    def outline(self) -> dict[str, Any]:
        """The state with placeholders for its (possibly large) tensors."""
        state: dict[str, Any] = read_object(self.path / "state.json")["state"]
        return state

    def load(self) -> dict[str, Any]:
        """The saved state; tensors are on the CPU."""
        from safetensors.torch import load_file

        plain = read_object(self.path / "state.json")
        state: dict[str, Any] = _join(plain["state"], load_file(self.path / "tensors.safetensors"))
        return state


class Checkpoints:
    """The checkpoints of one run, under `folder`."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def save(
        self,
        name: str,
        state: Mapping[str, Any],
        write_model: Callable[[Path], None],
        *,
        order: int,
        best: bool = False,
    ) -> Checkpoint:
        """Write the checkpoint `name`, the latest and, if `best`, better than all before; then delete all but the last
        `keep` and the best. OSError if the disk is full or read-only; complete checkpoints stay intact."""
        target, beside = self.folder / name, self.folder / f".{name}.saving"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        try:
            beside.mkdir()
            self._fill(beside, {"format": FORMAT, "order": order, "name": name, "best": best}, state, write_model)
        except OSError:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        if target.exists():  # incomplete, or abandoned by resuming from an earlier one
            DISK.rename(target, self.folder / f".{name}.replaced")
        DISK.rename(beside, target)
        DISK.sync(self.folder)
        self._point("latest", name)
        if best:
            self._point("best", name)
        self.prune()
        return Checkpoint(target, order)

    def mend(self) -> tuple[Checkpoint | None, list[str]]:
        """Repair the state after an interrupted save: point the links to the newest complete checkpoint and to the best
        one, and remove temporary files. Returns the result of `find`. No other process may write here."""
        for pointer in POINTERS:
            self._as_link(pointer)
        newest, troubles = self.find()
        if newest is None:
            return None, troubles
        self._aim("latest", newest.path.name)
        marked = (path for path, head in self._newest_first() if head.get("best") and damage(path) is None)
        if (best := next(marked, None)) is not None:  # each is better than those before it
            self._aim("best", best.name)
        elif (self.folder / "best").is_symlink() and not (self.folder / "best").exists():
            DISK.remove(self.folder / "best")
        self._sweep()
        return newest, troubles

    def _as_link(self, pointer: str) -> None:
        """A directory in place of a link is a copy of a checkpoint: rename the only copy, remove others."""
        copy = self.folder / pointer
        if copy.is_symlink() or not copy.is_dir():
            return
        head = _head(copy)
        others = [other for path, other in self._newest_first() if path != copy and damage(path) is None]
        if damage(copy) is None and all(other["order"] != head["order"] for other in others):
            own = self.folder / str(head.get("name") or f"order-{head['order']:06d}")
            if own.exists() and damage(own) is None:  # of another branch
                own = own.with_name(f"order-{head['order']:06d}")
            if own.exists():
                DISK.rename(own, self.folder / f".{own.name}.replaced")
            DISK.rename(copy, own)
        elif others:
            DISK.rename(copy, self.folder / f".{pointer}.replaced")

    def _aim(self, pointer: str, name: str) -> None:
        if self._named(pointer) != name:
            self._point(pointer, name)

    def _sweep(self) -> None:
        """Remove files left by interrupted saves; what cannot be removed is retried next time."""
        for leftover in self.folder.glob(".*"):
            if UNFINISHED.fullmatch(leftover.name):
                with suppress(OSError):
                    DISK.remove(leftover)

    def _fill(
        self, folder: Path, head: Mapping[str, Any], state: Mapping[str, Any], write_model: Callable[[Path], None]
    ) -> None:
        from safetensors.torch import save_file

        plain, tensors = _split(state)
        document = {**head, "state": plain}
        DISK.produce(folder / "model", write_model)
        DISK.produce(folder / "tensors.safetensors", lambda path: save_file(tensors, path))
        DISK.write(folder / "state.json", json.dumps(document, indent=1).encode())
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in files:
            DISK.sync(path)
        manifest = {path.relative_to(folder).as_posix(): _sha256(path) for path in files}
        DISK.write(folder / "MANIFEST", json.dumps(manifest, indent=1).encode())
        DISK.sync(folder / "MANIFEST")
        DISK.sync(folder)

    def prune(self) -> None:
        """Delete checkpoints neither among the last `keep` nor linked, and damaged ones older than all kept. Each is
        renamed first, so that a kill leaves no part under its name."""
        found = self._newest_first()
        complete = [path.name for path, head in found if head]
        kept = {*complete[: self.keep], *filter(None, map(self._named, POINTERS))}
        for path, head in found:
            if path.name not in kept and (head or _before_all(path.name, kept)):
                DISK.rename(path, self.folder / f".{path.name}.dropped")
        self._sweep()

    def _named(self, pointer: str) -> str | None:
        path = self.folder / pointer
        return os.readlink(path).rstrip("/") if path.is_symlink() else None

    def _point(self, pointer: str, name: str) -> None:
        """Atomically point the link `pointer` to the checkpoint `name`."""
        beside = self.folder / f".{pointer}.writing"
        if beside.is_symlink():
            DISK.remove(beside)
        DISK.link(beside, name)
        DISK.rename(beside, self.folder / pointer)
        DISK.sync(self.folder)

    def _newest_first(self) -> list[tuple[Path, dict[str, Any]]]:
        """Each checkpoint with its header; those without a readable header come last."""
        entries = self.folder.iterdir() if self.folder.is_dir() else ()
        named = (path for path in entries if NAME.fullmatch(path.name) or path.name in POINTERS)
        found = [(path, _head(path)) for path in named if path.is_dir() and not path.is_symlink()]
        return sorted(found, key=lambda pair: (pair[1].get("order", -1), pair[0].name), reverse=True)

    def abandon(self, after: int) -> list[str]:
        """Rename complete checkpoints of a later order than `after`, from which nothing then resumes; their new names.
        The latest go first: if interrupted, the run resumes from a state that its logs still contain."""
        later = (path for path, head in self._newest_first() if head.get("order", 0) > after)
        whole = [path for path in later if damage(path) is None]  # incomplete ones are replaced by the next save
        aside = []
        for path in whole:
            names = (f"{ASIDE}{number}-{path.name}" for number in itertools.count(1))
            aside.append(next(name for name in names if not (self.folder / name).exists()))
            DISK.rename(path, self.folder / aside[-1])
        if aside:
            DISK.sync(self.folder)
            self.mend()
        return aside

    def find(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest complete checkpoint (or None), and why newer ones were skipped."""
        found, troubles = None, list[str]()
        for path, head in self._newest_first():
            if found is not None and (head or _before_all(path.name, [found.path.name])):
                continue
            trouble = damage(path)
            if trouble is None:
                found = Checkpoint(path, head["order"])
            else:
                troubles.append(f"{path.name}: {trouble}")
        return found, troubles


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`. Raises NovaError if it is missing or damaged."""
    fix = "use a directory such as runs/x/checkpoints/step-000010, or resume=auto with the run's run_dir"
    if not path.is_dir():
        raise NovaError("no such checkpoint", where=f"resume={path}", fix=fix)
    if (path / "checkpoints").is_dir():
        raise NovaError("this is a run directory, not a checkpoint", where=f"resume={path}", fix=fix)
    trouble = damage(path)
    if trouble:
        raise NovaError(
            f"the checkpoint is damaged: {trouble}",
            where=str(path),
            fix="resume from an earlier one, or use resume=auto",
        )
    saved = read_object(path / "state.json")
    if saved.get("format") != FORMAT:
        raise NovaError(
            f"the checkpoint has format {saved.get('format')}, but this version reads format {FORMAT}",
            where=str(path),
            fix="resume with the version given in the run's manifest.json",
        )
    return Checkpoint(path, int(saved["order"]))


def damage(path: Path) -> str | None:
    """Why a checkpoint directory is incomplete or damaged, or None."""
    try:
        manifest = read_object(path / "MANIFEST")
    except NovaError as error:
        return f"its MANIFEST {error.what}"
    if not {"state.json", "tensors.safetensors"} <= manifest.keys():
        return "its MANIFEST does not list its files"
    for name, digest in manifest.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if _sha256(file) != digest:
            return f"the checksum of {name} does not match"
    return None if _head(path) else "state.json has no order"


def _head(path: Path) -> dict[str, Any]:
    """The header in a checkpoint's state.json (`order`, `name`, `best`); empty if it cannot be read."""
    try:
        document = read_object(path / "state.json")
    except NovaError:
        return {}
    return {key: document.get(key) for key in ("order", "name", "best")} if type(document.get("order")) is int else {}


def _before_all(name: str, kept: Iterable[str]) -> bool:
    """Whether an unreadable checkpoint is, by its name, older than those `kept` of its phase."""
    phase = name.partition("-")[0]
    alike = [other for other in kept if other.partition("-")[0] == phase]
    return bool(alike) and name < min(alike)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _split(state: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Split nested state into JSON and named tensors; a tensor is replaced by `{"__tensor__": name}`."""
    import torch

    tensors: dict[str, torch.Tensor] = {}

    def visit(value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[name] = value.detach().cpu().contiguous()
            return {"__tensor__": name}
        if isinstance(value, Mapping):
            bad = [key for key in value if not isinstance(key, str)]
            if bad:
                raise TypeError(f"checkpoint keys must be strings, got {bad[0]!r} under {name!r}")
            return {key: visit(item, f"{name}/{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [visit(item, f"{name}/{index}") for index, item in enumerate(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"cannot save a {type(value).__name__} under {name!r}")

    return visit(state, ""), tensors


def _join(plain: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(plain, dict):
        if plain.keys() == {"__tensor__"}:
            return tensors[plain["__tensor__"]]
        return {key: _join(item, tensors) for key, item in plain.items()}
    if isinstance(plain, list):
        return [_join(item, tensors) for item in plain]
    return plain
