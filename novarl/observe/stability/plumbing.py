"""Tells apart why sampler and learner disagree, from the log-probabilities of the tokens of a step and of those before.

d = log pi_learner - log mu for each sampled token. Where both sides have the same distribution it is rounding error.
Otherwise each fault has a signature (the table in `faults`). All functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from novarl.observe.stability import faults
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
    fit, scale  share of d's variance explained by a rescaled distribution, and the ratio of temperatures
    long, short mean |d| in the rows with the longest prompts and in the others; NaN if all are equally long
    first       mean |d| of the first token of each answer
    base        mean |log mu - log pi_ref|; NaN without a reference
    move        how far the step's updates moved the policy (kl, summed)
    fresh       whether no update came before the step
    """

    tokens: int
    mean: float
    size: float
    square: float
    middle: float
    largest: float
    above: float
    noise: float
    fit: float
    scale: float
    long: float
    short: float
    first: float
    base: float
    move: float = 0.0
    fresh: bool = False

    def beside(self, move: float, *, fresh: bool) -> Measured:
        """The same with what the metrics say about the step."""
        return replace(self, move=move, fresh=fresh)


EXACT, ROUGH = 1e-4, 0.03
"""Mean |d| in nats that rounding explains: in float32 (measured: single tokens at most 2.5e-5), and in 16 bits or where
the precision is not known."""

NEVER, MOST_CUT = 0.002, 3.0
"""Truncated sampling: at most this share of tokens above 0, and no d below minus this (5 % of the mass kept)."""
FIT, SCALES = 0.7, (0.4, 2.5)
"""Temperature: explained share of d's variance, and the ratios of temperatures that are told from other faults."""
STRONG = 2.0
"""|d| in nats of a token that belongs to another context or was replaced."""
JUMP, STILL = 3.0, 0.02
"""E[d^2] / 2 relative to what updates explain: above `JUMP` times all of them together it has another cause; below
`STILL` times the last one it is noise."""
TWICE, WAIT, GROWN = 2, 4, 1.7
"""Steps that tell stale weights from noise; in runs with adapters, where weights that never arrive look like late ones
at first; and the growth of |d| in these steps if they never do."""


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
        fit=fit,
        scale=scale,
        long=float(size[longest].mean()) if differ else math.nan,
        short=float(size[~longest].mean()) if differ else math.nan,
        first=float(size[columns.place == 0].mean()) if (columns.place == 0).any() else math.nan,
        base=float(np.abs(columns.behavior - columns.reference).mean()) if columns.reference.size else math.nan,
    )


def judge(history: Sequence[Measured], setting: Setting) -> Named | None:
    """The fault of the last step, if there is one; `history` holds the steps up to it."""
    limit = EXACT if setting.dtype == "float32" else ROUGH
    now = history[-1]
    if not now.size > limit and not now.noise > limit:
        return None
    d = f"log-probabilities of sampler and learner differ by {now.size:.2g} nats per token"
    if now.noise > limit:
        return Named(
            faults.DROPOUT,
            f"The learner's log-probabilities of equal tokens in equal contexts differ by {now.noise:.2g} nats",
        )
    if now.above <= NEVER and now.mean < -limit and now.largest < MOST_CUT:
        return Named(
            faults.TRUNCATED,
            f"The sampler's log-probability is the higher one of all tokens, by {-now.mean:.2g} nats on average",
        )
    if now.long <= limit < now.short:
        return Named(
            faults.PADDING,
            f"The {d} after shorter prompts ({now.short:.2g}), and agree after the longest ({now.long:.1g})",
        )
    if now.fit >= FIT and SCALES[0] <= now.scale <= SCALES[1] and abs(now.scale - 1.0) > 0.02:
        return Named(
            faults.TEMPERATURE,
            f"The {d}, as if the learner's temperature were {now.scale:.3g} times the sampler's (fit {now.fit:.0%})",
        )
    if setting.lag:
        return None
    return _by_history(history, setting, limit, f"The {d}")


def _by_history(history: Sequence[Measured], setting: Setting, limit: float, d: str) -> Named | None:
    """The fault of the last step among those that only its history tells apart."""
    now, past = history[-1], history[:-1]
    if now.middle <= limit and now.largest > STRONG:
        return Named(faults.TEMPLATE, f"{d}: a few tokens by up to {now.largest:.2g}, while half of them agree")
    bad = 1 + sum(1 for _ in takewhile(lambda step: step.size > limit, reversed(past)))
    onset, moved = history[-bad], sum(math.sqrt(max(0.0, step.move)) for step in history[:-bad]) ** 2
    if onset.size > 0.1 and onset.square / 2.0 > JUMP * moved:
        return Named(faults.TEMPLATE, f"{d}, far more than all updates before explain ({math.sqrt(2.0 * moved):.2g})")
    if setting.adapters and now.base <= limit:
        return Named(faults.ADAPTER, f"{d}, and the sampler's are those of the base model (difference {now.base:.1g})")
    if onset.fresh:
        return Named(faults.DTYPE, f"{d}, from before the first update")
    if bad < (WAIT if setting.adapters else TWICE):
        return None
    if setting.adapters and now.size > GROWN * onset.size:
        return Named(faults.ADAPTER, f"{d}, {now.size / onset.size:.0f} times as much as {bad - 1} steps before")
    share, explained = _explained(history, bad)
    if share < STILL:
        return Named(faults.DTYPE, f"{d}, and the last updates are no reason for it: they explain {explained:.2g}")
    return Named(faults.STALE, f"{d}, about what the last updates explain ({explained:.2g})")


def _explained(history: Sequence[Measured], bad: int) -> tuple[float, float]:
    """(E[d^2] / 2 relative to the updates before it, the median of the last `bad` steps; the mean |d| that
    they explain in the last one).

    KL of single updates is noisy, so that it counts as at least the median of all.
    """
    usual = median(step.move for step in history)
    before = [max(history[place - 1].move, usual) for place in range(len(history) - bad, len(history)) if place > 0]
    squares = [step.square / 2.0 for step in history[-len(before) :]]
    share = median(square / move if move > 0 else math.inf for square, move in zip(squares, before, strict=True))
    return share, math.sqrt(2.0 * before[-1])


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
