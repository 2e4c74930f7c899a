"""Several rewards: late combination, and failures that are never zero."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from novarl.core.errors import NovaError
from novarl.core.types import Rollout
from novarl.rewards.compose import RewardSet
from novarl.rewards.per_rollout import by_text, environment
from novarl.rewards.verdict import Failure, check


def giving(*values: Any) -> Any:
    """A reward that gives these values, whatever it is shown."""

    async def reward(rollouts: Sequence[Rollout]) -> list[Any]:
        return list(values)

    return reward


def score(rewards: RewardSet, rollouts: Sequence[Rollout]) -> list[Any]:
    return asyncio.run(rewards.score(rollouts))


def test_named_rewards_combine_late_and_stay_apart(say) -> None:
    rewards = RewardSet({"a": giving(1.0, 2.0), "b": giving(10, -10)}, {"b": 0.5})
    first, second = score(rewards, [say("x"), say("y")])
    assert (first.rewards, first.reward) == ({"a": 1.0, "b": 10.0}, 6.0)
    assert (second.rewards, second.reward) == ({"a": 2.0, "b": -10.0}, -3.0)
    assert [item.rollout.text for item in (first, second)] == ["x", "y"]
    assert first.rollout.status == "done" and first.error is None


@pytest.mark.parametrize("order", ["abc", "bac", "cab"])
def test_weights_that_make_one_make_exactly_one(say, order: str) -> None:
    """Evaluation takes a reward of 1 for a right answer, and scores of 0 and 1 for shares."""
    weights = {"a": 0.3, "b": 0.6, "c": 0.1}
    (only,) = score(RewardSet({name: giving(1.0) for name in order}, weights), [say("x")])
    assert only.reward == 1.0


def test_parts_of_one_reward_have_weights_of_their_own(say) -> None:
    parts = {"format": 1.0, "answer": 2.0}
    (only,) = score(RewardSet({"r": giving(parts)}, {"r": 3.0, "r/format": 0.0}), [say("x")])
    assert only.rewards == {"r/format": 1.0, "r/answer": 2.0}
    assert only.reward == 6.0


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        (-math.inf, "returned -inf"),
        ("1.0", "a str, not a number"),
        ([1.0], "a list, not a number"),
        (1j, "a complex, not a number"),
        (np.array([1.0, 2.0]), "not one number"),
        (10**400, "not one number"),
        ({}, "empty mapping"),
        ({"a": 1.0, "b": None}, "part 'b' returned None"),
        ({"a": {"b": 1.0}}, "part 'a' is nested"),
        (Failure("has a reason", "and a traceback"), "has a reason\nand a traceback"),
    ],
)
def test_what_is_no_finite_number_fails_its_rollout_alone(say, value: Any, why: str) -> None:
    good, bad = score(RewardSet({"r": giving(0.5, value), "s": giving(1, 1)}), [say("x"), say("y")])
    assert good.reward == 1.5 and good.error is None
    assert bad.reward is None and bad.rollout.status == "failed"
    assert bad.error is not None and bad.error.startswith("reward 'r' ") and why in bad.error
    assert bad.rewards == {"s": 1.0}  # the others are kept, for the rollout log


def test_none_of_one_of_several_means_that_it_does_not_apply(say) -> None:
    rewards = RewardSet({"a": giving(None, 2.0, None), "b": giving(3.0, None, None)}, {"b": 0.5})
    first, second, third = score(rewards, [say("x"), say("y"), say("z")])
    assert (first.rewards, first.reward, first.error) == ({"b": 3.0}, 1.5, None)
    assert (second.rewards, second.reward, second.error) == ({"a": 2.0}, 2.0, None)
    assert (third.rewards, third.reward, third.rollout.status) == ({}, None, "failed")
    assert third.error == "no reward applies: each of them returned None"


def test_none_of_the_only_reward_is_a_failure(say) -> None:
    (only,) = score(RewardSet({"a": giving(None)}), [say("x")])
    assert only.reward is None and only.error == "reward 'a' returned None"


def test_none_does_not_hide_a_failure(say) -> None:
    (only,) = score(RewardSet({"a": giving(None), "b": giving(math.nan)}), [say("x")])
    assert only.reward is None and only.error == "reward 'b' returned nan"


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.bool_(True), torch.tensor(1.0), Decimal(1), Fraction(1)])
def test_numbers_of_any_library_count(value: Any) -> None:
    found = check(value)
    assert found == 1.0 and type(found) is float


def test_a_reward_that_raises_fails_its_batch_with_the_traceback(say) -> None:
    async def reward(rollouts: Sequence[Rollout]) -> list[float]:
        raise KeyError("no such thing")

    for item in score(RewardSet({"r": reward, "s": giving(1, 1)}), [say("x"), say("y")]):
        assert item.reward is None and item.rewards == {"s": 1.0}
        assert "raised KeyError: 'no such thing'" in item.error and "test_compose.py" in item.error


def test_a_function_of_one_text_fails_one_row(say) -> None:
    reward = by_text(lambda text: 1 / len(text))
    good, bad = score(RewardSet({"r": reward}), [say("xx"), say("")])
    assert good.reward == 0.5
    assert bad.reward is None and "ZeroDivisionError" in bad.error and "Traceback" in bad.error


def test_a_reward_that_waits_too_long_is_ended(say) -> None:
    async def slow(rollouts: Sequence[Rollout]) -> list[float]:
        await asyncio.sleep(60)
        return [1.0]

    (only,) = score(RewardSet({"r": slow}, time_limit=0.05), [say("x")])
    assert only.reward is None and "timed out after 0.05 s" in only.error


def test_a_timeout_inside_a_reward_is_not_called_our_limit(say) -> None:
    async def reward(rollouts: Sequence[Rollout]) -> list[float]:
        raise TimeoutError("the server")

    (only,) = score(RewardSet({"r": reward}, time_limit=60), [say("x")])
    assert "raised TimeoutError: the server" in only.error


def test_a_wrong_count_fails_the_batch(say) -> None:
    scored = score(RewardSet({"r": giving(1.0)}), [say("x"), say("y")])
    assert [item.reward for item in scored] == [None, None]
    assert "returned 1 score for 2 rollouts" in scored[0].error


def test_failed_episodes_are_not_scored(say) -> None:
    lost = replace(say("x"), status="failed", info={"error": "the tool broke"})
    first, second = score(RewardSet({"r": giving(1.0)}), [lost, say("y")])
    assert (first.reward, first.error, first.rewards) == (None, "the tool broke", {})
    assert second.reward == 1.0
    assert score(RewardSet({"r": giving(1.0)}), [lost])[0].reward is None


def test_a_sum_that_overflows_is_a_failure(say) -> None:
    (only,) = score(RewardSet({"r": giving(1e308), "s": giving(1e308)}), [say("x")])
    assert only.reward is None and "weighted sum" in only.error


def test_rewards_are_asked_at_the_same_time(say) -> None:
    reached = []

    async def meet(rollouts: Sequence[Rollout]) -> list[float]:
        reached.append(1)
        while len(reached) < 2:
            await asyncio.sleep(0)
        return [1.0]

    (only,) = score(RewardSet({"a": meet, "b": meet}, time_limit=5), [say("x")])
    assert only.reward == 2.0


@pytest.mark.parametrize(
    ("rewards", "weights", "what"),
    [
        ({}, {}, "no reward is configured"),
        ({"length": giving()}, {"lenght": 1.0}, "did you mean 'length'"),
        ({"length": giving()}, {"length": math.nan}, "the weight of 'length' is nan"),
    ],
)
def test_mistakes_are_said_before_training(rewards: Any, weights: Any, what: str) -> None:
    with pytest.raises(NovaError, match=what):
        RewardSet(rewards, weights)


def test_the_environment_own_reward(say) -> None:
    given = replace(say("x"), info={"env_reward": 2.5})
    good, bad = score(RewardSet({"environment": environment}), [given, say("y")])
    assert good.reward == 2.5
    assert bad.reward is None and "returned no reward" in bad.error
