"""Read the files of a model, with errors that name them, and reject absurd numbers in its config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from novarl.core.errors import NovaError

WHOLE = "copy or save the model again"
MOST_LAYERS = 2000
LARGEST = 2**53
"""The largest plausible size, token count or rotary base in a configuration."""


def read_json(path: Path, *, fix: str = WHOLE) -> dict[str, Any]:
    """The object in a JSON file, or an empty one if there is no file. Raises NovaError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise NovaError(f"not valid JSON: {error}", where=str(path), fix=fix) from error
    except RecursionError as error:
        raise NovaError("the file is nested too deeply", where=str(path), fix=fix) from error
    if not isinstance(value, dict):
        raise NovaError("not a JSON object", where=str(path), fix=fix)
    return value


def read_tensors(path: Path, what: str, *, fix: str = WHOLE) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises NovaError that `what` cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise NovaError(f"{what} cannot be read: {error}", where=str(path), fix=fix) from error


def check_numbers(values: Mapping[str, Any], where: str, fix: str) -> None:
    """Raise NovaError naming the field for more than MOST_LAYERS layers (which would be built before missing weights
    are noticed), an integer beyond LARGEST, or NaN."""
    for name, value in _numbers(values, ""):
        wrong = None
        if isinstance(value, float) and math.isnan(value):
            wrong = "is NaN"
        elif isinstance(value, int) and abs(value) > LARGEST:
            digits = int(abs(value).bit_length() * math.log10(2))
            wrong = f"is about {'-' if value < 0 else ''}1e{digits}, which is too large"
        elif "layer" in name and value > MOST_LAYERS:
            wrong = f"is {value}, but the maximum is {MOST_LAYERS} layers"
        if wrong is not None:
            raise NovaError(f"{name} {wrong}", where=where, fix=fix)


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
