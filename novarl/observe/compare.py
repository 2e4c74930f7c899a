"""Statistics of two sets of runs that answered the same held-out prompts: the difference, its interval, and a plan.

Notation: side A has S_A runs (seeds), side B has S_B, and all answered the same P prompts. The score of a run on a
prompt is the mean of its samples. Following "Adding Error Bars to Evals" (Miller 2024, arXiv 2411.00640), prompts are
the clusters, and differences are paired by prompt, which removes what both sides share: how hard the prompt is. Runs
with the same settings and other seeds add a second, independent source of variance, that of training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

Scores = Sequence[Sequence[float]]
"""The scores of one side: one sequence per run, in the order of the prompts."""

LEVEL = 0.95
POWER = 0.8


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean score of B minus mean score of A.

    mean         the difference
    low, high    its 95 % interval; both nan if the scores do not vary, or there is one prompt
    p            two-sided p-value of the hypothesis that there is no difference
    error        standard error, and `freedom` its degrees of freedom
    prompts      P, and `seeds` (S_A, S_B)
    better, worse, equal   the number of prompts on which B's mean over its runs is higher, lower, equal
    of_prompts   the part of the squared error that more prompts reduce, and `of_seeds` the part that more runs reduce
    of_samples   the part of `of_prompts` that more samples per prompt reduce; nan if runs have one sample per prompt
    seeds_known  whether `of_seeds` was measured; with one run on each side it is not, and the interval leaves it out
    """

    mean: float
    low: float
    high: float
    p: float
    error: float
    freedom: float
    prompts: int
    seeds: tuple[int, int]
    better: int
    worse: int
    equal: int
    of_prompts: float
    of_seeds: float
    of_samples: float
    seeds_known: bool


def compare(first: Scores, second: Scores, *, of_samples: float = math.nan) -> Difference:
    """The difference of two sides, A = `first` and B = `second`.

    With d_p the difference of the mean scores on prompt p, and m_s the mean score of run s of a side,

        V_prompts = var(d_p) / P                          the cluster-robust variance; here every cluster is one d_p
        V_seeds   = var(m_s of A) / S_A + var(m_s of B) / S_B
        V_both    = sum over sides of sigma^2 / (S P), sigma^2 the residual variance of run and prompt, in both of these
        V         = V_prompts + V_seeds - V_both, at least the larger of the first two
        freedom   = V^2 / sum_i V_i^2 / freedom_i         (Satterthwaite 1946), P - 1 and S - 1 for the parts

    and the interval is mean +- t(freedom) sqrt(V). A side with one run is given the variance between runs of the other
    side. If neither side has two runs, V = V_prompts: the interval is that of these two models, over prompts. If the
    scores do not vary, there is no interval, and p is that of the sign test, 2^(1 - P).
    """
    prompts = len(first[0])
    average = [[fmean(column) for column in zip(*side, strict=True)] for side in (first, second)]
    moved = [b - a for a, b in zip(*average, strict=True)]
    mean = fmean(moved)
    signs = (sum(d > 0 for d in moved), sum(d < 0 for d in moved), sum(d == 0 for d in moved))
    by_prompt = variance(moved) / prompts if prompts > 1 else math.nan
    parts = [(by_prompt, prompts - 1.0)]
    between = _between_runs(first, second)
    parts += [(part, freedom) for part, freedom, _ in between]
    by_seed = sum(part for part, _, _ in between)
    total = max(by_prompt + by_seed - sum(both for _, _, both in between), by_prompt, by_seed)
    error = math.sqrt(total) if prompts > 1 else math.nan
    freedom = total**2 / sum(part**2 / most for part, most in parts) if error > 0 else math.nan
    if error > 0:
        half = student_quantile(0.5 + LEVEL / 2, freedom) * error
        low, high, p = mean - half, mean + half, 2 * (1 - student_cdf(abs(mean) / error, freedom))
    else:
        low, high, p = math.nan, math.nan, 1.0 if mean == 0 else 2.0 ** (1 - prompts)
    return Difference(
        mean,
        low,
        high,
        p,
        error,
        freedom,
        prompts,
        (len(first), len(second)),
        *signs,
        of_prompts=by_prompt,
        of_seeds=max(0.0, total - by_prompt) if between else 0.0,
        of_samples=of_samples,
        seeds_known=bool(between),
    )


def _between_runs(first: Scores, second: Scores) -> list[tuple[float, float, float]]:
    """For each side: the variance of its mean between runs, its degrees of freedom, and the part of it that is in the
    variance between prompts too. Empty if no side has two runs."""
    known = [_spread(side) if len(side) > 1 else None for side in (first, second)]
    if known == [None, None]:
        return []
    pooled = next(found for found in known if found is not None)
    parts = []
    for side, found in zip((first, second), known, strict=True):
        between, residual, freedom = found or pooled
        parts.append((between / len(side), freedom, residual / (len(side) * len(side[0]))))
    return parts


