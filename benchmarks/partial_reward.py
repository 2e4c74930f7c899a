"""Partial credit for `task=sort`, so that rewards vary from the first step: the share of the letters that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def reward_fn(messages: Sequence[Mapping[str, str]], answer: str) -> float:
    """How many of the answer's letters the response holds, as a share."""
    return sum(letter in messages[-1]["content"] for letter in answer) / len(answer)
