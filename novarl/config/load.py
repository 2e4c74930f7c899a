"""Reads a file and `a.b=c` overrides into a frozen tree, or raises one NovaError with the place of the error."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from novarl.config.base import Config
from novarl.config.foreign.rows import Alias
from novarl.config.keys import is_open, keys, nearest
from novarl.config.names import Entry, canonical, ignored, single
from novarl.config.tree import TREES
from novarl.core.config_files import dump, parse_value, read
from novarl.core.errors import NovaError

Tree = TypeVar("Tree", bound=Config)

COMMAND_LINE = "command line"
SPOKEN = frozenset({"prompt", "system", "stop"})
"""Keys whose values are not paths."""
HOME = re.compile(r"(model:|)~[\w.-]*(?:/|$)")
OVERRIDE = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)


def load(
    tree: type[Tree],
    path: str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    preset: Mapping[str, Any] | None = None,
) -> Tree:
    """The preset, overridden by a file, overridden by `key=value` pairs. Later values win.

    >>> from novarl.config.tree import RLConfig
    >>> load(RLConfig, overrides=["task=sort", "learning_rate=1e-5"]).optim.lr
    1e-05
    """
    entries = list(entries_of(preset or {}, "preset", tree))
    if path is not None:
        mapping, lines = read(Path(path).expanduser())
        entries += entries_of(mapping, str(path), tree, lines=lines)
    for text in overrides:
        entries += _override(text, tree)
    return parse(tree, entries)


def parse(tree: type[Tree], entries: Sequence[Entry]) -> Tree:
    """A tree from the user's entries, whatever their source."""
    for entry in entries:
        if entry.path == "kind" and entry.value != tree.kind:
            fix = f"run novarl {entry.value}" if str(entry.value) in TREES else f"set kind: {tree.kind}"
            what = f"kind is {entry.value!r:.60}, but the command is novarl {tree.kind}"
            raise NovaError(what, where=entry.place, fix=fix)
    found = canonical([entry for entry in entries if entry.path != "kind"], tree)
    found = {path: replace(entry, value=_at_home(path, entry.value)) for path, entry in found.items()}
    try:
        return tree.model_validate(_nest(found)).with_notes(ignored(entries, tree))
    except ValidationError as error:
        raise _explain(error.errors()[0], found, tree) from None
    except NovaError as error:
        sources = (entry.source for entry in entries if entry.source not in (COMMAND_LINE, "preset"))
        place = _place(error.where, found) or error.where or next(sources, None)
        raise NovaError(error.what, where=place, fix=error.fix) from None


def peek_kind(path: str | Path) -> str | None:
    """The `kind` of a configuration file, if it states one."""
    kind = read(Path(path).expanduser())[0].get("kind")
    return kind if isinstance(kind, str) else None


def to_dict(config: Config) -> dict[str, Any]:
    """A tree as plain values, with its kind first; `load` reads it back."""
    return {"kind": config.kind, **config.model_dump(mode="json")}


def to_yaml(config: Config) -> str:
    """The text of a run's config.yaml."""
    return dump(to_dict(config))


def fill(config: Tree, values: Mapping[str, Any]) -> Tree:
    """The configuration with some values replaced, such as resolved nulls. What the user has not set stays unset."""
    entries = {path: Entry(path, value, path, "resolved") for path, value in values.items()}
    given = entries_of(config.model_dump(mode="json", exclude_unset=True), "resolved", type(config))
    filled = type(config).model_validate(_nest({entry.path: entry for entry in given} | entries))
    return filled.with_notes(config.notes)


def entries_of(
    mapping: Mapping[str, Any],
    source: str,
    tree: type[Config],
    *,
    lines: Mapping[str, int] | None = None,
    prefix: str = "",
) -> Iterator[Entry]:
    """Every value of nested mappings by its dotted path. A mapping as the value of a key replaces an earlier one."""
    lines = lines or {}
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        if value is None and ":" in name:
            line = f":{lines[path]}" if path in lines else ""
            fix = f"write {name.replace(':', ': ', 1):.60}"
            raise NovaError(
                f"{name[:60]!r} is a key without a value", where=f"{source}{line} {prefix[:-1]}".rstrip(), fix=fix
            )
        if not isinstance(value, dict) or not value:
            yield Entry(path, value, path, source, lines.get(path))
            continue
        if is_open(path, tree):
            yield Entry(path, {}, path, source, lines.get(path))
        yield from entries_of(value, source, tree, lines=lines, prefix=f"{path}.")


def _override(text: str, tree: type[Config]) -> Iterator[Entry]:
    match = OVERRIDE.fullmatch(text)
    if match is None:
        raise NovaError(f"expected key=value, got {text[:60]!r}", where=COMMAND_LINE, fix="write steps=100")
    name, value = match[1], match[2]
    alias = single(tree, Alias).get(name)
    key = keys(tree).get(alias.new[0] if alias else name)
    if key is not None and key.text and value.strip() not in ("", "null", "~"):
        yield Entry(name, value, name, COMMAND_LINE)
    else:
        yield from entries_of({name: parse_value(value, f"{COMMAND_LINE} {name[:120]}")}, COMMAND_LINE, tree)


