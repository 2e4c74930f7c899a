"""Scores and intervals, by published numbers and by counting subsets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from random import Random
from statistics import fmean, stdev

import pytest
import torch
from torch import Tensor

from novarl.core.types import Batch, Prompt, Rollout, Scored
from novarl.distributed.ranks import Ranks
from novarl.loops.evaluate import evaluate, evaluate_likelihood, mean_interval, pass_at_k, wilson
from tests.invariance.sharp import lessons
from tests.loops.fakes import prompts, rollout, scored


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775328),
        (8, 10, 0.4901625, 0.9433178),
        (10, 10, 0.7224672, 1.0),
        # Newcombe (1998), table I, to four digits
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_a_tie_is_half_a_success() -> None:
    low, high = wilson(14.5, 29)
    assert low == pytest.approx(1 - high) and wilson(14, 29)[0] < low < wilson(15, 29)[0]


def test_wilson_of_nothing_is_everything() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_mean_interval() -> None:
    assert mean_interval([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)
    low, high = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert (low, high) == pytest.approx((2.5 - 1.2651515, 2.5 + 1.2651515), abs=1e-6)
    assert mean_interval([0.5]) == (-math.inf, math.inf)


@pytest.mark.parametrize("shares", [(0.0, 0.5, 1.0), (0.8, 0.9, 1.0), (0.0, 0.01, 1.0), (0.3, 0.4, 0.5)])
def test_the_interval_of_shares_stays_within_them_and_covers(shares: tuple[float, ...]) -> None:
    """Of 2,000 samples of 30 rows, 95 % of the intervals hold the true mean (4.5 standard errors: 2.2 %)."""
    random, weights = Random(0), (0.02, 0.18, 0.8)
    true = sum(share * weight for share, weight in zip(shares, weights, strict=True))
    inside = 0
    for _ in range(2_000):
        low, high = mean_interval(random.choices(shares, weights, k=30))
        assert 0.0 <= low <= high <= 1.0
        inside += low <= true <= high
    assert 0.9 <= inside / 2_000 <= 0.995


def test_the_interval_of_shares_is_the_usual_one_far_from_the_ends() -> None:
    values = [0.4, 0.5, 0.6] * 1_000
    low, high = mean_interval(values)
    assert (high - low) / 2 == pytest.approx(1.959964 * stdev(values) / math.sqrt(3_000), rel=1e-3)
    assert mean_interval([0.5] * 9) == (0.5, 0.5)
    assert mean_interval([1.0] * 26 + [0.5] * 3)[1] < 1.0, "1.029 by the normal approximation of few rows"


@pytest.mark.parametrize(
    ("n", "correct", "k", "value"),
    [(5, 2, 3, 0.9), (10, 3, 1, 0.3), (200, 1, 100, 0.5), (4, 0, 4, 0.0), (3, 3, 1, 1.0)],
)
def test_pass_at_k(n: int, correct: int, k: int, value: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(value, abs=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for n, k in itertools.product(range(1, 7), range(1, 7)):
        for correct in range(n + 1):
            if k <= n:
                subsets = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
                assert pass_at_k(n, correct, k) == pytest.approx(fmean(map(any, subsets)), abs=1e-12)


def answer(asked: Seq[tuple[int, Prompt]], samples: int, temperature: float) -> list[Rollout]:
    """Greedy answers carry number 0; sampled ones are counted from 1."""
    first = 0 if temperature == 0 else 1
    return [rollout(prompt, group, first + index) for group, prompt in asked for index in range(samples)]


def judge(rollouts: list[Rollout]) -> list[Scored]:
    """Greedily, even rows are right and row 5 fails; of four samples the first `row` are right."""
    found = []
    for item in rollouts:
        row = item.group
        right: float | None = float(row % 2 == 0) if item.index == 0 else float(item.index <= row)
        found.append(scored(item, None if (row, item.index) == (5, 0) else right))
    return found


def test_evaluation() -> None:
    found = evaluate(prompts(6), answer, judge, ranks=Ranks(), k=4)
    assert (found.n, found.failed) == (5, 1) and found.score == 0.6 and found.interval == wilson(3, 5)
    right = [0, 1, 2, 3, 4, 4]
    assert found.pass_at == {k: pytest.approx(fmean(pass_at_k(4, c, k) for c in right)) for k in (1, 2, 4)}
    summary = found.summary()
    assert found.pass_interval[1] == mean_interval([c / 4 for c in right])
    assert summary["pass@1_interval"] == list(found.pass_interval[1]) and found.pass_interval[1][0] < 14 / 24
    assert summary["pass@1"] == pytest.approx(14 / 24) and summary["failed"] == 1 and summary["n"] == 5


def test_greedy_alone_says_nothing_of_samples() -> None:
    found = evaluate(prompts(2), answer, judge, ranks=Ranks())
    assert found.pass_at == {} and found.summary() == {"score": 0.5, "interval": list(wilson(1, 2)), "n": 2}


def test_nothing_could_be_scored() -> None:
    found = evaluate(prompts(3), answer, lambda rollouts: [scored(r, None) for r in rollouts], ranks=Ranks())
    assert math.isnan(found.score) and found.n == 0 and found.failed == 3


def test_likelihood_is_the_mean_over_rows() -> None:
    """A long row counts as much as a short one, and only trained tokens count."""
    rows = lessons()[:5]

    def logprobs(batch: Batch) -> Tensor:
        return -batch.position_ids.float()

    means = [fmean(-float(place) for place, chosen in enumerate(row.mask) if chosen) for row in rows]
    for batch_size in (2, 64):
        found = evaluate_likelihood(rows, logprobs, batch_size=batch_size)
        assert found.score == pytest.approx(fmean(means)) and found.n == 5
        assert found.interval == pytest.approx(mean_interval(means))
    assert torch.tensor(means).std() > 0.1
