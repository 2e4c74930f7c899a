"""What a reward may say of one rollout: a number, several by name, or that it failed and why.

A failure is a value of its own, never 0.0: a rollout that could not be scored is counted and left out of training, so a
bug in a reward cannot teach the policy anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from novarl.core.types import Rollout


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that has no number for a rollout: one line of `reason`, and the traceback where there was one."""

    reason: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.reason}\n{self.traceback}".strip()


@dataclass(frozen=True, slots=True)
class Logged:
    """What a reward says of a rollout, with what its function logged: `extra` by column, `metrics` of the batch."""

    verdict: float | Mapping[str, float] | Failure | None
    extra: Mapping[str, Any]
    metrics: Mapping[str, float]


Verdict = float | Mapping[str, float] | Failure | Logged | None
"""One rollout's score. None: the reward does not apply to it, and the others decide; where none applies, that is a
failure."""


class Scorer(Protocol):
    """`core.types.Reward`, which may also give the reason of a failure. Batch first: models and judges are."""

    async def __call__(self, rollouts: Sequence[Rollout], /) -> Sequence[Verdict]: ...


def check(value: Any) -> float | dict[str, float] | Failure:
    """A reward's raw return value as plain finite floats, or the failure it is.

    Whatever converts itself to a float counts as a number (bool, int, NumPy and torch scalars); None, NaN, infinities
    and strings, also those that look like numbers, do not.

    >>> check(True), check("1.0").reason
    (1.0, "returned '1.0', a str, not a number")
    """
    if isinstance(value, Failure):
        return value
    if value is None:
        return Failure("returned None")
    if isinstance(value, Mapping):
        parts: dict[str, float] = {}
        for name, part in value.items():
            number = check(part)
            if not isinstance(number, float):
                return Failure(f"part {name!r} {number.reason if isinstance(number, Failure) else 'is nested'}")
            parts[str(name)] = number
        return parts or Failure("returned an empty mapping")
    if not hasattr(type(value), "__float__"):  # SupportsFloat asks the same, slowly
        return Failure(f"returned {_short(value)}, a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:  # an array of several numbers, an int beyond floats
        return Failure(f"returned {_short(value)}, not one number: {error}")
    return number if math.isfinite(number) else Failure(f"returned {number}")


def miscounted(scores: int, rollouts: int) -> str:
    """Why a batch of scores is a failure.

    >>> miscounted(1, 16)
    'returned 1 score for 16 rollouts'
    """
    return f"returned {scores} score{'s' * (scores != 1)} for {rollouts} rollout{'s' * (rollouts != 1)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
