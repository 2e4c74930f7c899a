"""Finding and comparing mathematical answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from novarl.compose.rewards import build_rewards
from novarl.config.load import load
from novarl.config.tree import RLConfig
from novarl.rewards import math
from novarl.rewards.isolated import symbolic
from novarl.rewards.verdict import Failure


@pytest.fixture(scope="module")
def reward() -> Iterator[math.MathReward]:
    made = math.MathReward(time_limit=60.0)
    yield made
    made.close()


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
        ("5 apples", Fraction(5)),
        ("5 million", None),
        (r"3\frac{1}{2}", None),  # 7/2, and not 31/2
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
        ("1000000.5", "1000000", False),  # to six places
        ("0.333333", "1/3", True),
        ("0.333334", "1/3", False),
        ("50%", "0.5", True),
        ("50", "50%", True),
        ("Paris.", "paris", True),
        (r"x = 5", "x=5", True),
        ("5", "five", None),
        (r"\frac12", "1/2", None),
    ],
)
def test_grade(given: str, reference: str, same: bool | None) -> None:
    assert math.grade(given, reference) is same


def test_tolerance_is_relative_above_one() -> None:
    assert math.grade("101", "100.5", tolerance=0.01)
    assert not math.grade("102", "100.5", tolerance=0.01)
    assert math.grade("0.01", "0", tolerance=0.01)
    assert not math.grade("0.011", "0", tolerance=0.01)
    assert math.grade("1000000.5", "1000000", tolerance=1e-6)


NUMBERS = [
    "72",
    "-72",
    "+72",
    "72.0",
    "1,234.50",
    "1234.5",
    "1000000",
    "1000000.5",
    "0.333333",
    "0.3333334",
    "1/3",
    "2/6",
    "0.75",
    ".5",
    "50%",
    "1",
    "0.9999994",
    "0.1",
    "0.1000001",
    "0.1000006",
    "\\frac{3}{4}",
    "\\dfrac{-3}{4}",
]


def test_plain_numbers_agree_as_math_verify_says() -> None:
    for reference, given in itertools.product(NUMBERS, NUMBERS):
        assert math.grade(given, reference) is symbolic.equal(given, [reference], True, 0.0), (given, reference)


def test_a_row_without_an_answer_fails_and_is_not_wrong(say) -> None:
    found = asyncio.run(
        math.MathReward()([say("#### 5", "#### 5"), say("#### 5", None), say("nothing", 5), say("5", 5.0)])
    )
    assert [found[0], found[2], found[3]] == [1.0, 0.0, 1.0]
    assert "ValueError" in str(found[1]) and "contains no answer" in str(found[1])


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
        (r"\boxed{2x+3}", "y = 2x + 3", 1.0),
        (r"\boxed{2x+4}", "y = 2x + 3", 0.0),
        ("72 in all, 72", "The answer is 72", 1.0),
        ("#### 5 apples", "5 apples", 1.0),
        ("I count 5", "5 apples", 1.0),
        (r"\boxed{7}", r"so \boxed{7}", 1.0),
    ],
)
def test_a_reference_that_is_no_number_is_taken_whole(reward, say, text: str, reference: str, right: float) -> None:
    """The last number of an expression is not its value."""
    assert asyncio.run(reward([say(text, reference)])) == [right]


@pytest.mark.parametrize(
    ("given", "reference", "right"),
    [
        (r"\frac12", "1/2", 1.0),
        (r"\tfrac{1}{2}", "0.5", 1.0),
        (r"\text{west}", "west", 1.0),
        (r"\text{west}", "east", 0.0),
        (r"\text{(C)}", "C", 1.0),
        (r"(\text{C})", "D", 0.0),
        (r"\left(5,-1\right)", "(5, -1)", 1.0),
        ("(-1,5)", "(5,-1)", 0.0),
        ("[2,7)", "(2,7]", 0.0),
        ("[2,7)", "[2, 7)", 1.0),
        (r"12\text{ cm}", "12", 1.0),
        (r"12\mbox{ inches}^2", "12", 1.0),
        (r"45^\circ", "45", 1.0),
        (r"45^{\circ}", "54", 0.0),
        ("n=8", "8", 1.0),
        ("8", "n = 8", 1.0),
        ("n=8", "m=8", 0.0),
        (r"2\frac{3}{4}", "11/4", 1.0),
        (r"2\frac34", "23/4", 0.0),
        (r"\frac{\pi}{3}", r"\pi/3", 1.0),
        (r"4\times10^2", "400", 1.0),
        (r"\sqrt{18}", r"3\sqrt{2}", 1.0),
        (r"\sqrt{18}", r"2\sqrt{3}", 0.0),
        ("a^2+3", "3+a^2", 1.0),
        ("2{,}500", "2500", 1.0),
        (r"\$2,500", "2500", 1.0),
        ("3.14", r"\pi", 0.0),
        ("2, 1", "1, 2", 1.0),
        (r"9^{9^{9^9}}", "5", 0.0),  # too large to be evaluated
        (r"(10^9)!", "5", 0.0),
        (r"\frac{", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_answers_as_in_math_are_compared_symbolically(reward, say, given: str, reference: str, right: float) -> None:
    texts = [rf"So the answer is \boxed{{{given}}}.", f"so\n#### {given}"][: 2 if given else 1]
    assert asyncio.run(reward([say(text, reference) for text in texts])) == [right] * len(texts)


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        (r"Therefore it is $\frac12$.", "1/2", 1.0),
        (r"Therefore \(x=\sqrt{25}\).", "5", 1.0),
        (r"Therefore \(x=\sqrt{25}\).", "6", 0.0),
        ("We get $b+1$.", "1+b", 1.0),
        ("It costs $3, so 4 cost $12.", "3", 0.0),
        ("#### 72</s>", "72", 1.0),
        ("#### 72 dollars<|im_end|>", "72", 1.0),
    ],
)
def test_unmarked_mathematics_and_ends_of_text(reward, say, text: str, reference: str, right: float) -> None:
    assert asyncio.run(reward([say(text, reference)])) == [right]


def test_tolerance_holds_for_expressions_too(say) -> None:
    rows = [say(r"\boxed{3.14}", r"\pi"), say(r"\boxed{3.2}", r"\pi"), say(r"\boxed{\sqrt{2}}", "1.4")]
    strict, loose = math.MathReward(), math.MathReward(tolerance=0.01)
    assert asyncio.run(strict(rows)) == [0.0, 0.0, 0.0]
    assert asyncio.run(loose(rows)) == [1.0, 0.0, 0.0]
    strict.close()
    loose.close()


def test_the_tolerance_of_a_configuration_reaches_the_reward(say) -> None:
    config = load(RLConfig, overrides=["task=sort", "reward=math", "reward.math.tolerance=0.01"])
    rewards = build_rewards(config, None, device=torch.device("cpu"))
    rows = [say("#### 3.14", "3.141"), say("#### 3.2", "3.141")]
    assert [scored.reward for scored in asyncio.run(rewards.score(rows))] == [1.0, 0.0]


def test_numbers_need_no_process(say) -> None:
    reward = math.MathReward()
    rows = [say("#### 72", "72"), say(r"\boxed{0.5}", "1/2"), say("it is 7", 8), say("#### 9", "48/2=24\n#### 24")]
    assert asyncio.run(reward(rows)) == [1.0, 1.0, 0.0, 0.0]
    assert reward._process is None


def test_a_comparison_that_does_not_end_fails_its_own_rollout(say) -> None:
    """The integral has no closed form that SymPy finds soon; the answers after it are scored, by a fresh process."""
    reward = math.MathReward(time_limit=4.0)
    hard = rf"\boxed{{\int_0^1 {'+'.join(rf'x^{{x^{n}}}' for n in range(1, 9))} dx}}"
    half = say(r"\boxed{\frac12}", "1/2")
    late = Failure("timed out after 4 s and was stopped")
    found = asyncio.run(reward([half, say(hard, "5"), half, say(r"\boxed{\frac12}", "1/3")]))
    assert found == [1.0, late, 1.0, 0.0]
    reward.close()


def test_of_huge_answers_no_number_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact arithmetic on them is what would cost time."""
    made: list[str] = []
    monkeypatch.setattr(math, "Fraction", lambda *given: (made.extend(map(str, given)), Fraction(*given))[1])
    for text in ("9" * 100_000, "1e999999999", "9" * 50_000 + "/" + "7" * 50_000, "-" * 100_000, "1," * 50_000):
        assert math.correct(text, 5) == 0.0
    assert "5" in made and all(len(digits) <= math._MOST_DIGITS for digits in made)


def test_a_gsm8k_solution_is_its_own_answer() -> None:
    row = json.loads('{"answer": "She sold 48/2 = <<48/2=24>>24 clips.\\nTogether 48+24 = 72.\\n#### 72"}')
    assert math.correct(row["answer"], row["answer"]) == 1.0
    assert math.correct("#### 73", row["answer"]) == 0.0
