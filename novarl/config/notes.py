"""Notes on a configuration: files that do not exist, and settings that have no effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from novarl.config.base import Config, TrainConfig
from novarl.config.load import to_dict
from novarl.config.parts import Node, Sampled
from novarl.config.tree import RLConfig

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


def without_effect(config: TrainConfig) -> list[str]:
    """A note for each section that has values but is not turned on, and for sampling settings of a greedy evaluation.
    A section that is turned off explicitly (`enabled: false`) may have any values."""
    off: list[tuple[str, Node, str]] = []
    if config.lora.rank == 0:
        off.append(("lora", config.lora, "lora.rank is 0"))
    if isinstance(config, RLConfig):
        for name in ("adaptive_kl", "constraint_optimization", "multi_objective", "dynamic_sampling"):
            section = getattr(config, name)
            if not section.enabled and "enabled" not in section.model_fields_set:
                off.append((name, section, f"{name}.enabled is not true"))
    notes = list(config.notes)
    for name, section, why in off:
        plain = type(section)()
        given = [key for key in type(section).model_fields if getattr(section, key) != getattr(plain, key)]
        if given:
            notes.append(f"No effect: {', '.join(f'{name}.{key}' for key in given)}, because {why}")
    if isinstance(config, RLConfig) and config.eval.k == 0:
        plain = type(config.eval)()
        if given := [key for key in Sampled.model_fields if getattr(config.eval, key) != getattr(plain, key)]:
            names = ", ".join(f"eval.{key}" for key in given)
            notes.append(f"No effect: {names}, because eval.k is 0 (evaluation is greedy)")
    return notes
