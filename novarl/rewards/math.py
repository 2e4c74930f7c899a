r"""Mathematical answers: find the final answer in a text and compare it with the reference.

The final answer of a text is, by the first rule that finds one,

    1. what follows the last `####` on its line (GSM8K's form)
    2. the content of the last \boxed{...}, braces balanced
    3. the last number

A reference is what it says by the first two rules; else the whole of it, such as "2\sqrt{3}" or "(3, 4)". A number
after its last equals sign, or the last one of a sentence, will do for it as well.

Plain numbers are read exactly, as fractions, and compared here: "1,234.50", "-3/4", "\frac{3}{4}", "$12", "2.5e3",
"50%" (50 or 0.5). Everything else goes to math-verify, in a process of its own (`isolated.symbolic`): "\frac12",
"90^\circ", "5\text{ cm}", "x=5", "\sqrt{12}". Numbers agree as they do in math-verify: whole numbers and fractions
when they are equal, a decimal and another decimal or a fraction when they are equal to six places. With a `tolerance`,
numbers that are not both whole also agree when |a - b| <= tolerance * max(1, |b|).
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from novarl.core.types import Rollout
from novarl.rewards.loaded_file import Call
from novarl.rewards.per_rollout import by_answer
from novarl.rewards.user_file import TIME_LIMIT
from novarl.rewards.user_process import UserProcess
from novarl.rewards.verdict import Failure, Verdict

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d{1,3})?"
_NUMBER_OR_FRACTION = re.compile(rf"(?<![\w.]){_NUMBER}(?:\s*/\s*{_NUMBER})?")
_WHOLE = re.compile(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?")
_FRAC = re.compile(r"(?<!\d)\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_MARKED = re.compile(r"#{4}[ \t]*([^\n#]+)")
_END_OF_TEXT = re.compile(r"(?:</s>|<\|[a-z_]+\|>)\s*$")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_UNIT = re.compile(r"(?<=[\d.])\s+(?!(?:hundred|thousand|million|billion|trillion|dozen)\b)[A-Za-z]{3}[A-Za-z .]*$")
_LATEX = re.compile(r"\\[A-Za-z(\[]")
_MOST_DIGITS = 300
"""Longer digit strings are not answers; exact arithmetic on them would only cost time."""
_PLACES = 6
"""Decimals agree when they are equal to so many places."""

FILE = Path(__file__).parent / "isolated" / "symbolic.py"


def extract(text: str) -> str | None:
    r"""The final answer of a text, as written, or None where there is none.

    >>> extract("48/2 = 24 and 48+24 = 72\n#### 72"), extract(r"so \boxed{\frac{1}{2}} of 3"), extract("about 1,234.")
    ('72', '\\frac{1}{2}', '1,234')
    """
    marked = _marked(text)
    return _last_number(text) if marked is None else marked


def parse(answer: str) -> Fraction | None:
    r"""The exact value of an answer that is one number, plain words for a unit behind it allowed, or None.

    >>> parse("$1,234.50"), parse(r"-\frac{3}{4}"), parse("3 / 4"), parse("5 apples"), parse("1/0"), parse("two")
    (Fraction(2469, 2), Fraction(-3, 4), Fraction(3, 4), Fraction(5, 1), None, None)
    """
    text = _UNIT.sub("", _normal(answer))
    match = _WHOLE.fullmatch(text)
    if match is None or len(text) > _MOST_DIGITS:
        return None
    top, bottom = (Fraction(part.replace(",", "").rstrip(".")) if part else Fraction(1) for part in match.groups())
    return top / bottom if bottom else None


def grade(given: str, reference: str, *, tolerance: float = 0.0) -> bool | None:
    """Whether two answers agree, as numbers where both are, else as text; None where that takes math-verify."""
    a, b = parse(given), parse(reference)
    if a is None or b is None:
        return _plain(given) == _plain(reference) or None
    if a == b:
        return True
    if ("%" in given) != ("%" in reference):
        a, b = (a / 100, b) if "%" in given else (a, b / 100)
        if a == b:
            return True
    if a.denominator == b.denominator == 1:
        return False
    one_is_whole = a.denominator == 1 or b.denominator == 1
    if not one_is_whole and "." in given + reference and round(a, _PLACES) == round(b, _PLACES):
        return True
    return abs(a - b) <= Fraction(repr(tolerance)) * max(Fraction(1), abs(b))


def correct(text: str, answer: Any, *, tolerance: float = 0.0) -> float | None:
    """1.0 where the text's final answer agrees with the reference, 0.0 where it does not, None where only math-verify
    can tell. An answer that is no number may also end a text as it stands, unmarked.

    Errors: ValueError for a reference without an answer in it: that is the data's fault, not the policy's.
    """
    expected = _expected(str(answer)) if answer is not None else []
    if not expected:
        raise ValueError(f"the row's reference answer {answer!r} contains no answer")
    given, marked = extract(text), _marked(text) is not None
    found = [grade(given, one, tolerance=tolerance) for one in expected] if given is not None else []
    if any(found) or (not marked and parse(expected[0]) is None and _ends_with(text, expected[0])):
        return 1.0
    number = parse(expected[-1]) is not None
    if marked:
        return 0.0 if number and parse(given or "") is not None else None
    return None if _LATEX.search(text) or ("$" in text and not number) else 0.0


class MathReward:
    """Correctness of the final answer as a reward: 1.0 or 0.0. A comparison that runs past `time_limit` (seconds) fails
    that rollout alone. The process for math-verify starts with the first answer that needs it."""

    def __init__(self, *, tolerance: float = 0.0, time_limit: float = TIME_LIMIT) -> None:
        self.tolerance, self.time_limit = tolerance, time_limit
        self._quick = by_answer(lambda text, answer: correct(text, answer, tolerance=tolerance))
        self._process: UserProcess | None = None
        self._lock = threading.Lock()

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        verdicts = await self._quick(rollouts)
        places = [place for place, verdict in enumerate(verdicts) if verdict is None]
        if places:
            process = await asyncio.to_thread(self._started)
            calls: list[Call] = [(self._question(rollouts[place]), {}) for place in places]
            for place, equal in zip(places, await process.call(process.function("equal"), calls), strict=True):
                verdicts[place] = equal if isinstance(equal, Failure) else float(equal)
        return verdicts

    def close(self) -> None:
        """End the process, where there is one."""
        if self._process is not None:
            self._process.close()

    def _question(self, rollout: Rollout) -> tuple[Any, ...]:
        """The arguments of `isolated.symbolic.equal`."""
        marked = _marked(rollout.text)
        given = rollout.text if marked is None else marked
        expected = _expected(str(rollout.prompt.answer))
        if not _WORD.search(expected[0]):
            del expected[1:]  # math-verify itself knows when the number of "x = 5" will do
        return given, expected, marked is not None, self.tolerance

    def _started(self) -> UserProcess:
        with self._lock:
            if self._process is None:
                self._process = UserProcess(FILE, time_limit=self.time_limit, workers=None)
            return self._process


def _marked(text: str) -> str | None:
    """The answer by the first two rules."""
    found = _MARKED.findall(text)[-1:] or [_last_boxed(text)]
    return None if found[0] is None else _END_OF_TEXT.sub("", found[0]).strip()


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
