"""The statistics of `novarl compare`, against simulated truth and against published tables."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from novarl.observe.compare import (
    Difference,
    compare,
    holm,
    plan,
    sampling_variance,
    student_cdf,
    student_quantile,
)

TABLE = {1: 12.7062, 2: 4.3027, 5: 2.5706, 10: 2.2281, 30: 2.0423, 120: 1.9799}
"""t(0.975) by degrees of freedom, as printed in textbooks."""


def test_students_t_is_that_of_the_tables() -> None:
    for freedom, wanted in TABLE.items():
        assert student_quantile(0.975, freedom) == pytest.approx(wanted, abs=1e-4)
        assert student_cdf(-wanted, freedom) == pytest.approx(0.025, abs=1e-5)
    assert student_cdf(1.0, 1) == pytest.approx(0.75)  # Cauchy: 1/2 + atan(1) / pi


def answers(
    chance: random.Random, prompts: int, runs: tuple[int, int], effect: float, *, seeds: float = 0.0
) -> tuple[list[list[float]], list[list[float]]]:
    """Right or wrong answers of two sides whose mean chance of being right differs by `effect`. Prompts differ in how
    hard they are, and runs by +-`seeds`."""
    hard = [chance.uniform(0.25, 0.65) for _ in range(prompts)]

    def run(shift: float) -> list[float]:
        shift += seeds * chance.choice((-1.0, 1.0)) if seeds else 0.0
        return [float(chance.random() < at + shift) for at in hard]

    return [run(0.0) for _ in range(runs[0])], [run(effect) for _ in range(runs[1])]


def covered(found: Difference, truth: float) -> bool:
    return found.low <= truth <= found.high


@pytest.mark.parametrize(
    ("prompts", "runs", "seeds"),
    [(40, (1, 1), 0.0), (150, (1, 1), 0.0), (60, (3, 3), 0.08), (50, (2, 5), 0.08), (60, (1, 4), 0.08)],
)
def test_the_interval_contains_the_truth_in_95_of_100_cases(prompts: int, runs: tuple[int, int], seeds: float) -> None:
    chance = random.Random(7)
    found = [compare(*answers(chance, prompts, runs, 0.1, seeds=seeds)) for _ in range(600)]
    assert 0.92 <= fmean(covered(one, 0.1) for one in found) <= 0.98


def test_the_interval_is_not_too_short_if_seeds_make_no_difference() -> None:
    chance = random.Random(14)
    found = [compare(*answers(chance, 40, (3, 3), 0.1)) for _ in range(400)]
    assert fmean(covered(one, 0.1) for one in found) >= 0.93


def test_an_interval_that_ignores_the_seeds_would_be_wrong() -> None:
    """The fault that the variance between runs repairs: the prompts alone miss half of the truth."""
    chance = random.Random(8)
    missed = []
    for _ in range(300):
        first, second = answers(chance, 200, (3, 3), 0.1, seeds=0.1)
        pooled = compare([[fmean(column) for column in zip(*side, strict=True)] for side in (first,)],
                         [[fmean(column) for column in zip(*side, strict=True)] for side in (second,)])  # fmt: skip
        missed.append(covered(pooled, 0.1))
    assert fmean(missed) < 0.6


def test_pairing_by_prompt_shortens_the_interval() -> None:
    chance = random.Random(9)
    hard = [float(chance.random() < 0.5) for _ in range(200)]
    easier = [max(value, float(chance.random() < 0.1)) for value in hard]
    found = compare([hard], [easier])
    shuffled = compare([hard], [chance.sample(easier, len(easier))])
    assert found.error < 0.5 * shuffled.error
    assert (found.better, found.worse) == (sum(b > a for a, b in zip(hard, easier, strict=True)), 0)


def test_the_planned_number_of_prompts_has_a_power_of_80_percent() -> None:
    chance, effect = random.Random(10), 0.15
    pilot = compare(*answers(chance, 4000, (1, 1), effect))
    planned = plan(pilot, effect)
    assert planned is not None and planned.prompts is not None
    found = [compare(*answers(chance, planned.prompts, (1, 1), effect)) for _ in range(800)]
    assert 0.76 <= fmean(one.p < 0.05 for one in found) <= 0.84
    half = [compare(*answers(chance, planned.prompts // 2, (1, 1), effect)) for _ in range(300)]
    assert fmean(one.p < 0.05 for one in half) < 0.65


def test_more_prompts_alone_cannot_beat_the_variance_between_seeds() -> None:
    found = compare(*answers(random.Random(11), 500, (4, 4), 0.0, seeds=0.2))
    planned = plan(found, 0.02)
    assert planned is not None and planned.prompts is None
    assert planned.both is not None or planned.seeds is not None


def test_the_part_of_the_sampling_noise_is_found() -> None:
    chance = random.Random(12)
    hard = [chance.uniform(0.2, 0.8) for _ in range(3000)]
    samples = [[[float(chance.random() < at) for _ in range(4)] for at in hard] for _ in range(2)]
    scores = [[[fmean(drawn) for drawn in side]] for side in samples]
    part = sampling_variance([[side] for side in samples])
    found = compare(scores[0], scores[1], of_samples=part)
    assert part == pytest.approx(found.of_prompts, rel=0.1)  # both sides are one model: nothing but sampling
    planned = plan(found, found.error)
    assert planned is not None and planned.samples == pytest.approx(planned.prompts / 3000, rel=0.15)  # type: ignore[operator]


def test_scores_that_do_not_vary_give_no_interval() -> None:
    same = compare([[1.0, 0.0, 1.0]], [[1.0, 0.0, 1.0]])
    assert same.p == 1.0 and math.isnan(same.low) and plan(same) is None
    better = compare([[0.0] * 8], [[1.0] * 8])
    assert better.p == 2.0**-7 and better.mean == 1.0
    alone = compare([[0.0]], [[1.0]])
    assert alone.p == 1.0 and math.isnan(alone.low)


def test_a_side_with_one_run_gets_the_variance_of_the_other() -> None:
    first, second = answers(random.Random(13), 100, (1, 4), 0.1, seeds=0.1)
    found = compare(first, second)
    assert found.seeds_known and found.error > compare(first, [second[0]]).error / 2
    assert found.of_seeds > 0 and not compare(first, [second[0]]).seeds_known


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
