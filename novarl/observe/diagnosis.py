"""Warning signs in the metrics of a run: no learning signal, collapse, or learning that has stopped.

`CONDITIONS` are counted over a whole run ("N of M") and mean that it could not learn; they are also checked early in
the run. The other signs compare metrics with thresholds well outside the healthy ranges. If the held-out score
improved, only truncated answers are reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

FAR = 0.1
"""KL of one update in nats per token: ten times the healthy maximum."""

CERTAIN, UNSURE = 0.1, 1.5
"""Fractions of the initial entropy: below the first the policy has collapsed, above the second it is diverging."""

RISE = 0.5
"""Minimum rise of the entropy in nats per token; a smaller rise from a low entropy is harmless."""

FLAT = 0.75
"""Fraction of groups with identical rewards above which most samples carry no learning signal."""

CUT, WHOLE = 0.5, 0.1
"""Fractions of truncated answers: many at the end, few at the start."""

LATE = 8
"""The last 1/LATE of the steps counts as the end of the run."""

SLOW = 3.0
"""A learning rate this many times below the default is low."""

ONE, FEW = 1.0, 10.0
"""Numbers of updates at the default learning rate, whose step size Adam bounds. A run that moves weights no further
than `ONE` would learns nothing; within `FEW`, a run without improvement may have had too few steps."""

Sign = Literal["no_signal", "always_cut", "no_gradient", "low_lr", "far", "certain", "unsure", "cut"]
Records = Sequence[Mapping[str, float]]

CANNOT_LEARN: frozenset[str] = frozenset({"no_signal", "always_cut", "no_gradient", "low_lr"})
"""Signs of a run that could not learn; such a run is never reported as successful."""


class Finding(NamedTuple):
    """A sign, the message, and the usual fixes."""

    sign: Sign
    said: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """One row of `CONDITIONS`.

    sign    its name
    count   of a record: (how many, of how many), or None if the record does not tell
    by_step the counts belong to a step and are repeated by each of its updates; otherwise to an update
    least   the smallest fraction that is reported
    said    the message, with {n}, {m} and {limit} (the setting that truncates answers)
    cure    the usual fixes
    always  the message if all of them are affected
    lasting also reported if the held-out score improved
    """

    sign: Sign
    count: Callable[[Mapping[str, float]], tuple[float, float] | None]
    by_step: bool
    least: float
    said: str
    cure: str
    always: str = ""
    lasting: bool = False

    def find(self, records: Records, limit: str) -> Finding | None:
        """The finding, if the condition holds over `records`."""
        if self.by_step:
            records = list({record.get("step", place): record for place, record in enumerate(records)}.values())
        counts = [found for record in records if (found := self.count(record)) is not None]
        n, m = (round(sum(column)) for column in zip(*counts, strict=True)) if counts else (0, 0)
        if m == 0 or n < self.least * m:
            return None
        said = self.always if n == m and self.always else self.said
        return Finding(self.sign, said.format(n=f"{n:,}", m=f"{m:,}", limit=limit), self.cure)


def _equal_groups(record: Mapping[str, float]) -> tuple[float, float] | None:
    """Groups with identical rewards. With one answer per prompt, the whole step is one group."""
    groups, episodes = record.get("groups_kept"), record.get("episodes", 0.0)
    if not groups or episodes < 2:
        return None
    if episodes > groups + record.get("groups_dropped", 0.0):
        return record.get("zero_variance_groups", 0.0), groups
    return float(record.get("reward_std") == 0.0), 1.0


def _cut_answers(record: Mapping[str, float]) -> tuple[float, float] | None:
    share, answers = record.get("truncated_fraction"), record.get("episodes")
    return None if share is None or not answers else (share * answers, answers)


def _still_updates(record: Mapping[str, float]) -> tuple[float, float] | None:
    norm = record.get("grad_norm")
    return None if norm is None else (float(norm == 0.0), 1.0)


CONDITIONS = (
    Condition(
        "no_signal",
        _equal_groups,
        by_step=True,
        least=FLAT,
        said="No learning signal: {n} of {m} groups had identical rewards",
        cure="Inspect the answers in rollouts/. Usual fixes: an easier task, a reward with partial credit, supervised "
        "training first (warmup=N on a built-in task, or novarl sft), or more responses_per_prompt",
    ),
    Condition(
        "always_cut",
        _cut_answers,
        by_step=True,
        least=0.9,
        said="{n} of {m} answers were truncated at {limit}",
        always="Every answer was truncated at {limit}",
        cure="Usual fix: a larger max_new_tokens. Built-in models use byte-level tokens: a word takes about six tokens",
        lasting=True,
    ),
    Condition(
        "no_gradient",
        _still_updates,
        by_step=False,
        least=0.5,
        said="The gradient was 0 in {n} of {m} updates",
        cure="Usual fixes: a reward that tells answers to the same prompt apart, several answers per prompt "
        "(responses_per_prompt), or rows with tokens to train on",
    ),
)
"""Conditions that keep a run from learning, in the order in which they are reported."""


def cannot_learn(records: Records, *, limit: str = "max_new_tokens", improved: bool = False) -> list[Finding]:
    """The rows of `CONDITIONS` that hold. `records`: metrics of each update, in order; `limit`: the setting that
    truncates answers, such as "max_new_tokens=10"; `improved`: the held-out score rose, so the run did learn."""
    found = [row.find(records, limit) for row in CONDITIONS if row.lasting or not improved]
    return [finding for finding in found if finding is not None]


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
    records: Records, *, improved: bool, limit: str = "max_new_tokens", usual_lr: float | None = None
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
        found.append(Finding("cut", what + "the reward may favor length over quality"))
    return found


def _far(records: Sequence[Mapping[str, float]]) -> list[Finding]:
    moves = [0.0 if math.isnan(kl := record.get("kl", 0.0)) else kl for record in records]
    farthest = max(range(len(moves)), key=moves.__getitem__)
    if not moves[farthest] > FAR:
        return []
    often = sum(move > FAR for move in moves)
    were, they = ("was", "it") if often == 1 else ("were", "they")
    much = f"{often} of {len(moves)} update{'s' * (len(moves) != 1)} {were} too large"
    what = f"{much}: {they} moved the policy by more than {FAR:g} nats per token "
    where = f"(kl; {moves[farthest]:.2g} at update {farthest + 1})"
    return [Finding("far", f"{what}{where}; at most 0.01 is usual")]


def _entropy(before: float | None, late: Sequence[Mapping[str, float]]) -> list[Finding]:
    after = _mean(late, "entropy")
    if before is None or after is None or before <= 0:
        return []
    kept = _mean(late, "groups_kept") or 0.0
    flat = (_mean(late, "zero_variance_groups") or 0.0) / kept if kept else 1.0
    change = f"from {before:.2g} to {after:.2g} nats per token"
    if after < CERTAIN * before and flat >= FLAT:
        what = f"The entropy collapsed {change}, and {flat:.0%} of the groups have identical rewards"
        return [Finding("certain", what + ": more steps will not help")]
    if after > max(UNSURE * before, before + RISE):
        return [Finding("unsure", f"The entropy rose {change}: the policy is diverging")]
    return []


def _first(records: Sequence[Mapping[str, float]], name: str) -> float | None:
    return next((record[name] for record in records if name in record), None)


def _mean(records: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [record[name] for record in records if name in record]
    return fmean(values) if values else None
