"""Lexical richness: how few words of a text repeat.

    TTR = |distinct words| / max(|words|, 1)          brevity = max(0, (target_words - |words|) / target_words)
    reward = TTR - brevity_penalty_scale * brevity

Words are `[A-Za-z]+(?:'[A-Za-z]+)?`, lower-cased. Without the brevity penalty a reply of one word earns the full 1.0;
with a scale of 0.5 and a target of 80 words it earns 1 - 0.5 * 79/80 = 0.506, and 80 distinct words earn 1.0.
"""

from __future__ import annotations

import re

from novarl.rewards.per_rollout import PerRollout, by_text

WORD = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?")


def words(text: str) -> list[str]:
    """The words of a text, lower-cased, in order.

    >>> words("Don't STOP, 2 don't")
    ["don't", 'stop', "don't"]
    """
    return [word.lower() for word in WORD.findall(text)]


def richness(text: str, *, brevity_penalty_scale: float = 0.0, target_words: int = 80) -> float:
    """Type-token ratio less a penalty for short texts; at most 1, and -brevity_penalty_scale for a text of no words."""
    found = words(text)
    ratio = len(set(found)) / max(len(found), 1)
    brevity = max(0.0, (target_words - len(found)) / target_words)
    return ratio - brevity_penalty_scale * brevity


def lexical(*, brevity_penalty_scale: float = 0.0, target_words: int = 80) -> PerRollout:
    """Lexical richness as a reward."""
    return by_text(lambda text: richness(text, brevity_penalty_scale=brevity_penalty_scale, target_words=target_words))
