"""Hypervolume: golden areas by hand, brute force by inclusion and exclusion, and what must hold of any set."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, strategies as st

from novarl.control.hypervolume import contributions, hypervolume
from novarl.core.errors import NovaError

Points = list[tuple[float, ...]]


def brute_force(points: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """The volume of a union of boxes: sum over non-empty subsets of (-1)^(size + 1) times the box they share."""
    terms = []
    for size in range(1, len(points) + 1):
        for subset in itertools.combinations(points, size):
            sides = [max(0.0, min(column) - r) for column, r in zip(zip(*subset, strict=True), reference, strict=True)]
            terms.append((-1) ** (size + 1) * math.prod(sides))
    return math.fsum(terms)


def random_set(number: int) -> tuple[Points, tuple[float, ...]]:
    """Set `number`: 1 to 8 points of 2 to 5 dimensions, every other one on a coarse grid, so with ties and duplicates;
    about one point in ten lies under the reference in some objective."""
    source = random.Random(number)
    dimensions, n = 2 + number % 4, source.randint(1, 8)

    def coordinate() -> float:
        return source.randint(0, 3) / 2 if number % 8 < 4 else source.uniform(-0.05, 1.0) * 10 ** source.randint(-1, 1)

    reference = tuple(source.choice((0.0, 0.01, -0.5)) for _ in range(dimensions))
    return [tuple(coordinate() for _ in range(dimensions)) for _ in range(n)], reference


def worst_error(sets: int = 500) -> float:
    """The largest error against brute force, relative where the volume is above 1, over that many random sets."""
    worst = 0.0
    for number in range(sets):
        points, reference = random_set(number)
        exact = brute_force(points, reference)
        worst = max(worst, abs(hypervolume(points, reference) - exact) / max(1.0, exact))
    return worst


def test_brute_force_on_500_random_sets() -> None:
    assert worst_error(500) <= 1e-9


def test_the_random_sets_are_worth_trying() -> None:
    """Every dimension and size, duplicates, points under the reference, and volumes that are not 0."""
    sets = [random_set(number) for number in range(500)]
    assert {(len(r), len(p)) for p, r in sets} == {(d, n) for d in range(2, 6) for n in range(1, 9)}
    assert sum(len(set(p)) < len(p) for p, _ in sets) > 25
    assert sum(any(min(map(float.__sub__, row, r)) < 0 for row in p) for p, r in sets) > 100
    assert sum(brute_force(p, r) > 0 for p, r in sets) > 400


def test_golden_two_dimensions() -> None:
    """(3, 1), (2, 2), (1, 3): rows of 3, 2 and 1 unit squares."""
    front = [(3.0, 1.0), (2.0, 2.0), (1.0, 3.0)]
    assert hypervolume(front, (0, 0)) == 6.0
    assert hypervolume(front, (1, 0)) == 2.0 + 1.0, "(1, 3) is level with the reference: it adds nothing"
    assert contributions(front, (0, 0)) == [1.0, 1.0, 1.0]


def test_golden_three_dimensions() -> None:
    """Two boxes 2 x 1 x 1 and 1 x 2 x 1 sharing a unit cube, and a tower 1 x 1 x 3 over that cube."""
    front = [(2.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.0, 1.0, 3.0)]
    assert hypervolume(front, (0, 0, 0)) == 2 + 2 - 1 + 2
    assert contributions(front, (0, 0, 0)) == [1.0, 1.0, 2.0]


@pytest.mark.parametrize("dimensions", [1, 2, 3, 4, 5, 6])
def test_one_box_and_none(dimensions: int) -> None:
    assert hypervolume([], (0.0,) * dimensions) == 0.0
    assert hypervolume([(2.0,) * dimensions], (0.5,) * dimensions) == pytest.approx(1.5**dimensions)
    assert hypervolume([(2.0,) * dimensions], (2.0,) * dimensions) == 0.0
    below = (9.0,) * (dimensions - 1) + (-1.0,)
    assert hypervolume([(2.0,) * dimensions, below], (0.0,) * dimensions) == pytest.approx(2.0**dimensions)


@pytest.mark.parametrize("dimensions", [2, 3, 4, 5])
def test_a_larger_front_agrees_with_counting_cells(dimensions: int) -> None:
    """40 points on a grid of 5: a cell is dominated where some point is past its far corner."""
    source = random.Random(dimensions)
    points = [tuple(float(source.randint(0, 5)) for _ in range(dimensions)) for _ in range(40 if dimensions > 2 else 4)]
    cells = itertools.product(range(1, 6), repeat=dimensions)
    counted = sum(any(all(p >= c for p, c in zip(point, cell, strict=True)) for point in points) for cell in cells)
    assert hypervolume(points, (0,) * dimensions) == counted > 0


SETS = st.integers(2, 4).flatmap(
    lambda d: st.lists(st.tuples(*[st.floats(-1, 3) | st.sampled_from([0.0, 1.0, 2.0])] * d), min_size=1, max_size=7)
)


@given(SETS, st.randoms(use_true_random=False))
def test_contributions_are_what_is_lost(points: Points, source: random.Random) -> None:
    reference = (0.0,) * len(points[0])
    whole = hypervolume(points, reference)
    lost = [whole - hypervolume(points[:i] + points[i + 1 :], reference) for i in range(len(points))]
    assert contributions(points, reference) == pytest.approx(lost, abs=1e-9)
    assert sum(lost) <= whole + 1e-9


@given(SETS, st.randoms(use_true_random=False))
def test_neither_order_nor_what_is_dominated_matters(points: Points, source: random.Random) -> None:
    reference = (0.0,) * len(points[0])
    whole = hypervolume(points, reference)
    shuffled = source.sample(points, len(points))
    worse = [tuple(value - 0.5 for value in point) for point in points]
    assert hypervolume(shuffled, reference) == pytest.approx(whole, abs=1e-12)
    assert hypervolume(points + worse + points, reference) == pytest.approx(whole, abs=1e-12)
    assert all(value == 0.0 for value in contributions(points + points, reference))


@given(SETS, st.data())
def test_better_is_never_less(points: Points, data: st.DataObject) -> None:
    """Raising one objective of one point never lowers the volume, and every point that it then wins adds to it."""
    reference = (0.0,) * len(points[0])
    place, objective = data.draw(st.integers(0, len(points) - 1)), data.draw(st.integers(0, len(reference) - 1))
    raised = [list(point) for point in points]
    raised[place][objective] += data.draw(st.floats(0, 2))
    before, after = hypervolume(points, reference), hypervolume(raised, reference)
    assert after >= before - 1e-12
    beyond = [4.0] * len(reference)
    assert hypervolume([*points, beyond], reference) > before


def test_tensors_and_lists_alike() -> None:
    points = torch.tensor([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0]])
    assert hypervolume(points, torch.zeros(2)) == hypervolume(points.tolist(), [0, 0]) == 6.0


@pytest.mark.parametrize(
    ("points", "reference", "words"),
    [
        ([(1.0, math.nan)], (0, 0), "finite"),
        ([(1.0, math.inf)], (0, 0), "finite"),
        ([(1.0, 1.0)], (0, -math.inf), "finite"),
        ([(1.0, 1.0, 1.0)], (0, 0), "3 objectives instead of 2"),
        ([], (), "finite"),
    ],
)
def test_bad_input(points: Points, reference: tuple[float, ...], words: str) -> None:
    for measure in (hypervolume, contributions):
        with pytest.raises(NovaError, match=words):
            measure(points, reference)
