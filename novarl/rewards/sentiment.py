"""Keyword sentiment of the response. Which words count, each once however often it occurs:

    positive   amazing excellent fantastic good great happy love wonderful
    negative   angry awful bad disappointing hate horrible sad terrible

With p positive and n negative words found and d = |p - n|:

    p > n   2.0 + 0.5 d          n > p   -1.0 - 0.5 d          p = n   0.0

Whole words only ("goodness" and "badge" say nothing), upper or lower case, and the prompt never counts.
"""

from __future__ import annotations

from novarl.rewards.lexical import words
from novarl.rewards.per_rollout import by_text

POSITIVE = frozenset({"amazing", "excellent", "fantastic", "good", "great", "happy", "love", "wonderful"})
NEGATIVE = frozenset({"angry", "awful", "bad", "disappointing", "hate", "horrible", "sad", "terrible"})


def polarity(text: str) -> float:
    """The score of the table above, from -5 (all negative words) to 6 (all positive ones)."""
    found = set(words(text))
    balance = len(found & POSITIVE) - len(found & NEGATIVE)
    if balance > 0:
        return 2.0 + 0.5 * balance
    if balance < 0:
        return -1.0 + 0.5 * balance
    return 0.0


sentiment = by_text(polarity)
"""Keyword sentiment as a reward."""
