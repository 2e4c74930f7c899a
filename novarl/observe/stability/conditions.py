"""Conditions that keep a run from learning, counted over its updates: "N of M". They are checked from the fifth step on
and at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from novarl.observe.stability.window import Record

FLAT = 0.75
"""Fraction of groups with identical rewards above which most samples carry no learning signal."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition.

    count   of a record: (how many, of how many), or None if the record does not tell
    by_step the counts belong to a step and are repeated by each of its updates; otherwise to an update
    least   the smallest fraction that is reported
    said    the message, with {n}, {m} and {limit} (the setting that truncates answers)
    always  the message if all of them are affected
    lasting also reported if the held-out score improved
    """

    count: Callable[[Record], tuple[float, float] | None]
    by_step: bool
    least: float
    said: str
    always: str = ""
    lasting: bool = False

    def evidence(self, records: Iterable[Record], limit: str, *, least: float | None = None) -> str | None:
        """The message, if the condition holds over `records`; `least` replaces its own."""
        records = list(records)
        if self.by_step:
            records = list({record.get("step", place): record for place, record in enumerate(records)}.values())
        counts = [found for record in records if (found := self.count(record)) is not None]
        n, m = (round(sum(column)) for column in zip(*counts, strict=True)) if counts else (0, 0)
        if m == 0 or n < (self.least if least is None else least) * m:
            return None
        said = self.always if n == m and self.always else self.said
        return said.format(n=f"{n:,}", m=f"{m:,}", limit=limit)


def equal_groups(record: Record) -> tuple[float, float] | None:
    """Groups with identical rewards. With one answer per prompt, the whole step is one group."""
    groups, episodes = record.get("groups_kept"), record.get("episodes", 0.0)
    if not groups or episodes < 2:
        return None
    if episodes > groups + record.get("groups_dropped", 0.0):
        return record.get("zero_variance_groups", 0.0), groups
    return float(record.get("reward_std") == 0.0), 1.0


def _cut_answers(record: Record) -> tuple[float, float] | None:
    share, answers = record.get("truncated_fraction"), record.get("episodes")
    return None if share is None or not answers else (share * answers, answers)


def _still_updates(record: Record) -> tuple[float, float] | None:
    norm = record.get("grad_norm")
    return None if norm is None else (float(norm == 0.0), 1.0)


CONDITIONS = {
    "no_signal": Condition(
        equal_groups,
        by_step=True,
        least=FLAT,
        said="No learning signal: {n} of {m} groups had identical rewards",
    ),
    "always_cut": Condition(
        _cut_answers,
        by_step=True,
        least=0.9,
        said="{n} of {m} answers were truncated at {limit}",
        always="Every answer was truncated at {limit}",
        lasting=True,
    ),
    "no_gradient": Condition(
        _still_updates,
        by_step=False,
        least=0.5,
        said="The gradient was 0 in {n} of {m} updates",
    ),
}
"""Conditions by the name of their alert, in the order in which they are reported."""
