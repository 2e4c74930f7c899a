"""The keys of a tree: dotted paths, defaults, descriptions, and the closest match to a misspelt name."""

from __future__ import annotations

import ast
import difflib
import inspect
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from novarl.config.parts import Node
from novarl.core.config_files import dump


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of a tree. `values` describes what it takes; an `open` key is a mapping whose keys the user chooses."""

    path: str
    values: str
    default: Any
    required: bool
    text: bool
    open: bool
    tree: type[Node]
    """The group it is a field of."""

    @property
    def meaning(self) -> str:
        """The docstring below the field."""
        name = _last(self.path)
        owner = next(tree for tree in self.tree.__mro__ if name in inspect.get_annotations(tree))
        return _meanings(owner).get(name, "")


@cache
def _meanings(owner: type) -> dict[str, str]:
    """The docstring below each field of a class, parsed only when needed: pydantic would parse all at every start."""
    (written,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(written, ast.ClassDef)
    found = {}
    for field, below in pairwise(written.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


@cache
def keys(tree: type[Node]) -> dict[str, Key]:
    """The leaves of a tree by dotted path, in definition order."""
    return {key.path: key for key in _walk(tree, "")}


@cache
def sections(tree: type[Node]) -> frozenset[str]:
    """The dotted path of every group of keys."""
    return frozenset(path.rpartition(".")[0] for path in keys(tree) if "." in path)


def is_key(path: str, tree: type[Node]) -> bool:
    """Whether `path` is a leaf or lies within an open one, such as `reward.style.weight`."""
    return path in keys(tree) or is_open(path, tree)


def is_open(path: str, tree: type[Node]) -> bool:
    """Whether the user chooses the keys within `path`: `reward` and everything below it."""
    known = keys(tree)
    return any(above in known and known[above].open for above in upwards(path))


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The closest matches to `name`: choices with the same last part, otherwise the most similar spelling, otherwise a
    choice that equals the last words of `name`. If `name` includes a section, similar spelling comes first.

    >>> nearest("coef", ["entropy.coef", "kl.coef", "seed"]), nearest("sead", ["seed"]), nearest("x", ["seed"])
    ('entropy.coef or kl.coef', 'seed', None)
    >>> nearest("torch_dtype", ["dtype", "threads"])
    'dtype'
    """
    if len(name) > 100:
        return None
    pool = sorted(choices)
    ends: dict[str, list[str]] = {}
    for choice in pool:
        ends.setdefault(_last(choice), []).append(choice)
    same = ends.get(_last(name), [])
    whole = difflib.get_close_matches(name, pool, 1, 0.75)
    ending = difflib.get_close_matches(_last(name), list(ends), 1, 0.75)
    words = _last(name).split("_")
    tail = [end for first in range(1, len(words)) if (end := "_".join(words[first:])) in pool]
    found = (whole if "." in name else same) or same or whole or (ends[ending[0]] if ending else []) or tail
    return " or ".join(found[:3]) or None


def upwards(path: str) -> Iterator[str]:
    """The path itself, then every path that contains it."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def value_text(value: Any) -> str:
    """A value as it is written in a configuration file."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(value_text, value))}]"
    return "{}" if value == {} else dump({"v": value})[3:].strip()


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _walk(tree: type[Node], prefix: str) -> Iterator[Key]:
    for name, field in tree.model_fields.items():
        path = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Node):
            yield from _walk(field.annotation, f"{path}.")
        else:
            yield _key(path, field, tree)


def _key(path: str, field: FieldInfo, tree: type[Node]) -> Key:
    parts = _alternatives(field.annotation)
    values = [_words(part) for part in parts if part is not types.NoneType]
    values += ["null"] * (types.NoneType in parts)
    required = field.is_required()
    default = field.get_default(call_default_factory=True) if not required else None
    return Key(
        path=path,
        values=" or ".join(values),
        default=default,
        required=required,
        text=str in parts,
        open=any(get_origin(part) is dict for part in parts),
        tree=tree,
    )


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union, without their `Annotated` metadata."""
    if get_origin(annotation) is typing.Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return [found for part in get_args(annotation) for found in _alternatives(part)]
    return [annotation]


def _words(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return "list"
    if get_origin(annotation) is dict:
        return "mapping"
    return {int: "whole number", float: "number", bool: "true, false", str: "text"}[annotation]
