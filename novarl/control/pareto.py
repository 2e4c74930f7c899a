"""Pareto dominance, and an archive of the checkpoints that nothing dominates.

    a dominates b: a is at least as good in every objective and better in one

What goes into an archive is a checkpoint that was *evaluated*: a vector of mean scores with their standard errors,
never the loss of a step, which is noise about one batch. Dominance is a choice among checkpoints and has no gradient;
what a run trains on is in `objectives`. Vectors are as measured; `directions` says which of their objectives are to be
minimised. This module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from novarl.control.hypervolume import Vector, contributions, vector
from novarl.core.errors import NovaError

Direction = Literal["max", "min"]
Directions = Sequence[Direction] | None
"""One for each objective; None where all are to be maximised."""
Epsilon = float | Sequence[float]
"""Of all objectives, or one for each, in their units."""
Prune = Literal["crowding", "contribution"]


def sign(direction: str) -> float:
    """1.0 of "max", -1.0 of "min": times this, more of a value is better. NovaError for anything else."""
    if direction not in ("max", "min"):
        raise NovaError(f"an objective's direction is max or min, not {direction!r}", fix="say which end is better")
    return 1.0 if direction == "max" else -1.0


def maximised(values: Any, directions: Directions = None) -> Vector:
    """A vector [K] with the objectives to be minimised turned round, so that more is better everywhere."""
    row = vector(values, size=None if directions is None else len(directions), name="vector")
    return row if directions is None else tuple(sign(d) * v for d, v in zip(directions, row, strict=True))


def dominates(a: Any, b: Any, *, directions: Directions = None, epsilon: Epsilon = 0.0) -> bool:
    """Whether a [K], moved by `epsilon` towards the better, is nowhere worse than b [K] and somewhere better.

    With epsilon 0 this is Pareto dominance, under which nothing dominates itself or its equal. With epsilon > 0 it is
    additive epsilon-dominance (Laumanns et al. 2002, https://doi.org/10.1162/106365602760234108): two vectors within
    epsilon of each other dominate each other. NovaError for numbers that are not finite (a NaN is neither better nor
    worse, and would be dominated by nothing), for different lengths and for a negative epsilon.
    """
    ours = maximised(a, directions)
    theirs = vector(maximised(b, directions), size=len(ours))
    moved = [value + step for value, step in zip(ours, _steps(epsilon, len(ours)), strict=True)]
    pairs = list(zip(moved, theirs, strict=True))
    return all(m >= t for m, t in pairs) and any(m > t for m, t in pairs)


def non_dominated(points: Iterable[Any], *, directions: Directions = None) -> list[int]:
    """The places, in order, of the points that no other dominates; equal points are all kept or all left out."""
    rows = [maximised(point, directions) for point in points]
    return [i for i, row in enumerate(rows) if not any(dominates(other, row) for other in rows)]


def crowding_distance(points: Iterable[Any]) -> list[float]:
    """How far apart the neighbours of each point lie: sum over objectives of (next - previous) / (max - min).

    In each objective the points at either end have none on one side: their distance is infinite, so they are the last
    to be pruned (NSGA-II, Deb et al. 2002, https://doi.org/10.1109/4235.996017). An objective in which all points are
    equal tells nothing.
    """
    rows = [vector(point) for point in points]
    distance = [0.0] * len(rows)
    for column in zip(*rows, strict=True):
        order = sorted(range(len(rows)), key=column.__getitem__)
        extent = column[order[-1]] - column[order[0]]
        if extent <= 0:
            continue
        distance[order[0]] = distance[order[-1]] = math.inf
        for before, place, after in zip(order, order[1:], order[2:], strict=False):
            distance[place] += (column[after] - column[before]) / extent
    return distance


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A checkpoint and what it scored: `vector` [K] means as measured, `errors` [K] their standard errors (empty where
    they are not known), `step` when it was saved."""

    name: str
    vector: Vector
    errors: Vector = ()
    step: int = 0

    def __post_init__(self) -> None:
        vector(self.vector, name=f"score of {self.name!r}")
        if self.errors:
            vector(self.errors, size=len(self.vector), name=f"standard error of {self.name!r}")


class ParetoArchive:
    """The evaluated checkpoints that no other dominates, at most `capacity` of them.

    With `epsilon` a newcomer must be better than every member by more than that in some objective, so that noise does
    not fill the archive; but it takes out only what it truly dominates. Thus some member epsilon-dominates every vector
    ever offered, until the archive is full. Then the member goes that is most crowded (`prune="crowding"`) or that adds
    the least hypervolume (`"contribution"`) over `reference`, as measured, or, where there is none, over a point that
    lies one step of an even front below its worst values. Of equals the newest goes.
    """

    def __init__(
        self,
        capacity: int = 100,
        epsilon: Epsilon = 0.0,
        prune: Prune = "crowding",
        *,
        reference: Sequence[float] | None = None,
        directions: Directions = None,
    ) -> None:
        if capacity < 1:
            raise NovaError(f"an archive of {capacity} checkpoints can hold nothing", fix="set a capacity of 1 or more")
        if prune not in ("crowding", "contribution"):
            raise NovaError(f"cannot prune by {prune!r}", fix="use crowding or contribution")
        self.capacity, self.epsilon, self.prune = capacity, epsilon, prune
        self.directions = directions
        self.reference = None if reference is None else maximised(reference, directions)
        self._entries: list[Evaluated] = []

    def __len__(self) -> int:
        return len(self._entries)

    def front(self) -> tuple[Evaluated, ...]:
        """The members, from the least to the greatest first objective."""
        return tuple(sorted(self._entries, key=lambda entry: entry.vector))

    def add(self, name: str, scores: Any, errors: Any = (), *, step: int = 0) -> bool:
        """Offer a checkpoint; returns whether it is in the archive now.

        A name offered again stands for its newest evaluation alone. NovaError for scores that are not finite, or of
        another length than the members'.
        """
        new = Evaluated(name, tuple(map(float, scores)), tuple(map(float, errors)), step)
        better = self._maximised(new)
        others = [entry for entry in self._entries if entry.name != name]
        for entry in others:
            row = self._maximised(entry)
            if row == better or dominates(row, better, epsilon=self.epsilon):
                self._entries = others
                return False
        self._entries = [entry for entry in others if not dominates(better, self._maximised(entry))] + [new]
        while len(self._entries) > self.capacity:
            del self._entries[self._least()]
        return new in self._entries

    def state_dict(self) -> dict[str, Any]:
        """The members, as plain lists and numbers."""
        return {"entries": [asdict(entry) for entry in self._entries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the members of a state in place of those here."""
        self._entries = [
            Evaluated(entry["name"], tuple(entry["vector"]), tuple(entry["errors"]), entry["step"])
            for entry in state["entries"]
        ]

    def _maximised(self, entry: Evaluated) -> Vector:
        return maximised(entry.vector, self.directions)

    def _least(self) -> int:
        """The place of the member that the archive loses least by losing; the last of equals."""
        rows = [self._maximised(entry) for entry in self._entries]
        if self.prune == "crowding":
            worth = crowding_distance(rows)
        else:
            worth = contributions(rows, _below(rows) if self.reference is None else self.reference)
        return min(range(len(rows)), key=lambda place: (worth[place], -place))


def _steps(epsilon: Epsilon, size: int) -> Vector:
    steps = (epsilon,) * size if isinstance(epsilon, int | float) else tuple(epsilon)
    if len(steps) != size or not all(step >= 0 for step in steps):
        raise NovaError(f"epsilon is one number that is not negative, or {size} of them, got {epsilon}")
    return steps


def _below(rows: Sequence[Vector]) -> Vector:
    """A reference point under the worst of each objective by 1 / (n - 1) of its extent: n points evenly along a line
    then contribute equally, its ends too (Ishibuchi et al. 2018, https://doi.org/10.1162/evco_a_00226)."""
    columns = list(zip(*rows, strict=True))
    return tuple(min(column) - ((max(column) - min(column)) or 1.0) / (len(rows) - 1) for column in columns)
