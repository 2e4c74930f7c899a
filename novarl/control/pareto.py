"""Pareto dominance, and an archive of non-dominated checkpoints.

    a dominates b: a is at least as good in every objective and better in at least one

Vectors are mean scores as measured; `directions` gives the direction of each objective. This module imports no torch.
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
"""One direction per objective; None: all are maximised."""
Epsilon = float | Sequence[float]
"""One value for all objectives, or one for each, in their units."""
Prune = Literal["crowding", "contribution"]


def sign(direction: str) -> float:
    """1.0 for "max", -1.0 for "min". Raises NovaError for anything else."""
    if direction not in ("max", "min"):
        raise NovaError(f"the direction of an objective must be max or min, not {direction!r}", fix="use max or min")
    return 1.0 if direction == "max" else -1.0


def maximised(values: Any, directions: Directions = None) -> Vector:
    """A vector [K] with minimised objectives negated, so that higher is always better."""
    row = vector(values, size=None if directions is None else len(directions), name="vector")
    return row if directions is None else tuple(sign(d) * v for d, v in zip(directions, row, strict=True))


def dominates(a: Any, b: Any, *, directions: Directions = None, epsilon: Epsilon = 0.0) -> bool:
    """Whether a [K], improved by `epsilon`, is at least as good as b [K] in every objective and better in one.

    With epsilon 0 this is Pareto dominance; with epsilon > 0 additive epsilon-dominance (Laumanns et al. 2002,
    https://doi.org/10.1162/106365602760234108). Raises NovaError for numbers that are not finite (a NaN would never be
    dominated), for different lengths and for a negative epsilon.
    """
    ours = maximised(a, directions)
    theirs = vector(maximised(b, directions), size=len(ours))
    moved = [value + step for value, step in zip(ours, _steps(epsilon, len(ours)), strict=True)]
    pairs = list(zip(moved, theirs, strict=True))
    return all(m >= t for m, t in pairs) and any(m > t for m, t in pairs)


def non_dominated(points: Iterable[Any], *, directions: Directions = None) -> list[int]:
    """The indices, in order, of the non-dominated points; equal points are all included or all excluded."""
    rows = [maximised(point, directions) for point in points]
    return [i for i, row in enumerate(rows) if not any(dominates(other, row) for other in rows)]


def crowding_distance(points: Iterable[Any]) -> list[float]:
    """The crowding distance of each point: sum over objectives of (next - previous) / (max - min); infinite for the
    extreme points of each objective (NSGA-II, Deb et al. 2002, https://doi.org/10.1109/4235.996017)."""
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
    """A checkpoint with mean scores `vector` [K], their standard `errors` [K] (empty if unknown), and its `step`."""

    name: str
    vector: Vector
    errors: Vector = ()
    step: int = 0

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Evaluated:
        """The inverse of `dataclasses.asdict`, also through JSON."""
        return cls(state["name"], tuple(state["vector"]), tuple(state["errors"]), state["step"])

    def __post_init__(self) -> None:
        vector(self.vector, name=f"score of {self.name!r}")
        if self.errors:
            vector(self.errors, size=len(self.vector), name=f"standard error of {self.name!r}")


class ParetoArchive:
    """The non-dominated evaluated checkpoints, at most `capacity` of them.

    With `epsilon` a new entry must be better than every member by more than that in some objective; it replaces only
    entries that it dominates exactly. If the archive is full, the most crowded member is removed (`prune="crowding"`),
    or the one with the smallest hypervolume contribution (`"contribution"`) over `reference`, as measured, or by
    default over a point one step of an even front below the worst values. Among equals the newest is removed.
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
            raise NovaError(
                f"the capacity of an archive must be at least 1, not {capacity}", fix="set a capacity of 1 or more"
            )
        if prune not in ("crowding", "contribution"):
            raise NovaError(f"unknown pruning rule {prune!r}", fix="use crowding or contribution")
        self.capacity, self.epsilon, self.prune = capacity, epsilon, prune
        self.directions = directions
        self.reference = None if reference is None else maximised(reference, directions)
        self._entries: list[Evaluated] = []

    def __len__(self) -> int:
        return len(self._entries)

    def front(self) -> tuple[Evaluated, ...]:
        """The members in ascending order of the first objective."""
        return tuple(sorted(self._entries, key=lambda entry: entry.vector))

    def add(self, name: str, scores: Any, errors: Any = (), *, step: int = 0) -> bool:
        """Offer a checkpoint; returns whether it was added. A name offered again replaces its evaluation. Raises
        NovaError for scores that are not finite or have a different length."""
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
        """The members as plain lists and numbers."""
        return {"entries": [asdict(entry) for entry in self._entries]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the members by those of a state."""
        self._entries = [Evaluated.of(entry) for entry in state["entries"]]

    def _maximised(self, entry: Evaluated) -> Vector:
        return maximised(entry.vector, self.directions)

    def _least(self) -> int:
        """The index of the least valuable member; the last among equals."""
        rows = [self._maximised(entry) for entry in self._entries]
        if self.prune == "crowding":
            worth = crowding_distance(rows)
        else:
            worth = contributions(rows, _below(rows) if self.reference is None else self.reference)
        return min(range(len(rows)), key=lambda place: (worth[place], -place))


def _steps(epsilon: Epsilon, size: int) -> Vector:
    steps = (epsilon,) * size if isinstance(epsilon, int | float) else tuple(epsilon)
    if len(steps) != size or not all(step >= 0 for step in steps):
        raise NovaError(f"epsilon must be one non-negative number or {size} of them, got {epsilon}")
    return steps


def _below(rows: Sequence[Vector]) -> Vector:
    """A reference point below the worst value of each objective by 1 / (n - 1) of its range: n evenly spaced points on
    a line then contribute equally (Ishibuchi et al. 2018, https://doi.org/10.1162/evco_a_00226)."""
    columns = list(zip(*rows, strict=True))
    return tuple(min(column) - ((max(column) - min(column)) or 1.0) / (len(rows) - 1) for column in columns)
