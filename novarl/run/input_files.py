"""Hashes of a run's input files: data, rewards, environments, chat templates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def digests(values: Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of each data file or folder, Python file and chat template in a configuration."""
    found: dict[str, str] = {}
    for key, text in _texts(values):
        for name in _names(key, text):
            if (digest := _digest(name)) is not None:
                found[name] = digest
                break
    return dict(sorted(found.items()))


def _names(key: str, text: str) -> list[str]:
    """The paths that `text`, the value of a key that ends in `key`, may refer to."""
    if key == "data":
        return [text, *text.split("@")]  # with a split
    if ".py" in text:
        return [text, text.rpartition(":")[0]]  # with a function
    return [text] if key == "chat_template" else []


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Notes about files that have changed since the run last started."""
    return [
        f"{name} has changed since the run last started (sha256 {now[name][:12]}, previously {digest[:12]})"
        for name, digest in before.items()
        if name in now and now[name] != digest
    ]


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in a configuration, with the last part of its key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item, key)


def _digest(name: str) -> str | None:
    try:
        path = Path(name).expanduser()
        if not name or not path.exists():
            return None
        if path.is_file():
            return _sha256(path)
        whole = hashlib.sha256()
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            whole.update(f"{file.relative_to(path).as_posix()}\0{_sha256(file)}\0".encode("utf-8", "surrogateescape"))
        return whole.hexdigest()
    except (OSError, ValueError, RuntimeError):  # not a path
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
