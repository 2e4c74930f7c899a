"""Exact conversion of prompts, rollouts and scored rollouts to JSON and back, for checkpoints.

Floats are exact because JSON writes the shortest text that reads back as the same float. Tuples inside answers, extra
columns and info become `{"__tuple__": [...]}`, and dicts with non-string keys `{"__items__": [...]}`.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from novarl.core.errors import NovaError
from novarl.core.types import Prompt, Rollout, Scored, Sequence

Kind = TypeVar("Kind", Scored, Rollout, Prompt, Sequence)

_TUPLE, _ITEMS = "__tuple__", "__items__"
_OPTIONAL = ("extra", "metrics", "template_kwargs", "support")
"""Fields that are omitted if they are empty."""
_PARTS: dict[str, Any] = {"rollout": Rollout, "prompt": Prompt, "sequences": Sequence}
"""Fields whose values are of these types too."""


def to_dict(value: Scored | Rollout | Prompt | Sequence) -> dict[str, Any]:
    """The fields as JSON values. Raises NovaError if a prompt or info holds tensors or other objects."""
    state: dict[str, Any] = {}
    for name, item, is_tuple in ((one.name, getattr(value, one.name), _is_tuple(one.type)) for one in fields(value)):
        if not item and name in _OPTIONAL:
            continue
        if name == "support":
            state[name] = [b64encode(words).decode() for words in item]
        elif name in _PARTS:
            state[name] = [to_dict(part) for part in item] if is_tuple else to_dict(item)
        elif name == "messages":
            state[name] = [_to_json(message, name) for message in item]
        else:
            state[name] = list(item) if is_tuple and item is not None else _to_json(item, name)
    return state


def from_dict(kind: type[Kind], state: Mapping[str, Any]) -> Kind:
    """The inverse of `to_dict`; fields that are missing have their defaults."""
    found: dict[str, Any] = {}
    for name, is_tuple in ((one.name, _is_tuple(one.type)) for one in fields(kind) if one.name in state):
        item, part = state[name], _PARTS.get(name)
        if name == "support":
            found[name] = tuple(b64decode(words) for words in item)
        elif part is not None:
            found[name] = tuple(from_dict(part, one) for one in item) if is_tuple else from_dict(part, item)
        elif name == "messages":
            found[name] = tuple(_from_json(message) for message in item)
        else:
            found[name] = tuple(item) if is_tuple and item is not None else _from_json(item)
    return kind(**found)


def _is_tuple(annotation: Any) -> bool:
    return str(annotation).startswith("tuple[")


def _to_json(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in (_TUPLE, _ITEMS) for key in value):
            return {key: _to_json(item, f"{where}.{key}") for key, item in value.items()}
        return {_ITEMS: [[_to_json(key, where), _to_json(item, f"{where}.{key}")] for key, item in value.items()]}
    what = f"a {type(value).__name__} in a rollout cannot be saved with the run"
    raise NovaError(what, where=where, fix="use only numbers, strings, lists, tuples and dicts")


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(_from_json(item) for item in value[_TUPLE])
        if value.keys() == {_ITEMS}:
            return {_from_json(key): _from_json(item) for key, item in value[_ITEMS]}
        return {key: _from_json(item) for key, item in value.items()}
    return [_from_json(item) for item in value] if isinstance(value, list) else value
