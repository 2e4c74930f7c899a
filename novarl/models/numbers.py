"""Reject absurd numbers in a model's config.json before anything is built from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from novarl.core.errors import NovaError

MOST_LAYERS = 2000
LARGEST = 2**53
"""The largest plausible size, token count or rotary base in a configuration."""


def check_numbers(values: Mapping[str, Any], where: str, fix: str) -> None:
    """Raise NovaError naming the field for more than MOST_LAYERS layers (which would be built before missing weights
    are noticed), an integer beyond LARGEST, or NaN."""
    for name, value in _numbers(values, ""):
        wrong = None
        if isinstance(value, float) and math.isnan(value):
            wrong = "is NaN"
        elif isinstance(value, int) and abs(value) > LARGEST:
            wrong = f"is about {'-' if value < 0 else ''}1e{_digits(value)}, which is too large"
        elif "layer" in name and value > MOST_LAYERS:
            wrong = f"is {value}, but the maximum is {MOST_LAYERS} layers"
        if wrong is not None:
            raise NovaError(f"{name} {wrong}", where=where, fix=fix)


def _digits(value: int) -> int:
    return int(abs(value).bit_length() * math.log10(2))


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int | float]]:
    """Every number with its field name."""
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
