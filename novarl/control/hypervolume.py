"""The hypervolume: how much of the space above a reference point a set of points dominates, exactly.

    HV(A) = volume of the union over a in A of the boxes [reference, a]        every objective to be maximised

It is the one measure of a front that never rises when the front gets worse, and it needs no weights. Its unit is the
product of the objectives' units, so compare only hypervolumes of the same objectives over the same reference. In two
dimensions by a sweep, in three by slices, above by WFG (While, Bradstreet and Barone 2012,
https://doi.org/10.1109/TEVC.2010.2077298): exact, but exponential in the number of objectives.

Points are rows of numbers, float64 within: lists, arrays or tensors. Turn objectives to be minimised round first
(`pareto.maximised`). This module imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from novarl.core.errors import NovaError

Vector = tuple[float, ...]


def vector(values: Any, *, size: int | None = None, name: str = "point") -> Vector:
    """A point as a tuple of floats. NovaError where it is empty, holds a NaN or an infinity, or is not `size` long."""
    row = tuple(float(value) for value in (values.tolist() if hasattr(values, "tolist") else values))
    if not row or not all(map(math.isfinite, row)):
        raise NovaError(f"a {name} of several objectives needs finite numbers, got {list(row)}")
    if size is not None and len(row) != size:
        raise NovaError(f"a {name} has {len(row)} objectives where {size} are expected")
    return row


def hypervolume(points: Iterable[Any], reference: Any) -> float:
    """The volume that `points` [n, K] dominate above `reference` [K], all objectives maximised; 0.0 for no points.

    A point that is not above the reference in every objective contributes nothing; dominated points and duplicates
    change nothing. NovaError for numbers that are not finite and for rows of different lengths.
    """
    return _volume(_front(_above(points, reference)))


def contributions(points: Iterable[Any], reference: Any) -> list[float]:
    """HV(A) - HV(A without point i), for each point in order: what only it dominates.

    Computed as the point's own box less what the others dominate of it, so it is exactly 0.0 for a dominated or
    duplicated point, and the difference of two large volumes is never taken.
    """
    boxes = _above(points, reference)
    return [_exclusive(box, boxes[:i] + boxes[i + 1 :]) for i, box in enumerate(boxes)]


def _above(points: Iterable[Any], reference: Any) -> list[Vector]:
    """The points with the reference as their origin; 0 everywhere where a point is not above it."""
    origin = vector(reference, name="reference point")
    boxes = []
    for point in points:
        box = tuple(p - r for p, r in zip(vector(point, size=len(origin)), origin, strict=True))
        boxes.append(box if min(box) > 0 else (0.0,) * len(origin))
    return boxes


def _front(boxes: Iterable[Vector]) -> list[Vector]:
    """The boxes that no other contains, each once, by the last objective from small to large."""
    kept: list[Vector] = []
    for box in sorted(set(boxes), reverse=True):  # whatever contains a box stands before it
        if min(box) > 0 and not any(all(k >= b for k, b in zip(other, box, strict=True)) for other in kept):
            kept.append(box)
    return sorted(kept, key=lambda box: box[-1])


def _exclusive(box: Vector, others: Sequence[Vector]) -> float:
    """The volume of `box` that is in none of the others."""
    shared = (tuple(map(min, box, other)) for other in others)
    return math.prod(box) - _volume(_front(shared))


def _volume(front: Sequence[Vector]) -> float:
    """The volume of the union of boxes [0, box], as `_front` returns them."""
    if not front:
        return 0.0
    match len(front[0]):
        case 1:
            return front[-1][0]
        case 2:
            return _sweep(front)
        case 3:
            return _slices(front)
    # WFG: of each box what the later ones do not contain. They reach further in the last objective, so what they share
    # with it reaches exactly as far, and the problem has one dimension less.
    flat = [box[:-1] for box in front]
    return math.fsum(box[-1] * _exclusive(flat[i], flat[i + 1 :]) for i, box in enumerate(front))


def _sweep(front: Sequence[Vector]) -> float:
    """Area: the second objective rises along the front, and the first falls."""
    floors = [0.0, *(y for _, y in front)]
    return math.fsum(x * (y - floor) for (x, y), floor in zip(front, floors, strict=False))


def _slices(front: Sequence[Vector]) -> float:
    """Volume: from the top down, the area of all that reaches a height, times the height to the next."""
    volume, area = [], 0.0
    stair: list[tuple[float, float]] = [(0.0, math.inf), (math.inf, 0.0)]  # x rises, y falls
    heights = [0.0, *(box[2] for box in front)]
    for (x, y, top), below in zip(reversed(front), reversed(heights[:-1]), strict=True):
        area += _step(stair, x, y)
        volume.append(area * (top - below))
    return math.fsum(volume)


def _step(stair: list[tuple[float, float]], x: float, y: float) -> float:
    """Put the corner (x, y) into the staircase and take out what it covers; returns the area gained."""
    right = bisect_left(stair, (x, -math.inf))  # the first corner that reaches as far as x
    corner, edge, gained = right, x, []
    while stair[corner][1] < y:
        start = stair[corner - 1][0]
        gained.append((edge - start) * (y - stair[corner][1]))
        corner, edge = corner - 1, start
    if gained:
        stair[corner + 1 : right] = [(x, y)]
    return math.fsum(gained)
