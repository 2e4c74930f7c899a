"""Read configuration files (YAML, TOML, JSON) as plain mappings, with the line of every YAML key.

YAML uses the core schema of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): 1e-5 is a number, `no` and
2024-01-01 are strings, 010 is ten. Duplicate keys are rejected in all three formats.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from novarl.core.errors import NovaError

Lines = dict[str, int]
"""The line of each dotted key, if known."""

_MOST = 10_000
"""A limit on values, because nested aliases could expand without bound."""

_DEEPEST = 100
"""Maximum nesting of a configuration file."""

_TAG = "tag:yaml.org,2002:"
_RULES: dict[str, tuple[re.Pattern[str], Callable[[str], Any]]] = {
    "null": (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    "bool": (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    "int": (
        re.compile(r"[-+]?[0-9]{1,400}|0o[0-7]{1,400}|0x[0-9a-fA-F]{1,400}"),
        lambda text: int(text, 0 if text[:2] in ("0o", "0x") else 10),
    ),
    "float": (
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
        lambda text: float(text.replace(".", "") if text[-1] in "fFnN" else text),
    ),
}


class CoreLoader(yaml.SafeLoader):
    """Reads the core schema of YAML 1.2."""


class CoreDumper(yaml.SafeDumper):
    """Writes YAML that `CoreLoader` reads back exactly."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes some line separators unquoted and reads them back as blanks; double quotes preserve them.
    return dumper.represent_scalar(f"{_TAG}str", text, style=None if text.isprintable() else '"')


CoreDumper.add_representer(str, _represent_text)
for _user in (CoreLoader, CoreDumper):
    _user.yaml_implicit_resolvers = {}  # remove the inherited YAML 1.1 resolvers
    for _name, (_pattern, _) in _RULES.items():
        _user.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern.pattern})\Z"), None)


def read(path: Path) -> tuple[dict[str, Any], Lines]:
    """The mapping in a configuration file and the lines of its keys. Raises NovaError if there is none."""
    parse = {".yaml": _yaml, ".yml": _yaml, ".toml": _toml, ".json": _json}.get(path.suffix.lower())
    if parse is None:
        fix = "name it .yaml, .toml or .json" if path.suffix else f"to set a key, write {path}=value"
        raise NovaError("a configuration must be a YAML, TOML or JSON file", where=str(path), fix=fix)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise NovaError("no such configuration file", where=str(path), fix="check the path") from None
    except UnicodeDecodeError as error:
        raise NovaError(f"not UTF-8 text (byte {error.start})", where=str(path), fix="save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise NovaError(f"cannot be read: {error}", where=str(path), fix="check the path") from None
    if not text.strip():
        raise NovaError("the file is empty", where=str(path), fix="set at least task or data")
    try:
        value, lines = parse(text, path)
        _check_depth(value)
    except RecursionError:
        raise NovaError(
            "the file is nested too deeply", where=str(path), fix="a configuration has two levels"
        ) from None
    if value is None:
        raise NovaError("the file contains only comments", where=str(path), fix="set at least task or data")
    if not isinstance(value, dict):
        kinds = {list: "list", str: "text", int: "number", float: "number", bool: "truth value"}
        what = f"expected `key: value` lines, found a {kinds.get(type(value), 'value')}"
        raise NovaError(what, where=str(path), fix="write task: sort")
    return value, lines


def _check_depth(value: Any) -> None:
    """Raise RecursionError for values nested too deeply, such as TOML's dotted keys."""
    level = [value]
    for _ in range(_DEEPEST):
        groups = [list(part.values()) if isinstance(part, dict) else part for part in level]
        level = [item for group in groups if isinstance(group, list) for item in group]
    if level:
        raise RecursionError


def parse_value(text: str, where: str) -> Any:
    """The value in `key=value`: a YAML scalar, or a list or mapping in brackets.

    >>> parse_value("1e-5", ""), parse_value("null", ""), parse_value("[a, 2]", ""), parse_value("a: b", "")
    (1e-05, None, ['a', 2], 'a: b')
    """
    text = text.strip()
    if not text:
        raise NovaError("the value after `=` is missing", where=where, fix="use key=null for no value")
    if text[0] not in "[{\"'":
        return _plain(text)
    try:
        value, _ = _yaml(text, Path())
    except (NovaError, RecursionError):
        raise NovaError(f"not a value: {text[:60]}", where=where, fix="close every bracket and quote") from None
    return value


def dump(value: Mapping[str, Any]) -> str:
    """YAML that `read` reads back exactly."""
    return yaml.dump(value, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, width=120)


def _plain(text: str) -> Any:
    return next((convert(text) for pattern, convert in _RULES.values() if pattern.fullmatch(text)), text)


def _yaml(text: str, path: Path) -> tuple[Any, Lines]:
    try:
        node = yaml.compose(text, Loader=CoreLoader)
    except yaml.MarkedYAMLError as error:
        where = f"{path}:{error.problem_mark.line + 1}" if error.problem_mark else str(path)
        raise NovaError(f"not YAML: {error.problem}", where=where, fix="fix this line") from None
    except yaml.YAMLError as error:
        raise NovaError(f"not YAML: {error}", where=str(path), fix="save it as plain text") from None
    lines: Lines = {}
    return (None if node is None else _Reader(path, lines).value(node, "", ())), lines


class _Reader:
    """Converts YAML nodes to values and records lines. Rejects constructs that a configuration does not need."""

    def __init__(self, path: Path, lines: Lines) -> None:
        self.path, self.lines = path, lines
        self.seen = 0

    def error(self, node: yaml.Node, what: str, fix: str) -> NovaError:
        return NovaError(what, where=f"{self.path}:{node.start_mark.line + 1}", fix=fix)

    def value(self, node: yaml.Node, key: str, around: tuple[int, ...]) -> Any:
        """`around` are the enclosing nodes: an alias to one of them would be infinite."""
        if id(node) in around:
            raise self.error(node, "an alias refers to a node that contains it", "write the value out")
        self.seen += 1
        if self.seen > _MOST:
            raise self.error(node, f"more than {_MOST:,} values", "a configuration has a few dozen")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key, (*around, id(node)))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, key, (*around, id(node))) for child in node.value]
        rule = node.tag.removeprefix(_TAG)
        if rule == "str":
            return node.value
        if rule not in _RULES or not _RULES[rule][0].fullmatch(node.value):
            raise self.error(node, f"unknown type {node.tag}", "remove the tag")
        return _RULES[rule][1](node.value)

    def mapping(self, node: yaml.MappingNode, key: str, around: tuple[int, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name_node, child in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else None
            if not name:
                raise self.error(name_node, "keys must be strings", "write key: value")
            if name in found:
                raise self.error(name_node, f"the key {name} is defined twice", "remove one of them")
            dotted = f"{key}.{name}" if key else name
            self.lines[dotted] = name_node.start_mark.line + 1
            found[name] = self.value(child, dotted, around)
        return found


def _toml(text: str, path: Path) -> tuple[Any, Lines]:
    try:
        return tomllib.loads(text), {}
    except ValueError as error:
        raise NovaError(f"not TOML: {error}", where=str(path), fix="fix the file") from None


def _json(text: str, path: Path) -> tuple[Any, Lines]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise NovaError(f"the key {twice} is defined twice", where=str(path), fix="remove one of them")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique), {}
    except json.JSONDecodeError as error:
        raise NovaError(f"not JSON: {error.msg}", where=f"{path}:{error.lineno}", fix="fix this line") from None
    except ValueError as error:
        raise NovaError(f"not JSON: {error}", where=str(path), fix="fix the file") from None
