r"""Mathematical answers: find the final answer in a text and compare it with the reference, without `eval`.

The final answer of a text is, by the first rule that finds one,

    1. what follows the last `####` on its line (GSM8K's form)
    2. the content of the last \boxed{...}, braces balanced
    3. the last number

A reference is what it says by the first two rules; else the whole of it, such as "2\sqrt{3}" or "(3, 4)". A number
after its last equals sign, or the last one of a sentence, will do for it as well.

Numbers are read exactly, as fractions: "1,234.50", "-3/4", "\frac{3}{4}", "$12", "50%" (its 50), "2.5e3". Whole numbers
agree when they are equal, other numbers when |a - b| <= tolerance * max(1, |b|). Answers that are not numbers agree
when they are equal but for case, white space, dollar signs and a final full stop.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from novarl.rewards.per_rollout import PerRollout, by_answer

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d{1,3})?"
_NUMBER_OR_FRACTION = re.compile(rf"(?<![\w.]){_NUMBER}(?:\s*/\s*{_NUMBER})?")
_WHOLE = re.compile(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?")
_FRAC = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_MARKED = re.compile(r"#{4}[ \t]*([^\n#]+)")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MOST_DIGITS = 300
"""Longer digit strings are not answers; exact arithmetic on them would only cost time."""


def extract(text: str) -> str | None:
    r"""The final answer of a text, as written, or None where there is none.

    >>> extract("48/2 = 24 and 48+24 = 72\n#### 72"), extract(r"so \boxed{\frac{1}{2}} of 3"), extract("about 1,234.")
    ('72', '\\frac{1}{2}', '1,234')
    """
    marked = _marked(text)
    return _last_number(text) if marked is None else marked


def parse(answer: str) -> Fraction | None:
    r"""The exact value of an answer that is one number, or None.

    >>> parse("$1,234.50"), parse(r"-\frac{3}{4}"), parse("3 / 4"), parse("1/0"), parse("two")
    (Fraction(2469, 2), Fraction(-3, 4), Fraction(3, 4), None, None)
    """
    text = _normal(answer)
    match = _WHOLE.fullmatch(text)
    if match is None or len(text) > _MOST_DIGITS:
        return None
    top, bottom = (Fraction(part.replace(",", "").rstrip(".")) if part else Fraction(1) for part in match.groups())
    return top / bottom if bottom else None


def grade(given: str, reference: str, *, tolerance: float = 1e-6) -> bool:
    """Whether two answers agree, as numbers where both are, else as text."""
    a, b = parse(given), parse(reference)
    if a is None or b is None:
        return _plain(given) == _plain(reference)
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= Fraction(repr(tolerance)) * max(Fraction(1), abs(b))


def correct(text: str, answer: Any, *, tolerance: float = 1e-6) -> float:
    """1.0 where the text's final answer agrees with the reference, else 0.0. One that is no number may also end a text
    as it stands, unmarked.

    Errors: ValueError for a reference without an answer in it: that is the data's fault, not the policy's.
    """
    expected = _expected(str(answer)) if answer is not None else []
    if not expected:
        raise ValueError(f"the row's reference answer {answer!r} holds no answer")
    given = extract(text)
    agree = given is not None and any(grade(given, one, tolerance=tolerance) for one in expected)
    return float(agree or (_marked(text) is None and parse(expected[0]) is None and _ends_with(text, expected[0])))


def math(*, tolerance: float = 1e-6) -> PerRollout:
    """Correctness of the final answer as a reward."""
    return by_answer(lambda text, answer: correct(text, answer, tolerance=tolerance))


def _marked(text: str) -> str | None:
    """The answer by the first two rules."""
    found = _MARKED.findall(text)[-1:] or [_last_boxed(text)]
    return None if found[0] is None else found[0].strip()


def _last_number(text: str) -> str | None:
    numbers = _NUMBER_OR_FRACTION.findall(_normal(text))
    return numbers[-1].rstrip(".") if numbers else None


def _expected(reference: str) -> list[str]:
    """The answers that will do for a reference, the most literal one first; [] where it holds none."""
    whole = _marked(reference) or reference.strip()
    if whole != reference.strip() or parse(whole) is not None:
        return [whole]
    value = whole.rpartition("=")[2].strip()
    if parse(value) is None:
        value = (_last_number(whole) if _WORD.search(whole) else None) or ""
    return [answer for answer in (whole, value) if answer]


def _ends_with(text: str, answer: str) -> bool:
    """Whether the answer stands at a text's end, and is not the end of a longer expression."""
    wanted = re.escape(answer.strip("$. "))
    return re.search(rf"(?:^|[^\s+*/^-]\s+|[:=$]){wanted}[\s.$]*$", text) is not None


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len(r"\boxed{")
    for place in range(begin, len(text)):
        if text[place] == "}" and depth == 0:
            return text[begin:place]
        depth += {"{": 1, "}": -1}.get(text[place], 0)
    return None


def _normal(text: str) -> str:
    """Numbers in one spelling: plain minus, plain fractions, no currency, per cent or LaTeX spacing."""
    text = text.replace("\u2212", "-").replace(r"\!", "").replace(r"\,", "").replace(r"\%", "").replace(r"\$", "")
    return re.sub(r"[$%€£]", "", _FRAC.sub(r"\1/\2", text)).strip()


def _plain(text: str) -> str:
    return "".join(text.replace("$", "").casefold().split()).rstrip(".")
