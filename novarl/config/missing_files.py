"""Files that a configuration names, and that are not where it is read."""

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
"""Keys whose text names no file that must be there: what is written, and what is said."""


def absent(config: Config) -> list[str]:
    """In words, a note for each file that a run would look for in vain. What may be the name of something on the hub is
    not looked for."""
    named = _texts(to_dict(config), "")
    return [
        f"there is no {path} here, which {key} names" for key, path in named if not Path(path).expanduser().exists()
    ]


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
