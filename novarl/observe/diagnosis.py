"""What stands out in the metrics of a run: that it could not learn, why it collapsed or stands still, a line for each.

`CONDITIONS` are counted over a whole run ("N of M") and say that it could not learn; they are also checked early, while
it runs. The other signs are read off metrics whose healthy range the glossary states; their limits lie well beyond
those ranges. A run whose held-out score rose is only told of answers that are cut off: there the score may be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

SLOW = 3.0
"""A learning rate this many times below the usual one is low."""

ONE, FEW = 1.0, 10.0
"""Updates at the usual rate: by Adam's bound all updates of a run together move no weight further than these would.
Within `ONE` nothing is learnt; within `FEW` a run whose held-out score did not rise may lack steps."""

Sign = Literal["no_signal", "always_cut", "no_gradient", "low_lr", "far", "certain", "unsure", "cut"]
Records = Sequence[Mapping[str, float]]

CANNOT_LEARN: frozenset[str] = frozenset({"no_signal", "always_cut", "no_gradient", "low_lr"})
"""Signs of a run that could not learn: it is never said to have been successful."""


class Finding(NamedTuple):
    """A sign, what is said of it, and the usual cure."""

    sign: Sign
    said: str
    cure: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """One row of `CONDITIONS`.

    sign    its name
    count   of a record: (how many, of how many), or None where the record does not say
    by_step the counts belong to a step, whose updates all repeat them; else to an update
    least   the share of all from which it is said
    said    with {n} and {m}, and {limit}: what cuts answers off
    cure    what usually helps
    always  said where it is all of them
    lasting said of a run whose held-out score rose, too
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
        """The finding, where the condition holds over `records`."""
        if self.by_step:
            records = list({record.get("step", place): record for place, record in enumerate(records)}.values())
        counts = [found for record in records if (found := self.count(record)) is not None]
        n, m = (round(sum(column)) for column in zip(*counts, strict=True)) if counts else (0, 0)
        if m == 0 or n < self.least * m:
            return None
        said = self.always if n == m and self.always else self.said
        return Finding(self.sign, said.format(n=f"{n:,}", m=f"{m:,}", limit=limit), self.cure)


def _equal_groups(record: Mapping[str, float]) -> tuple[float, float] | None:
    """Groups whose rewards are equal. Where each prompt has one answer, the step is the group."""
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
        said="No learning signal: all rewards equal in {n} of {m} groups",
        cure="Usual cures: read the answers in rollouts/; an easier task or a reward with partial credit; supervised "
        "training first (warmup=N on a built-in task, or novarl sft); a larger responses_per_prompt",
    ),
    Condition(
        "always_cut",
        _cut_answers,
        by_step=True,
        least=0.9,
        said="{n} of {m} answers were cut off at {limit}",
        always="Every answer was cut off at {limit}",
        cure="Usual cure: a larger max_new_tokens. It counts tokens of the model in use; a token of a built-in model "
        "is one byte, and a word has about six",
        lasting=True,
    ),
    Condition(
        "no_gradient",
        _still_updates,
        by_step=False,
        least=0.5,
        said="The gradient was 0 in {n} of {m} updates",
        cure="Usual cures: rewards that differ between the answers to one prompt; several answers to each "
        "(responses_per_prompt); trained tokens in every row",
    ),
)
"""What keeps a run from learning, in the order in which it is said."""


def cannot_learn(records: Records, *, limit: str = "max_new_tokens", improved: bool = False) -> list[Finding]:
    """The rows of `CONDITIONS` that hold. `records`: metrics of each update, in order; `limit`: what cuts answers off,
    such as "max_new_tokens=10"; `improved`: the held-out score rose, so the run did learn."""
    found = [row.find(records, limit) for row in CONDITIONS if row.lasting or not improved]
    return [finding for finding in found if finding is not None]


def low_rate(lr: float, usual: float, updates: int, *, within: float = ONE) -> Finding | None:
    """That all `updates` at learning rate `lr` move a model no further than `within` updates at its `usual` rate."""
    if lr * SLOW > usual or lr * updates >= within * usual:
        return None
    said = f"The learning rate {lr:g} is {usual / lr:,.0f} times below the default for this model ({usual:g}): "
    said += f"{updates:,} update{'s' * (updates != 1)} can hardly change it"
    return Finding(
        "low_lr", said, f"Usual cures: the default (leave learning_rate out, or optim.lr={usual:g}); more steps"
    )


def findings(
    records: Records, *, improved: bool, limit: str = "max_new_tokens", usual_lr: float | None = None
) -> list[Finding]:
    """The signs in `records`, one of metrics for each update in order. `improved`: the held-out score rose; `limit` and
    `usual_lr`, the default learning rate, as in `cannot_learn` and `low_rate`."""
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
