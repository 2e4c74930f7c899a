"""Preference for certain endings of the response.

    +3   it ends in one of: "thank you", "great", "good", "excellent", "wonderful"
    -1   it has fewer than 3 words (added to the above)

Whole words only ("it was so-so, not ungood" does not end in "good"), upper or lower case; punctuation and spaces after
the last word do not matter. A word, for the count, is what white space separates.
"""

from __future__ import annotations

import re

from novarl.rewards.per_rollout import by_text

ENDINGS = ("thank you", "great", "good", "excellent", "wonderful")
_ENDING = re.compile(r"\b(?:" + "|".join(ENDINGS).replace(" ", r"\s+") + r")\W*$", re.IGNORECASE)


def ending(text: str) -> float:
    """The score of the table above: 3, 2, 0 or -1."""
    return (3.0 if _ENDING.search(text) else 0.0) - (1.0 if len(text.split()) < 3 else 0.0)


preference = by_text(ending)
"""Preference for certain endings as a reward."""
