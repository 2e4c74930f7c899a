"""What can be said of a name of another library's: the kinds of rows in the tables of `aliases` and `trl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TRAINING = ("rl", "sft", "dpo", "rm")
ON_ROWS = ("sft", "dpo", "rm")
EVERYWHERE = (*TRAINING, "eval", "sample")


@dataclass(frozen=True, slots=True)
class Alias:
    """`old` stands for every key of `new`; `implies` is set too, where nothing else says otherwise. Of the values, all
    have a partner, or only those of `values`; `elsewhere` are those that are a value of another key, and of which, and
    `otherwise` says what to write for others. It is known to `commands`, or to all that have the keys. At a value of
    `unset` it says nothing. A name that means something else in another project is understood only beside one of
    `only_beside`, which show whose it is; alone it is refused, and `otherwise` gives both meanings."""

    old: str
    new: tuple[str, ...]
    source: str
    example: Any
    convert: Callable[[Any], Any] | None = None
    implies: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    elsewhere: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    otherwise: str = ""
    commands: tuple[str, ...] = ()
    unset: tuple[Any, ...] = ()
    only_beside: frozenset[str] = frozenset()

    def still(self, path: str, value: Any) -> bool:
        """Whether `path` is implied as before where the key itself is `value` now, under whatever name."""
        return value not in (0, None) and not callable(self.implies[path])

    def implied(self, value: Any) -> dict[str, Any]:
        """What goes with it at a value; off, at 0 or null, nothing does."""
        if value in (0, None):
            return {}
        return {path: part(value) if callable(part) else part for path, part in self.implies.items()}


@dataclass(frozen=True, slots=True)
class Fixed:
    """`old` is accepted by `commands` only at one of `values`, and then changes nothing."""

    old: str
    values: tuple[Any, ...]
    source: str
    reason: str
    commands: tuple[str, ...] = ("rl",)


@dataclass(frozen=True, slots=True)
class Hint:
    """`old`, and every key within it, is refused by `commands`: the reason, and what to do instead."""

    old: str
    what: str
    fix: str
    source: str = "TRL"
    commands: tuple[str, ...] = TRAINING


def rows(source: str, example: Any, new: str, *olds: str) -> list[Alias]:
    """Several names of one key, each with an example of its values."""
    return [Alias(old, (new,), source, example) for old in olds]


def hinted(source: str, what: str, fix: str, *olds: str, commands: tuple[str, ...] = TRAINING) -> list[Hint]:
    """Several names that are refused for one reason."""
    return [Hint(old, what, fix, source, commands) for old in olds]


def later(source: str, feature: str, fix: str, *olds: str, commands: tuple[str, ...] = TRAINING) -> list[Hint]:
    """Several names of a feature that is planned."""
    return hinted(source, f"Not supported yet: {feature}", fix, *olds, commands=commands)


def off_at_zero(value: Any) -> Any:
    """null where another library writes 0 for none."""
    return None if value == 0 and not isinstance(value, bool) else value
