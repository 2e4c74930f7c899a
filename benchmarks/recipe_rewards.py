"""The rewards of recipes/, as a reader who had only their description would write them: `make bench-recipes`."""

from __future__ import annotations

import re
from typing import Any

ASKED = re.compile(r"Write ~(\d+) words")
WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")
BREVITY_PENALTY = 0.5


def sorted_letters(messages: list[dict[str, str]], answer: Any) -> float:
    """1.0 where the reply is the sorted letters, else 0.0."""
    return float(messages[-1]["content"].strip() == answer)


def richness(messages: list[dict[str, str]], answer: Any) -> float:
    """Distinct words over words, less half the share that is missing of four fifths of the words asked for."""
    asked = ASKED.search(messages[0]["content"])
    assert asked is not None
    target, words = 0.8 * int(asked[1]), WORD.findall(messages[-1]["content"].lower())
    missing = max(0.0, 1.0 - len(words) / target)
    return len(set(words)) / max(len(words), 1) - BREVITY_PENALTY * missing
