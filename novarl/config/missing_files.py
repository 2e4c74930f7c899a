"""Files that a configuration names but that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from novarl.config.base import Config
from novarl.config.load import to_dict

_FILE = re.compile(
    r"(?P<path>.+\.(?:py|jsonl|json|csv|parquet|arrow|gz))(?::\w+)?|(?P<place>(?:/|~|\.\.?/).*)", re.DOTALL
)
_OTHER = frozenset({"run_dir", "prompt", "system", "stop"})
"""Keys whose values are not input files: outputs and prompts."""


def missing_files(config: Config) -> list[str]:
    """A note for each missing file. Names that may be hub ids are not checked."""
    named = _texts(to_dict(config), "")
    return [f"{key}: {path} does not exist" for key, path in named if not Path(path).expanduser().exists()]


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        found = _FILE.fullmatch(value)
        if found is not None:
            yield key, found["path"] or found["place"]
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name not in _OTHER:
                yield from _texts(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, Sequence):
        for part in value:
            yield from _texts(part, key)
