"""A model's config.json with numbers that no model has: refused before anything is made by them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from novarl.core.errors import NovaError

MOST_LAYERS = 2000
LARGEST = 2**53
"""Beyond it nothing in a configuration is a size, a number of tokens or the base of rotations."""


def check_numbers(values: Mapping[str, Any], where: str, fix: str) -> None:
    """NovaError, naming the field: more layers than MOST_LAYERS (each is made, and a list of them too, before its
    weights are missed), an integer beyond LARGEST, or NaN."""
    for name, value in _numbers(values, ""):
        wrong = None
        if isinstance(value, float) and math.isnan(value):
            wrong = "is NaN, which is no number"
        elif isinstance(value, int) and abs(value) > LARGEST:
            wrong = f"is about {'-' if value < 0 else ''}1e{_digits(value)}, too large for any setting of a model"
        elif "layer" in name and value > MOST_LAYERS:
            wrong = f"is {value}, and a model may have {MOST_LAYERS} layers"
        if wrong is not None:
            raise NovaError(f"{name} {wrong}", where=where, fix=fix)


def _digits(value: int) -> int:
    return int(abs(value).bit_length() * math.log10(2))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Every number, with the name of the field that it is in."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item, name)
