"""What stands out in the metrics of a run by reinforcement: why it collapsed or stands still, a line for each sign.

A sign is read off metrics whose healthy range the glossary states; the limits here lie well beyond those ranges. A run
whose held-out score rose is only told of answers that are cut off: there the score itself may be what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

FAR = 0.1
"""Nats a token by which one update moves the policy: ten times what is healthy."""

CERTAIN, UNSURE = 0.1, 1.5
"""The shares of its first entropy below which a policy has collapsed, and above which it comes apart."""

RISE = 0.5
"""Nats a token by which entropy must rise at least: what a sharp policy regains is no sign."""

FLAT = 0.75
"""The share of groups with equal rewards in which most samples teach nothing."""

CUT, WHOLE = 0.5, 0.1
"""Shares of answers that run into the limit: now many, at first few."""

LATE = 8
"""The last eighth of the steps is how a run ended."""

Sign = Literal["far", "certain", "unsure", "cut"]


class Finding(NamedTuple):
    """A sign, and what is said of it."""

    sign: Sign
    said: str


def findings(records: Sequence[Mapping[str, float]], *, improved: bool) -> list[Finding]:
    """The signs in `records`, one of metrics for each update in order. `improved`: the held-out score rose."""
    if not records:
        return []
    late = records[-max(1, len(records) // LATE) :]
    found = [] if improved else [*_far(records), *_entropy(_first(records, "entropy"), late)]
    cut, before = _mean(late, "truncated_fraction"), _first(records, "truncated_fraction")
    if cut is not None and before is not None and cut >= CUT and before <= WHOLE:
        what = f"{cut:.0%} of the answers run into their limit (truncated_fraction), at first {before:.0%}: "
        found.append(Finding("cut", what + "if length pays, they grow, whatever the score says"))
    return found


def _far(records: Sequence[Mapping[str, float]]) -> list[Finding]:
    moves = [0.0 if math.isnan(kl := record.get("kl", 0.0)) else kl for record in records]
    farthest = max(range(len(moves)), key=moves.__getitem__)
    if not moves[farthest] > FAR:
        return []
    often = sum(move > FAR for move in moves)
    what = f"{often} of {len(moves)} updates moved the policy by more than {FAR:g} nats a token (kl), the "
    return [Finding("far", f"{what}{_ordinal(farthest + 1)} by {moves[farthest]:.2g}: at most 0.01 is usual")]


def _entropy(before: float | None, late: Sequence[Mapping[str, float]]) -> list[Finding]:
    after = _mean(late, "entropy")
    if before is None or after is None or before <= 0:
        return []
    kept = _mean(late, "groups_kept") or 0.0
    flat = (_mean(late, "zero_variance_groups") or 0.0) / kept if kept else 1.0
    change = f"entropy went from {before:.2g} to {after:.2g} nats a token"
    if after < CERTAIN * before and flat >= FLAT:
        what = f"{change}, and in {flat:.0%} of the groups all rewards are equal: the policy has become certain, and "
        return [Finding("certain", what + "more steps teach it nothing")]
    if after > max(UNSURE * before, before + RISE):
        return [Finding("unsure", f"{change}: the policy comes apart")]
    return []


def _first(records: Sequence[Mapping[str, float]], name: str) -> float | None:
    return next((record[name] for record in records if name in record), None)


def _mean(records: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [record[name] for record in records if name in record]
    return fmean(values) if values else None


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
