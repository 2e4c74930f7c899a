"""What can be said of another project's name: the kinds of rows in the tables `rl2`, `trl`, `openrlhf`, `verl` and
`others`. The tables are data; `names` reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

TRAINING = ("rl", "sft", "dpo", "rm")
ON_ROWS = ("sft", "dpo", "rm")
SEVERAL = "several"
"""The source of a name that means the same in several projects, and so does not say whose a configuration is."""
NULL_COUNTS = frozenset({"RL2", "NovaRL"})
"""Projects in whose configurations null is a value. In those of others, which list every setting, it says nothing."""


@dataclass(frozen=True, slots=True)
class Alias:
    """`old` stands for every key of `new`; with `each`, a list has a value for each of them. `implies` is set too,
    where nothing else says otherwise. Where a key of `needs` is none of its values (null where nobody sets it), the
    name is refused: `otherwise` says why. Of the values, all have a partner, or only those of `values`; `elsewhere` are
    those that are a value of another key, and of which, and `otherwise` says what to write for others. The name is
    known to `commands`, or to all that have the keys. At a value of `unset` it says nothing. `means` is what it means
    in its project, for a name that means something else in another."""

    old: str
    new: tuple[str, ...]
    source: str
    example: Any
    convert: Callable[[Any], Any] | None = None
    implies: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    note: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    elsewhere: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    otherwise: str = ""
    commands: tuple[str, ...] = ()
    unset: tuple[Any, ...] = ()
    each: bool = False
    means: str = ""

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
    source: str
    commands: tuple[str, ...] = TRAINING


Row = Alias | Fixed | Hint


def rows(source: str, example: Any, new: str, *olds: str, commands: tuple[str, ...] = ()) -> list[Alias]:
    """Several names of one key, each with an example of its values."""
    return [Alias(old, (new,), source, example, commands=commands) for old in olds]


def hinted(source: str, what: str, fix: str, *olds: str, commands: tuple[str, ...] = TRAINING) -> list[Hint]:
    """Several names that are refused for one reason."""
    return [Hint(old, what, fix, source, commands) for old in olds]


def later(source: str, feature: str, fix: str, *olds: str, commands: tuple[str, ...] = TRAINING) -> list[Hint]:
    """Several names of a feature that is planned."""
    return hinted(source, f"not supported yet: {feature}", fix, *olds, commands=commands)


def as_many(value: Any) -> Any:
    """What is implied by a number of passes: as many updates."""
    return value


def off_at_zero(value: Any) -> Any:
    """null where another project writes 0 for none."""
    return None if value == 0 and not isinstance(value, bool) else value


def never_at_minus_one(value: Any) -> Any:
    """null where another project writes -1 for never."""
    return None if value == -1 else value
