"""Whether two mathematical answers are equal, by math-verify (LaTeX -> SymPy -> comparison).

It runs in a process of its own: comparing two expressions can take for ever, and SymPy evaluates what it parses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify
from sympy import Pow, factorial, preorder_traversal

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its own time limits are off: the process has one

MOST_CHARACTERS = 2000
"""Only the end of a longer text is searched for an answer."""
LARGEST_EXPONENT = 10_000
"""Powers and factorials beyond are not evaluated; an answer that has one is not equal to the reference."""


def equal(given: str, references: Sequence[str], marked: bool, tolerance: float) -> bool:
    r"""Whether an answer equals one of the references.

    given:     the content of \boxed{...}, or the whole text where `marked` is false; then math-verify looks for the
               answer in it
    tolerance: numbers also agree when |a - b| <= tolerance * max(1, |b|)
    """
    found = _parse(_boxed(given) if marked else given[-MOST_CHARACTERS:])
    if not found or any(map(_too_large, found)):
        return False
    expected = [_parse(_boxed(reference)) for reference in references]
    if any(verify(one, found, timeout_seconds=None) for one in expected):
        return True
    return tolerance > 0 and any(_close(a, b, tolerance) for a in found for one in expected for b in one)


def _boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"


def _parse(text: str) -> list[Any]:
    found: list[Any] = parse(text, parsing_timeout=None)
    return found


def _too_large(expression: Any) -> bool:
    """Whether it holds a power or factorial that would take too long to evaluate."""
    if isinstance(expression, str):
        return False
    for part in preorder_traversal(expression):
        if isinstance(part, Pow | factorial):
            exponent = part.args[-1]
            if exponent.is_number and (exponent.has(Pow, factorial) or abs(exponent.evalf()) > LARGEST_EXPONENT):
                return True
    return False


def _close(a: Any, b: Any, tolerance: float) -> bool:
    try:
        a, b = (complex(getattr(one, "rhs", one).evalf()) for one in (a, b))
    except (AttributeError, TypeError, ValueError, OverflowError):  # texts, symbols, sets
        return False
    return abs(a - b) <= tolerance * max(1.0, abs(b))
