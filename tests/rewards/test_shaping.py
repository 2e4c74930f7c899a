"""TRL's two rewards of tokens, built in: values worked out by hand from their papers' formulas."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from novarl.core.errors import NovaError
from novarl.core.types import Sequence
from novarl.rewards.compose import RewardSet
from novarl.rewards.registry import find_reward

OVERLONG, REPETITION = "get_soft_overlong_punishment", "get_repetition_penalty_reward"


def value(say: Any, name: str, tokens: list[int], **options: Any) -> float:
    """The reward of an answer of these tokens after a prompt of one token, which does not count."""
    zeros = (0.0,) * (1 + len(tokens))
    mask = (False, *(True for _ in tokens))
    sequence = Sequence((9, *tokens), mask, zeros, zeros, (0,) * len(zeros))
    rewards = RewardSet({"it": find_reward(name, options=options)})
    (found,) = asyncio.run(rewards.score([replace(say("x"), sequences=(sequence,))]))
    assert found.reward is not None, found.error
    return found.reward


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (200, -1.0)]
)
def test_soft_overlong_punishment(say, length: int, expected: float) -> None:
    found = value(say, OVERLONG, list(range(length)), max_completion_len=100, soft_punish_cache=20)
    assert found == pytest.approx(expected)


def test_soft_overlong_punishment_without_a_cache_is_a_step(say) -> None:
    limits = {"max_completion_len": 3, "soft_punish_cache": 0}
    assert [value(say, OVERLONG, list(range(n)), **limits) for n in (3, 4)] == [0.0, -1.0]


@pytest.mark.parametrize(
    ("tokens", "options", "expected"),
    [
        ([1, 2, 3, 4], {"ngram_size": 2}, 0.0),
        ([5, 5, 5, 5, 5], {"ngram_size": 2}, -0.75),  # one of four is distinct
        ([5, 5, 5, 5, 5], {}, -2 / 3),  # one of three
        ([1, 2, 1, 2, 1], {"ngram_size": 2, "max_penalty": -2.0}, -1.0),  # two of four
        ([1, 1], {"ngram_size": 3}, 0.0),
        ([], {"ngram_size": 1}, 0.0),
    ],
)
def test_repetition_penalty(say, tokens: list[int], options: dict[str, Any], expected: float) -> None:
    found = value(say, REPETITION, tokens, **options)
    assert found == pytest.approx(expected) and math.copysign(1.0, found) == (1.0 if expected == 0 else -1.0)


def test_limits_that_are_missing_or_contradict_each_other() -> None:
    required = "max_completion_len and soft_punish_cache are required"
    with pytest.raises(NovaError, match=f"reward={OVERLONG}: {required} .set reward.{OVERLONG}.max_completion_len"):
        find_reward(OVERLONG, options={"max_completion_len": 9})
    with pytest.raises(NovaError, match="soft_punish_cache=10 exceeds max_completion_len=9"):
        find_reward(OVERLONG, options={"max_completion_len": 9, "soft_punish_cache": 10})
