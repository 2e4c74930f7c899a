"""Golden numbers of the rewards that read a text."""

from __future__ import annotations

import asyncio

import pytest

from novarl.core.errors import NovaError
from novarl.rewards.endings import ending, preference
from novarl.rewards.length import length, moderation
from novarl.rewards.lexical import lexical, richness, words
from novarl.rewards.sentiment import polarity, sentiment


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The cat, the CAT!", ["the", "cat", "the", "cat"]),
        ("don't 'quote' rock'n'roll it's", ["don't", "quote", "rock'n", "roll", "it's"]),
        ("a1b 2 c_d", ["a", "b", "c", "d"]),
        ("", []),
    ],
)
def test_words_are_letters_with_an_inner_apostrophe(text: str, found: list[str]) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    ("text", "scale", "score"),
    [
        ("", 0.0, 0.0),
        ("", 0.5, -0.5),
        ("word", 0.0, 1.0),
        ("word", 0.5, 1 - 0.5 * 79 / 80),  # 0.50625
        (" ".join(f"w{'a' * (i + 1)}" for i in range(80)), 0.5, 1.0),
        ("the cat the dog", 0.0, 3 / 4),
        ("the cat the dog", 0.5, 3 / 4 - 0.5 * 76 / 80),  # 0.275
        ("one two " * 50, 1.0, 2 / 100),  # past the target there is no penalty, and no bonus
    ],
)
def test_lexical_richness_is_ttr_less_brevity(text: str, scale: float, score: float) -> None:
    assert richness(text, brevity_penalty_scale=scale) == pytest.approx(score, abs=1e-12)


def test_lexical_target_can_be_shortened() -> None:
    assert richness("one two three four", brevity_penalty_scale=0.5, target_words=8) == pytest.approx(1 - 0.5 * 0.5)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("A good day", 2.5),
        ("GREAT and good, but bad", 2.5),
        ("amazing excellent fantastic good great happy love wonderful", 6.0),
        ("good good good", 2.5),
        ("a bad day", -1.5),
        ("angry awful bad disappointing hate horrible sad terrible", -5.0),
        ("sad but happy", 0.0),
        ("the goodness of badges, a sadist's glove", 0.0),
        ("", 0.0),
    ],
)
def test_sentiment_follows_its_table(text: str, score: float) -> None:
    assert polarity(text) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("that was very good", 3.0),
        ("I must say THANK  you!!", 3.0),
        ("it is all wonderful.\n", 3.0),
        ("good", 2.0),
        ("so so", -1.0),
        ("good things end badly", 0.0),
        ("this feels ungood", 0.0),
        ("", -1.0),
    ],
)
def test_preference_looks_at_the_ending(text: str, score: float) -> None:
    assert ending(text) == score


@pytest.mark.parametrize(("count", "score"), [(0, -2.0), (4, -2.0), (5, 1.0), (20, 1.0), (21, -1.0)])
def test_length_prefers_five_to_twenty_words(count: int, score: float) -> None:
    assert moderation("word " * count) == score


def test_length_thresholds_are_arguments() -> None:
    assert moderation("one two", shortest=2, longest=2) == 1.0
    with pytest.raises(NovaError, match="exceeds"):
        length(shortest=5, longest=4)


def test_the_prompt_never_counts(say) -> None:
    """The prompt of the fixture speaks of goodness and has five words; the response alone is scored."""
    rollouts = [say("a plain day"), say("happy")]

    async def scores() -> list[object]:
        return [await reward(rollouts) for reward in (sentiment, preference, length(), lexical())]

    assert asyncio.run(scores()) == [[0.0, 2.5], [0.0, -1.0], [-2.0, -2.0], [1.0, 1.0]]