def _nest(found: Mapping[str, Entry]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, entry in found.items():
        *around, name = path.split(".")
        inner = nested
        for part in around:
            inner = inner.setdefault(part, {})
        inner[name] = entry.value
    return nested


def _at_home(path: str, value: Any) -> Any:
    """A value with `~` or `~user` at the start of a path expanded, also in `model:~/runs/rm`; prompts are unchanged."""
    if path.rpartition(".")[2] in SPOKEN:
        return value
    if isinstance(value, list | tuple):
        return [_at_home(path, part) for part in value]
    found = HOME.match(value) if isinstance(value, str) else None
    return found[1] + os.path.expanduser(value[found.end(1) :]) if found else value


def _place(key: str | None, found: Mapping[str, Entry]) -> str | None:
    """Where the user gave a key, or the first of the keys within it."""
    if key is None or key in found:
        return found[key].place if key else None
    within = (replace(entry, path=key, given=key).place for path, entry in found.items() if path.startswith(f"{key}."))
    return next(within, None)


def _explain(error: ErrorDetails, found: Mapping[str, Entry], tree: type[Config]) -> NovaError:
    """pydantic's first error in one sentence."""
    parts = [str(part) for part in error["loc"]]
    path = ".".join(parts)
    entry = next((found[key] for size in range(len(parts), 0, -1) if (key := ".".join(parts[:size])) in found), None)
    what, fix = _phrase(error, path)
    leaf = keys(tree).get(entry.path) if entry else None
    if error["type"] == "literal_error" and entry is not None and leaf is not None and leaf.values.endswith("or list"):
        what = f"must be {leaf.values}, got {_short(entry.value)}"
        example = entry.value if isinstance(entry.value, str) and "," in entry.value else "q_proj,v_proj"
        fix = f"write lists in brackets: {entry.given}=[{example:.60}]"
    counted = error["type"] in ("missing", "too_short", "too_long") and isinstance(error["input"], list | tuple)
    if counted and entry is not None:
        usual = keys(tree)[entry.path].default
        what = f"must be {len(usual)} values, got {_short(entry.value)}"
        fix = f"for example {entry.path}={list(usual)}"
    return NovaError(what, where=entry.place if entry else path, fix=fix)


_NUMBER = "write a number such as 0.1 or 1e-5"
_RANGE = "choose a value in this range"
_PHRASES = {
    "missing": ("is required", "set {path}=value, or {path}: value in a file"),
    "tuple_type": ("must be a list, got {got}", "write it in brackets: [a, b]"),
    "dict_type": ("must be a mapping, got {got}", "write name: value"),
    "model_type": ("must be a mapping, got {got}", "write name: value"),
    "too_short": ("must not be empty", "remove it"),
    "extra_forbidden": ("unknown key", "remove it"),
    "int_type": ("must be a whole number, got {got}", "write digits only"),
    "int_from_float": ("must be a whole number, got {got}", "write digits only"),
    "float_type": ("must be a number, got {got}", _NUMBER),
    "finite_number": ("must be a finite number, got {got}", _NUMBER),
    "bool_type": ("must be true or false, got {got}", "write true or false"),
    "string_type": ("must be text, got {got}", "put it in quotes"),
    "string_too_short": ("must not be empty", "write a name, or remove it"),
    "string_pattern_mismatch": ("must be auto, cpu, cuda, cuda:N, mps or xpu, got {got}", "write auto"),
    "greater_than": ("must be above {gt}, got {got}", _RANGE),
    "greater_than_equal": ("must be at least {ge}, got {got}", _RANGE),
    "less_than": ("must be below {lt}, got {got}", _RANGE),
    "less_than_equal": ("must be at most {le}, got {got}", _RANGE),
    "temperature": ("must be 0 or at least {least}, got {got}", "use 0 for greedy decoding"),
    "value_error": ("{error}, got {got}", "write key: value"),
}
"""What is wrong and how to mend it, by pydantic's type of error."""


def _phrase(error: ErrorDetails, path: str) -> tuple[str, str]:
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    got = _short(value)
    if kind == "literal_error":
        choices = [choice.strip("'") for choice in re.split(", | or ", context["expected"])]
        near = nearest(str(value), choices)
        return f"must be {context['expected']}, got {got}", f"did you mean {near}?" if near else "use one of these"
    if kind not in _PHRASES:
        return f"{error['msg'][:1].lower()}{error['msg'][1:]}, got {got}", "see docs/names.md"
    what, fix = (text.format(got=got, path=path, **context) for text in _PHRASES[kind])
    if path == "reward" and kind in ("dict_type", "model_type"):
        fix = "write reward=file.py:name, or reward.a.source=a.py:x reward.b.source=b.py:y reward.b.weight=0.5"
    return what, fix


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