def _spread(side: Scores) -> tuple[float, float, float]:
    """The variance of the runs' means, the residual variance of run and prompt, and the number of runs less one."""
    runs, prompts = len(side), len(side[0])
    means, columns = [fmean(run) for run in side], [fmean(column) for column in zip(*side, strict=True)]
    centre = fmean(means)
    rest = sum(
        (value - mean - column + centre) ** 2
        for run, mean in zip(side, means, strict=True)
        for value, column in zip(run, columns, strict=True)
    )
    return variance(means), rest / max(1, (runs - 1) * (prompts - 1)), runs - 1.0


def sampling_variance(sides: Sequence[Sequence[Sequence[Sequence[float]]]]) -> float:
    """The part of var(d_p) / P that comes from sampling: the sum over sides of mean_p var(samples) / (K S P), for K
    samples per run and prompt. nan if a prompt has one sample. `sides[side][run][prompt]` are the samples."""
    total = 0.0
    for side in sides:
        groups = [samples for run in side for samples in run]
        if any(len(samples) < 2 for samples in groups):
            return math.nan
        total += fmean(variance(samples) / len(samples) for samples in groups) / (len(side) * len(side[0]))
    return total


@dataclass(frozen=True, slots=True)
class Plan:
    """What would detect a difference of `effect` with 80 % power at the 5 % level; None where it alone cannot.

    `prompts`: held-out prompts in all; `seeds`: runs per side; `samples`: times as many samples per prompt; `both`:
    prompts and runs per side, if neither alone suffices.
    """

    effect: float
    prompts: int | None
    seeds: int | None
    samples: float | None
    both: tuple[int, int] | None = None


def plan(found: Difference, effect: float | None = None) -> Plan | None:
    """How many prompts, runs or samples per prompt detect `effect` (default: the observed difference).

    The squared error must fall to V* = (effect / (z(0.975) + z(0.8)))^2 (Miller 2024, section 5). Prompts divide
    `of_prompts` only, runs `of_seeds` only, and samples the part `of_samples` of `of_prompts`. If neither prompts nor
    runs alone get there, each gets half of V*. None if the effect is 0 or the scores do not vary.
    """
    effect = abs(found.mean if effect is None else effect)
    if effect == 0 or not found.error > 0:
        return None
    normal = NormalDist()
    target = (effect / (normal.inv_cdf(0.5 + LEVEL / 2) + normal.inv_cdf(POWER))) ** 2
    equal = found.seeds_known and found.seeds[0] == found.seeds[1]
    prompts = _needed(found.of_prompts * found.prompts, target - found.of_seeds)
    seeds = _needed(found.of_seeds * found.seeds[0], target - found.of_prompts) if equal else None
    fixed = found.of_prompts + found.of_seeds - found.of_samples
    samples = found.of_samples / (target - fixed) if target > fixed and found.of_samples > 0 else None
    both = None
    if prompts is None and seeds is None and equal:
        halves = (found.of_prompts * found.prompts, found.of_seeds * found.seeds[0])
        more = [math.ceil(half / (target / 2)) for half in halves]
        both = (max(more[0], found.prompts), max(more[1], found.seeds[0]))
    return Plan(effect, prompts, seeds, samples, both)


def _needed(each: float, target: float) -> int | None:
    """How many, at least 2, bring the squared error `each` of one to `target`; None if none do."""
    return max(2, math.ceil(each / target)) if target > 0 else None


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for several comparisons (Holm 1979): the i-th smallest of m times m - i + 1, made monotone."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found, highest = [0.0] * len(values), 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - place) * values[index]))
        found[index] = highest
    return found


def student_cdf(t: float, freedom: float) -> float:
    """P(T <= t) for Student's t with `freedom` degrees of freedom: 1 - I_x(freedom / 2, 1 / 2) / 2 for t >= 0, with
    x = freedom / (freedom + t^2) and I the regularized incomplete beta function (DLMF 8.17)."""
    tail = _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return 1 - tail if t >= 0 else tail


def student_quantile(p: float, freedom: float) -> float:
    """The t with `student_cdf(t) = p`, for p >= 0.5, by bisection."""
    low, high = 0.0, 2.0
    while student_cdf(high, freedom) < p:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction (DLMF 8.17.22), evaluated by Lentz's method where it converges fast."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        before = value
        for step in (even, odd):
            d = 1 / _nonzero(1 + step * d, tiny)
            c = _nonzero(1 + step / c, tiny)
            value *= c * d
        if abs(value - before) <= 1e-15 * abs(value):
            break
    return math.exp(log_front) * value / a


def _nonzero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
