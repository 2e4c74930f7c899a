"""The kinds of rows in the tables of other libraries' names (`tables` reads them, `names` applies them)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TRAINING = ("rl", "sft", "dpo", "rm")
SEVERAL = "several"
"""The source of a name that means the same in several libraries, and so does not show which one a config is from."""
NULL_COUNTS = frozenset({"RL2", "NovaRL"})
"""Libraries whose configs use null as a value. In other libraries' configs, which list every setting, null is unset."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of one of our keys, or of several."""

    old: str
    new: tuple[str, ...]
    source: str
    example: Any
    convert: Callable[[Any], Any] | None = None
    """Translates a value."""
    each: bool = False
    """The value is a list with one value for each key of `new`."""
    implies: Mapping[str, Any] = field(default_factory=dict)
    """Other keys that are set too, unless they are given."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that other keys must have (null if not given); otherwise the name is refused, and `otherwise` says why."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Translations of values. If there are any, other values are refused, with `otherwise` as the fix."""
    elsewhere: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Values that belong to another key: what they are, and what to set."""
    otherwise: str = ""
    unset: tuple[Any, ...] = ()
    """Values that mean the same as leaving the name out."""
    note: str = ""
    means: str = ""
    """The meaning in its library, for a name that means something else in another one."""
    commands: tuple[str, ...] = ()
    """Commands that know the name; by default all that have the keys of `new`."""

    def still(self, path: str, value: Any) -> bool:
        """Whether `path` stays implied after the key itself is set to `value`, under any name."""
        return value not in (0, None) and not callable(self.implies[path])

    def implied(self, value: Any) -> dict[str, Any]:
        """The implied keys at a value: none at 0 or null."""
        if value in (0, None):
            return {}
        return {path: part(value) if callable(part) else part for path, part in self.implies.items()}


@dataclass(frozen=True, slots=True)
class Fixed:
    """A name that is accepted only at one of `values`, where it changes nothing."""

    old: str
    values: tuple[Any, ...]
    source: str
    reason: str
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ignored:
    """A name that is accepted at any value and changes nothing; a note gives the reason. With `beside`, it is ignored
    only if that key is given, and otherwise refused with `fix`."""

    old: str
    reason: str
    source: str
    commands: tuple[str, ...]
    beside: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Hint:
    """A name that is refused, as is every key within it: the reason, and what to do instead."""

    old: str
    what: str
    fix: str
    source: str
    commands: tuple[str, ...]


Row = Alias | Fixed | Ignored | Hint
