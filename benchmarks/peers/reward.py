"""The rewards of `make bench`, in TRL's form, which both sides take: one file scores both."""

from __future__ import annotations

import time
from typing import Any

SLOW = 0.05
"""Seconds a row of the slow one."""


def checksum(prompts: list[Any], completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
    """A number of each answer that costs nothing and differs within a group."""
    return [sum(map(ord, completion[-1]["content"])) % 11 / 10 for completion in completions]


def is_sorted(
    prompts: list[Any], completions: list[list[dict[str, str]]], answer: list[str], **columns: Any
) -> list[float]:
    """`task=sort`: 1.0 where the answer is exactly the sorted letters."""
    return [float(c[-1]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]


def slow(messages: list[dict[str, str]], answer: Any) -> float:
    """`checksum` of one row, as a judge over the network would give it: after a while."""
    time.sleep(SLOW)
    return sum(map(ord, messages[-1]["content"])) % 11 / 10
