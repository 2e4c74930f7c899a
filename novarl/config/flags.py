"""Command-line arguments: `--some-key value`, `--flag`, `--no-flag`, `--many a b`, `key=value`, and one file.

The key decides how many words a flag takes, never the form of the next word: `--packing` takes only `true` or `false`,
`--reward_funcs` takes all words up to the next flag, any other flag takes one.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from novarl.config.base import Config
from novarl.config.foreign.rows import Alias, Fixed
from novarl.config.keys import is_key, keys
from novarl.config.load import COMMAND_LINE, OVERRIDE
from novarl.config.names import rows_of
from novarl.core.errors import NovaError

Takes = Literal["truth", "many", "one", "unknown"]

_TRUTH = {"true": "true", "yes": "true", "on": "true", "1": "true"}
_TRUTH |= {"false": "false", "no": "false", "off": "false", "0": "false"}
_CONFIG_FILE = re.compile(r".+\.(ya?ml|toml|json)", re.IGNORECASE)
_BARE = re.compile(r"[\w./:@+-]+")


def arguments(words: list[str], tree: type[Config]) -> tuple[str | None, list[str]]:
    """The configuration file, if any, and the rest as `key=value`. NovaError for an unexpected word.

    >>> from novarl.config.tree import RLConfig
    >>> arguments(["--gradient_checkpointing", "a.yaml", "--reward-funcs", "a.py:x", "b.py:y", "--seed=3"], RLConfig)
    ('a.yaml', ['gradient_checkpointing=true', 'reward_funcs=[a.py:x, b.py:y]', 'seed=3'])
    """
    path: str | None = None
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        file: str | None = None
        if word.startswith("--"):
            name, value = _flag(word, rest, tree)
            if name == "config":
                file = value
            else:
                overrides.append(f"{name}={value}")
        elif OVERRIDE.fullmatch(word):
            overrides.append(word)
        else:
            file = word
        if file is not None and path is not None:
            what = f"expected key=value, got {file[:60]!r}: the configuration file is already {path[:60]}"
            raise NovaError(what, where=COMMAND_LINE, fix="give one file, then key=value pairs")
        path = path if file is None else file
    return path, overrides


def _flag(word: str, rest: list[str], tree: type[Config]) -> tuple[str, str]:
    """The key and the value of a flag; removes the words that belong to it from `rest`."""
    name, equals, value = word[2:].partition("=")
    name = name.replace("-", "_")
    kind = takes(name, tree)
    if kind == "unknown" and name.startswith("no_") and takes(name[3:], tree) == "truth" and not equals:
        return name[3:], "false"
    if kind == "truth":
        given = value if equals else rest.pop(0) if rest and rest[0].lower() in _TRUTH else "true"
        return name, _TRUTH.get(given.lower(), given)
    if equals:
        return name, value
    found = _following(rest, path_follows=kind != "one")
    if kind == "one":
        del found[1:]
        if not found and rest and not rest[0].startswith("--"):
            found = rest[:1]  # such as a path with an equals sign
    del rest[: len(found)]
    if found:
        return name, _listed(found) if kind == "many" or len(found) > 1 else found[0]
    if kind == "unknown":
        return name, "true"
    raise NovaError(f"{word[:60]} needs a value", where=COMMAND_LINE, fix=f"write {name[:60]}=value")


def _following(rest: list[str], *, path_follows: bool) -> list[str]:
    """The words up to the next flag or `key=value`; with `path_follows` also up to a configuration file."""
    found = []
    for word in rest:
        if word.startswith("--") or OVERRIDE.fullmatch(word) or (path_follows and _CONFIG_FILE.fullmatch(word)):
            break
        found.append(word)
    return found


def takes(name: str, tree: type[Config]) -> Takes:
    """What follows a flag of this name."""
    if name == "config":
        return "one"
    if name in ("reward_funcs", "reward_weights"):
        return "many"
    if name == "use_peft":
        return "truth"
    key = keys(tree).get(name)
    row = next(iter(rows_of(name, tree)), None)
    if isinstance(row, Alias):
        if isinstance(row.example, bool) and (row.values or row.convert is None):
            return "truth"
        return "many" if isinstance(row.example, list) else "one"
    if isinstance(row, Fixed):
        return "truth" if isinstance(row.values[0], bool) else "one"
    if row is not None:
        return "unknown"
    if key is not None:
        if key.values.startswith("true, false"):
            return "truth"
        return "many" if "list" in key.values else "one"
    if f"{name}.enabled" in keys(tree):
        return "truth"
    return "one" if is_key(name, tree) else "unknown"


def _listed(words: list[str]) -> str:
    """Several words as a list. Commas between them are separators; one word that is already a list is unchanged."""
    parts: list[Any] = [word.rstrip(",") for word in words]
    parts = [part for part in parts if part]
    if len(parts) == 1:
        return str(parts[0])
    return f"[{', '.join(part if _BARE.fullmatch(part) else json.dumps(part) for part in parts)}]"
