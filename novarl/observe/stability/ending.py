"""What stands out in the metrics of a whole run: no learning signal, collapse, or learning that has stopped.

The same table of alerts as during the run (`rules`), with its names, thresholds and fixes, applied to all updates at
once. If the held-out score improved, only truncated answers are reported, since they may make the score misleading.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from novarl.observe.stability.conditions import CONDITIONS, FLAT
from novarl.observe.stability.rules import CERTAIN, CUT, FAR, RISE, RULES, UNSURE, WHOLE
from novarl.observe.stability.window import Record

LATE = 8
"""The last 1/LATE of the steps counts as the end of the run."""

SLOW = 3.0
"""A learning rate this many times below the default is low."""

ONE, FEW = 1.0, 10.0
"""Numbers of updates at the default learning rate. Adam bounds the step size, so all updates of a run together move a
weight no further than that many would. Within `ONE` nothing is learned; within `FEW` a run without improvement may have
had too few steps."""


class Finding(NamedTuple):
    """The name of an alert, the message, and the usual fixes."""

    sign: str
    said: str
    cure: str = ""


def _finding(name: str, said: str) -> Finding:
    return Finding(name, said, RULES[name].fix)


def cannot_learn(records: Sequence[Record], *, limit: str = "max_new_tokens", improved: bool = False) -> list[Finding]:
    """The rows of `CONDITIONS` that hold. `records`: metrics of each update, in order; `limit`: the setting that
    truncates answers, such as "max_new_tokens=10"; `improved`: the held-out score rose, so the run did learn."""
    found = []
    for name, condition in CONDITIONS.items():
        if (condition.lasting or not improved) and (said := condition.evidence(records, limit)) is not None:
            found.append(_finding(name, said))
    return found


def low_rate(lr: float, usual: float, updates: int, *, within: float = ONE) -> Finding | None:
    """A finding if `updates` at rate `lr` move a model no further than `within` updates at the `usual` rate."""
    if lr * SLOW > usual or lr * updates >= within * usual:
        return None
    said = f"The learning rate {lr:g} is too low for {updates:,} update{'s' * (updates != 1)}: it is "
    said += f"{usual / lr:,.0f} times below the default for this model ({usual:g})"
    return Finding(
        "low_lr", said, f"Usual fixes: the default (remove learning_rate, or optim.lr={usual:g}) or more steps"
    )


def findings(
    records: Sequence[Record], *, improved: bool, limit: str = "max_new_tokens", usual_lr: float | None = None
) -> list[Finding]:
    """The signs in `records`, the metrics of each update in order. `improved`: the held-out score rose; `limit` and
    `usual_lr` (the default learning rate) as in `cannot_learn` and `low_rate`."""
    if not records:
        return []
    late = records[-max(1, len(records) // LATE) :]
    found = cannot_learn(records, limit=limit, improved=improved)
    if not improved:
        rate = max((record.get("lr", 0.0) for record in records), default=0.0)
        slow = low_rate(rate, usual_lr, len(records), within=FEW) if usual_lr and rate else None
        found += [*([slow] if slow else []), *_far(records), *_entropy(_first(records, "entropy"), late)]
    cut, before = _mean(late, "truncated_fraction"), _first(records, "truncated_fraction")
    if cut is not None and before is not None and cut >= CUT and before <= WHOLE:
        what = f"{cut:.0%} of the answers are now truncated (truncated_fraction), {before:.0%} at the start: "
        found.append(_finding("length_drift", what + "the reward may favour length over quality"))
    return found


def _far(records: Sequence[Record]) -> list[Finding]:
    moves = [0.0 if math.isnan(kl := record.get("kl", 0.0)) else kl for record in records]
    farthest = max(range(len(moves)), key=moves.__getitem__)
    if not moves[farthest] > FAR:
        return []
    often = sum(move > FAR for move in moves)
    were, they = ("was", "it") if often == 1 else ("were", "they")
    much = f"{often} of {len(moves)} update{'s' * (len(moves) != 1)} {were} too large"
    what = f"{much}: {they} moved the policy by more than {FAR:g} nats per token "
    where = f"(kl; {moves[farthest]:.2g} at update {farthest + 1})"
    return [_finding("kl_explosion", f"{what}{where}; at most 0.01 is usual")]


def _entropy(before: float | None, late: Sequence[Record]) -> list[Finding]:
    after = _mean(late, "entropy")
    if before is None or after is None or before <= 0:
        return []
    kept = _mean(late, "groups_kept") or 0.0
    flat = (_mean(late, "zero_variance_groups") or 0.0) / kept if kept else 1.0
    change = f"from {before:.2g} to {after:.2g} nats per token"
    if after < CERTAIN * before and flat >= FLAT:
        what = f"The entropy collapsed {change}, and {flat:.0%} of the groups have identical rewards"
        return [_finding("entropy_collapse", what + ": more steps will not help")]
    if after > max(UNSURE * before, before + RISE):
        return [_finding("entropy_rise", f"The entropy rose {change}: the policy is diverging")]
    return []


def _first(records: Sequence[Record], name: str) -> float | None:
    return next((record[name] for record in records if name in record), None)


def _mean(records: Sequence[Record], name: str) -> float | None:
    values = [record[name] for record in records if name in record]
    return fmean(values) if values else None
