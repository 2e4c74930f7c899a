"""Dominance and the archive: the sign that went wrong elsewhere, golden fronts, and what an archive promises."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from novarl.control.hypervolume import hypervolume
from novarl.control.pareto import Evaluated, ParetoArchive, crowding_distance, dominates, maximised, non_dominated
from novarl.core.errors import NovaError

GRID = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0])
VECTORS = st.integers(2, 3).flatmap(lambda k: st.lists(st.tuples(*[GRID] * k), min_size=1, max_size=12))
GOOD, BAD = (1.0, 0.01), (0.0, 1.0)
"""(reward, KL): reward is to be maximised and KL minimised."""


def names(archive: ParetoArchive) -> list[str]:
    return [entry.name for entry in archive.front()]


def filled(archive: ParetoArchive, *vectors: tuple[float, ...]) -> ParetoArchive:
    for step, row in enumerate(vectors):
        archive.add(f"step-{step}", row, step=step)
    return archive


def test_more_reward_and_less_kl_dominates() -> None:
    assert dominates(GOOD, BAD, directions=("max", "min"))
    assert not dominates(BAD, GOOD, directions=("max", "min"))
    assert not dominates(GOOD, BAD), "without directions everything is maximised: neither is better in both"


@pytest.mark.parametrize(
    ("a", "b", "ours", "theirs"),
    [
        ((1, 1), (0, 0), True, False),
        ((1, 0), (0, 0), True, False),
        ((1, 0), (0, 1), False, False),
        ((1, 1), (1, 1), False, False),
        ((1, 1, 0), (1, 0, 0), True, False),
    ],
)
def test_dominates(a: tuple[float, ...], b: tuple[float, ...], ours: bool, theirs: bool) -> None:
    assert (dominates(a, b), dominates(b, a)) == (ours, theirs)
    turned = ("min",) * len(a)
    assert (dominates(b, a, directions=turned), dominates(a, b, directions=turned)) == (ours, theirs)


def test_epsilon_dominance() -> None:
    a, b = (1.0, 1.0), (1.25, 0.5)
    assert not dominates(a, b)
    assert dominates(a, b, epsilon=0.25), "moved by exactly what it lacks"
    assert not dominates(a, b, epsilon=0.2)
    assert dominates(a, b, epsilon=(0.25, 0.0)) and not dominates(a, b, epsilon=(0.0, 0.25))
    assert dominates((1.0, 1.0), (1.25, 1.0), epsilon=0.25, directions=("max", "min")), "equal after the move in one"
    assert dominates((1.0, 1.0), (1.0, 0.75), epsilon=0.25, directions=("max", "min")), "towards the better: down"
    assert not dominates((1.0, 1.0), (1.0, 0.7), epsilon=0.25, directions=("max", "min"))


@given(VECTORS)
def test_dominance_is_a_strict_order(vectors: list[tuple[float, ...]]) -> None:
    for a in vectors:
        assert not dominates(a, a)
        for b in vectors:
            assert not (dominates(a, b) and dominates(b, a))
            for c in vectors:
                assert not (dominates(a, b) and dominates(b, c)) or dominates(a, c)


@given(VECTORS)
def test_non_dominated_is_what_nothing_beats(vectors: list[tuple[float, ...]]) -> None:
    kept = non_dominated(vectors)
    assert kept == sorted(kept) and kept
    for i, row in enumerate(vectors):
        beaten = [j for j in kept if dominates(vectors[j], row)]
        assert bool(beaten) == (i not in kept), "out of the front exactly where a member of the front beats it"
    turned = [tuple(-value for value in row) for row in vectors]
    assert non_dominated(turned, directions=("min",) * len(vectors[0])) == kept


def test_tensors_do_as_well() -> None:
    assert non_dominated(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])) == [0, 1]
    assert dominates(torch.ones(2), [0.0, 1.0])


def test_golden_crowding_distance() -> None:
    """On the line from (0, 4) to (4, 0): the gap round (1, 3) is 3/4 + 3/4, round (3, 1) it is 3/4 + 3/4."""
    assert crowding_distance([(0, 4), (1, 3), (3, 1), (4, 0)]) == [math.inf, 1.5, 1.5, math.inf]
    assert crowding_distance([(4, 0), (1, 3), (0, 4)]) == [math.inf, 2.0, math.inf]
    assert crowding_distance([(1, 1)]) == [0.0], "alone, it has neither neighbours nor ends"
    assert crowding_distance([]) == []
    assert crowding_distance([(1,), (4,), (2,)]) == [math.inf, math.inf, 1.0], "both ends of each objective"


def test_the_archive_keeps_the_best_and_not_the_worst() -> None:
    archive = ParetoArchive(directions=("max", "min"))
    assert archive.add("bad", BAD)
    assert archive.add("good", GOOD, (0.01, 0.001), step=7)
    assert archive.front() == (Evaluated("good", GOOD, (0.01, 0.001), 7),)
    assert not archive.add("bad again", BAD)
    assert not archive.add("the same score", GOOD), "equal: nothing new"
    assert len(archive) == 1


@given(VECTORS)
def test_the_archive_is_the_front_of_all_it_was_offered(vectors: list[tuple[float, ...]]) -> None:
    archive = filled(ParetoArchive(), *vectors)
    assert {entry.vector for entry in archive.front()} == {vectors[i] for i in non_dominated(vectors)}
    assert len({entry.vector for entry in archive.front()}) == len(archive), "no duplicates"


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 2)), min_size=1, max_size=20))
def test_with_epsilon_no_vector_was_lost_by_more_than_that(vectors: list[tuple[float, float]]) -> None:
    """Also where members are replaced by and by: the losses do not add up."""
    epsilon = 0.25
    archive = filled(ParetoArchive(epsilon=epsilon), *vectors)
    for row in vectors:
        assert any(all(m + epsilon >= v for m, v in zip(entry.vector, row, strict=True)) for entry in archive.front())


def test_with_epsilon_only_what_is_truly_dominated_goes() -> None:
    """(0.45, 1) is turned away for (0.2, 1), which (0, 1.3) may not then take out: nothing would be left near it."""
    archive = filled(ParetoArchive(epsilon=0.25), (0.2, 1.0), (0.45, 1.0), (0.0, 1.3))
    assert [entry.vector for entry in archive.front()] == [(0.0, 1.3), (0.2, 1.0)]


def test_epsilon_thins_the_archive() -> None:
    line = [(i / 100, 1 - i / 100) for i in range(101)]
    assert len(filled(ParetoArchive(capacity=1000), *line)) == 101
    assert 8 <= len(filled(ParetoArchive(capacity=1000, epsilon=0.1), *line)) <= 11


def test_crowding_prunes_the_middle_and_keeps_the_ends() -> None:
    """(0.5, 3.5) has the nearest neighbours."""
    archive = filled(ParetoArchive(capacity=4), (0, 4), (4, 0), (1, 3), (0.5, 3.5), (3, 1))
    assert [entry.vector for entry in archive.front()] == [(0, 4), (1, 3), (3, 1), (4, 0)]


def test_contribution_prunes_what_adds_least() -> None:
    """Over (0, 0): the knee (3, 3) adds most; (4, 1) adds 1 x 1, (1, 4) adds 1 x 1, (3.5, 1.5) adds 0.5 x 0.5."""
    vectors = [(1.0, 4.0), (3.0, 3.0), (4.0, 1.0), (3.5, 1.5)]
    archive = filled(ParetoArchive(capacity=3, prune="contribution", reference=(0, 0)), *vectors)
    assert [entry.vector for entry in archive.front()] == [(1, 4), (3, 3), (4, 1)]
    without_reference = filled(ParetoArchive(capacity=3, prune="contribution"), *vectors)
    assert without_reference.front() == archive.front(), (
        "then it is a third of the extent below the worst: (0, 0) again"
    )


def test_without_a_reference_an_even_front_is_thinned_from_the_newest() -> None:
    """Every point contributes as much as any other, the ends too."""
    line = [(i / 4, 1 - i / 4) for i in (4, 0, 1, 3, 2)]
    archive = filled(ParetoArchive(capacity=4, prune="contribution"), *line)
    assert [entry.step for entry in archive.front()] == [1, 2, 3, 0]


def test_the_reference_is_given_as_measured() -> None:
    """Reward up, KL down, over reward 0 and KL 1: the first adds 0.1 x 0.1 to the others."""
    vectors = [(0.6, 0.4), (0.5, 0.1), (1.0, 0.5)]
    archive = ParetoArchive(2, prune="contribution", reference=(0.0, 1.0), directions=("max", "min"))
    assert [entry.vector for entry in filled(archive, *vectors).front()] == [(0.5, 0.1), (1.0, 0.5)]


@pytest.mark.parametrize("prune", ["crowding", "contribution"])
@given(vectors=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=8, max_size=25))
def test_a_full_archive_stays_full_and_undominated(prune: Any, vectors: list[tuple[float, ...]]) -> None:
    archive = filled(ParetoArchive(6, prune=prune), *vectors)
    rows = [entry.vector for entry in archive.front()]
    assert len(rows) <= 6 and non_dominated(rows) == list(range(len(rows)))


def test_pruning_by_contribution_loses_little_volume() -> None:
    """A quarter circle of 60 points thinned to 10 keeps 95 % of it, and crowding keeps both ends."""
    circle = [(math.sin(a), math.cos(a)) for a in (math.pi / 2 * i / 59 for i in range(60))]
    whole = hypervolume(circle, (-0.1, -0.1))
    kept = filled(ParetoArchive(10, prune="contribution", reference=(-0.1, -0.1)), *circle)
    assert hypervolume([entry.vector for entry in kept.front()], (-0.1, -0.1)) > 0.95 * whole
    crowded = [entry.vector for entry in filled(ParetoArchive(10), *circle).front()]
    assert crowded[0] == circle[0] and crowded[-1] == circle[-1]


def test_a_name_offered_again_stands_for_its_newest_evaluation() -> None:
    archive = ParetoArchive()
    archive.add("a", (1.0, 0.0))
    archive.add("b", (0.0, 1.0))
    assert archive.add("a", (0.5, 0.5))
    assert archive.front() == (Evaluated("b", (0.0, 1.0)), Evaluated("a", (0.5, 0.5)))
    assert not archive.add("a", (-1.0, 0.5)), "and where that is dominated, for nothing"
    assert names(archive) == ["b"]


def test_state_goes_through_json(tmp_path: Path) -> None:
    archive = ParetoArchive(directions=("max", "min"))
    archive.add("runs/a/checkpoints/7", GOOD, (0.1, 0.2), step=7)
    archive.add("runs/a/checkpoints/9", (2.0, 0.5), step=9)
    state = json.loads(json.dumps(archive.state_dict()))
    again = ParetoArchive(directions=("max", "min"))
    again.load_state_dict(state)
    assert again.front() == archive.front() and again.state_dict() == archive.state_dict()
    assert again.add("c", (3.0, 0.001)) and len(again) == 1 and len(archive) == 2


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: dominates((1.0, math.nan), (0.0, 0.0)), "finite"),
        (lambda: dominates((1.0, 1.0), (0.0, 0.0, 0.0)), "3 objectives instead of 2"),
        (lambda: dominates((1.0, 1.0), (0.0, 0.0), epsilon=-0.1), "non-negative"),
        (lambda: dominates((1.0, 1.0), (0.0, 0.0), epsilon=(0.1,)), "2 of them"),
        (lambda: maximised((1.0, 1.0), ("max", "up")), "max or min"),  # type: ignore[arg-type]
        (lambda: maximised((1.0, 1.0), ("max",)), "2 objectives instead of 1"),
        (lambda: non_dominated([(1.0, math.inf)]), "finite"),
        (lambda: ParetoArchive(0), "at least 1"),
        (lambda: ParetoArchive(prune="recency"), "unknown pruning rule"),  # type: ignore[arg-type]
        (lambda: ParetoArchive().add("a", (1.0, math.nan)), "'a'"),
        (lambda: ParetoArchive().add("a", (1.0, 2.0), (0.1,)), "standard error of 'a'"),
        (lambda: filled(ParetoArchive(), (1.0, 2.0), (1.0, 2.0, 3.0)), "objectives instead of"),
    ],
)
def test_mistakes_are_said(mistake: Any, words: str) -> None:
    with pytest.raises(NovaError, match=words):
        mistake()
