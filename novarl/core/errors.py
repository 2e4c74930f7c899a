"""The error class for user mistakes."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """A fix that suggests the closest of `known`. Among similar candidates, an anagram is preferred.

    >>> nearest("gpro", ["gspo", "grpo"]), nearest("x", ["grpo", "ppo"])
    ('did you mean grpo?', 'one of grpo, ppo')
    """
    choices = list(known)
    close = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    close.sort(key=lambda choice: sorted(choice) != sorted(name))
    return f"did you mean {close[0]}?" if close else f"one of {', '.join(choices)}"


_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_RAW = re.compile(f"[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029{_BIDI}\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` made safe for a terminal: control characters (except tab and newline), bidirectional marks and lone
    surrogates are escaped.

    >>> print(visible("a\\x1b[2J\\u202eb"))
    a\\x1b[2J\\u202eb
    """
    return _RAW.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def wrapped(text: str, width: int = 80, *, hanging: str = "  ") -> list[str]:
    """The lines of `text`, broken between words only: paths and commands stay whole, however long they are."""
    if len(text) <= width:
        return [text]
    wrapper = textwrap.TextWrapper(width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


class NovaError(Exception):
    """A mistake that the user can fix: what happened, where, and how to fix it.

    The command line prints it as one line and exits with its `code`, 2; any other exception is a bug (code 1).

    >>> str(NovaError("unknown role 'usr'", where="chat.jsonl:3 messages[0].role", fix="use 'user'"))
    "chat.jsonl:3 messages[0].role: unknown role 'usr' (use 'user')"
    """

    code: int = 2

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what)

    @property
    def each(self) -> tuple[NovaError, ...]:
        """The individual mistakes."""
        return (self,)

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        fix = f" ({self.fix})" if self.fix else ""
        return visible(" ".join(f"{where}{self.what}{fix}".split()))


class NotFinite(NovaError):
    """A gradient or a model's output is NaN or infinite. Weights and moments are those of before the update."""

    def add(self, origin: str) -> None:
        """Name the place where the number arises."""
        self.what = f"{self.what}: {origin}"
        self.args = (self.what,)


class LostRank(NovaError):
    """Another process of the run has terminated or does not respond."""

    code = 3


class NovaErrors(NovaError):
    """Several mistakes at once. The command line prints one line for each.

    >>> str(NovaErrors([NovaError("unknown key", where="a.yaml:1 x"), NovaError("unknown key", where="a.yaml:2 y")]))
    'a.yaml:1 x: unknown key; a.yaml:2 y: unknown key'
    """

    def __init__(self, each: Sequence[NovaError]) -> None:
        super().__init__(each[0].what, where=each[0].where, fix=each[0].fix)
        self._each = tuple(each)

    @property
    def each(self) -> tuple[NovaError, ...]:
        return self._each

    def __reduce__(self) -> tuple[Any, ...]:
        return NovaErrors, (self._each,)

    def __str__(self) -> str:
        return "; ".join(map(str, self.each))
