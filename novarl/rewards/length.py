"""Preference for a response of moderate length, in words (what white space separates).

fewer than `shortest` (5) words   -2
more than `longest` (20) words    -1
anything between                  +1
"""

from __future__ import annotations

from novarl.core.errors import NovaError
from novarl.rewards.per_rollout import PerRollout, by_text


def moderation(text: str, *, shortest: int = 5, longest: int = 20) -> float:
    """The score of the table above; the response alone counts, not the prompt."""
    count = len(text.split())
    return -2.0 if count < shortest else -1.0 if count > longest else 1.0


def length(*, shortest: int = 5, longest: int = 20) -> PerRollout:
    """Moderate length as a reward. Errors: NovaError where `shortest` exceeds `longest`."""
    if shortest > longest:
        what = f"shortest={shortest} exceeds longest={longest}"
        raise NovaError(what, where="reward length", fix="set both reward.length.shortest and reward.length.longest")
    return by_text(lambda text: moderation(text, shortest=shortest, longest=longest))
