"""Finding and comparing mathematical answers."""

from __future__ import annotations

import asyncio
import json
import time
from fractions import Fraction

import pytest

from novarl.rewards import math


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("48/2 = 24\n#### 72", "72"),
        ("#### 5\nwait\n#### 1,234 \nbye 9", "1,234"),
        (r"first \boxed{3}, then \boxed{\frac{1}{2}} of 7", r"\frac{1}{2}"),
        (r"\boxed{{a}{b}}", "{a}{b}"),
        (r"an open \boxed{3 and 4", "4"),
        ("it costs $1,234.50.", "1,234.50"),
        ("48-24=24", "24"),
        ("from 5 to -3", "-3"),
        ("half is 3/4", "3/4"),
        ("10 - 3", "3"),
        ("version 1.2.3", "1.2"),
        ("x5 and abc", None),
        ("no number", None),
        ("", None),
    ],
)
def test_extract(text: str, answer: str | None) -> None:
    assert math.extract(text) == answer


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("72", Fraction(72)),
        ("072.", Fraction(72)),
        ("-1,234,567.5", Fraction(-2469135, 2)),
        ("12,34", None),
        ("$12", Fraction(12)),
        ("50%", Fraction(50)),
        (r"\$1{,}000", None),
        (".5", Fraction(1, 2)),
        ("2.5e3", Fraction(2500)),
        ("3/4", Fraction(3, 4)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\dfrac{3}{4}", Fraction(3, 4)),
        ("\u22125", Fraction(-5)),
        ("1/0", None),
        ("two", None),
        ("2**3", None),
        ("__import__('os')", None),
        ("", None),
    ],
)
def test_parse(answer: str, value: Fraction | None) -> None:
    assert math.parse(answer) == value


@pytest.mark.parametrize(
    ("given", "reference", "same"),
    [
        ("0.5", "1/2", True),
        ("0.333", "1/3", False),
        ("1,000", "1000.0", True),
        ("1000001", "1000000", False),  # whole numbers are equal or not
        ("1000000.5", "1000000", True),  # within a millionth
        ("1000001.5", "1000000", False),
        ("0.333333", "1/3", True),
        ("Paris.", "paris", True),
        (r"x = 5", "x=5", True),
        ("5", "five", False),
    ],
)
def test_grade(given: str, reference: str, same: bool) -> None:
    assert math.grade(given, reference) is same


def test_tolerance_is_relative_above_one() -> None:
    assert math.grade("101", "100.5", tolerance=0.01)
    assert not math.grade("102", "100.5", tolerance=0.01)
    assert math.grade("0.01", "0", tolerance=0.01)
    assert not math.grade("0.011", "0", tolerance=0.01)


def test_a_row_without_an_answer_fails_and_is_not_wrong(say) -> None:
    found = asyncio.run(math.math()([say("#### 5", "#### 5"), say("#### 5", None), say("nothing", 5), say("5", 5.0)]))
    assert [found[0], found[2], found[3]] == [1.0, 0.0, 1.0]
    assert "ValueError" in str(found[1]) and "holds no answer" in str(found[1])


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        (r"so \boxed{2\sqrt{113}}", r"2\sqrt{113}", 1.0),
        ("so 113", r"2\sqrt{113}", 0.0),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{(3,4)}", "(3, 4)", 1.0),
        (r"\boxed{(9,4)}", "(3, 4)", 0.0),
        ("it is (3, 4).", "(3, 4)", 1.0),
        ("it is 4", "(3, 4)", 0.0),
        ("#### x^2 + 3", "x^2+3", 1.0),
        ("about 3", "x^2+3", 0.0),
        ("it is 5 + x^2", "x^2", 0.0),
        ("it is x^2", "x^2", 1.0),
        (r"\boxed{5}", "x = 5", 1.0),
        (r"\boxed{x=5}", "x = 5", 1.0),
        (r"\boxed{2x+3}", "y = 2x + 3", 0.0),
        ("72 in all, 72", "The answer is 72", 1.0),
        ("#### 5 apples", "5 apples", 1.0),
        ("I count 5", "5 apples", 1.0),
        (r"\boxed{7}", r"so \boxed{7}", 1.0),
    ],
)
def test_a_reference_that_is_no_number_is_taken_whole(text: str, reference: str, right: float) -> None:
    """The last number of an expression is not its value."""
    assert math.correct(text, reference) == right


def test_huge_answers_cost_no_time() -> None:
    start = time.perf_counter()
    for text in ("9" * 100_000, "1e999999999", "9" * 50_000 + "/" + "7" * 50_000, "-" * 100_000, "1," * 50_000):
        assert math.correct(text, 5) == 0.0
    assert time.perf_counter() - start < 2.0


def test_a_gsm8k_solution_is_its_own_answer() -> None:
    row = json.loads('{"answer": "She sold 48/2 = <<48/2=24>>24 clips.\\nTogether 48+24 = 72.\\n#### 72"}')
    assert math.correct(row["answer"], row["answer"]) == 1.0
    assert math.correct("#### 73", row["answer"]) == 0.0
