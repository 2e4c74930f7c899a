"""Tells apart why sampler and learner disagree, from the log-probabilities of the tokens of a step and of those before.

d = log pi_learner - log mu for each sampled token. Where both sides have the same distribution it is rounding error.
Otherwise each fault has a signature (the table in `faults`). All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from novarl.observe.stability.columns import Columns, Floats
from novarl.observe.stability.faults import Setting


class Named(NamedTuple):
    """A plumbing fault and its evidence."""

    cause: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of d over the tokens of one step.

    tokens, mean, size, square, middle, largest   their number; mean of d, |d| and d^2; median and maximum of |d|
    above       share of tokens with d above `EXACT`
    noise       learner: spread of its log-probabilities of the same token in the same context; NaN without such tokens
    again       share of tokens on which two evaluations of the learner agree; NaN with one evaluation
    fit, scale  share of d's variance explained by a rescaled distribution, and the ratio of temperatures
    long, short mean |d| in the rows with the longest prompts and in the others; NaN if all are equally long
    first       mean |d| of the first token of each answer
    base        mean |log mu - log pi_ref|; NaN without a reference
    move        how far the step's updates moved the policy (kl)
    """

    tokens: int
    mean: float
    size: float
    square: float
    middle: float
    largest: float
    above: float
    noise: float
    again: float
    fit: float
    scale: float
    long: float
    short: float
    first: float
    base: float
    move: float = math.nan

    def after(self, move: float) -> Measured:
        """The same with `move`."""
        return replace(self, move=move)


EXACT = 1e-4
"""Nats that rounding in float32 explains (measured: at most 2.5e-5)."""


def measure(columns: Columns) -> Measured:
    """The features of a step's tokens."""
    d = columns.learner - columns.behavior
    size = np.abs(d)
    fit, scale = _temperature(columns, d)
    longest = columns.prompt[columns.row] == columns.prompt[columns.row].max()
    differ = not longest.all()
    return Measured(
        tokens=d.size,
        mean=float(d.mean()),
        size=float(size.mean()),
        square=float((d * d).mean()),
        middle=float(np.median(size)),
        largest=float(size.max()),
        above=float((d > EXACT).mean()),
        noise=_noise(columns),
        again=float((np.abs(columns.learner - columns.again) <= EXACT).mean()) if columns.again.size else math.nan,
        fit=fit,
        scale=scale,
        long=float(size[longest].mean()) if differ else math.nan,
        short=float(size[~longest].mean()) if differ else math.nan,
        first=float(size[columns.place == 0].mean()) if (columns.place == 0).any() else math.nan,
        base=float(np.abs(columns.behavior - columns.reference).mean()) if columns.reference.size else math.nan,
    )


def judge(history: Sequence[Measured], setting: Setting) -> Named | None:
    """The fault of the last step, if there is one; `history` holds the steps up to it."""
    return None


def _noise(columns: Columns) -> float:
    order = np.argsort(columns.context, kind="stable")
    context, values = columns.context[order], columns.learner[order]
    same = context[1:] == context[:-1]
    return float(np.abs(values[1:] - values[:-1])[same].mean()) if same.any() else math.nan


def _temperature(columns: Columns, d: Floats) -> tuple[float, float]:
    """(share of d's variance that a rescaled distribution explains, learner's temperature / sampler's).

    mu = pi^a / sum pi^a gives d = (1 - a) (log pi + H) to first order in 1 - a, with H the entropy of pi.
    """
    if not columns.entropy.size or d.size < 8:
        return math.nan, math.nan
    x = columns.learner + columns.entropy
    features: Any = np.stack([x, columns.entropy], axis=1)
    weights, *_ = np.linalg.lstsq(features, d, rcond=None)
    left = d - features @ weights
    total = float((d * d).sum())
    return (1.0 - float((left * left).sum()) / total if total > 0 else 0.0), 1.0 - float(weights[0])
