"""The exact hypervolume dominated by a set of points above a reference point.

    HV(A) = volume of the union over a in A of the boxes [reference, a]        all objectives maximised

Compare only hypervolumes of the same objectives over the same reference. Computed by a sweep in two dimensions, by
slices in three, and otherwise with WFG (While, Bradstreet and Barone 2012, https://doi.org/10.1109/TEVC.2010.2077298):
exact, but exponential in the number of objectives. Points are rows of numbers (lists, arrays or tensors), converted to
float64. This module imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from novarl.core.errors import NovaError

Vector = tuple[float, ...]


def vector(values: Any, *, size: int | None = None, name: str = "point") -> Vector:
    """A point as a tuple of floats. Raises NovaError if it is empty, not finite, or not of length `size`."""
    row = tuple(float(value) for value in (values.tolist() if hasattr(values, "tolist") else values))
    if not row or not all(map(math.isfinite, row)):
        raise NovaError(f"a {name} must have finite numbers, got {list(row)}")
    if size is not None and len(row) != size:
        raise NovaError(f"a {name} has {len(row)} objectives instead of {size}")
    return row


def hypervolume(points: Iterable[Any], reference: Any) -> float:
    """The volume that `points` [n, K] dominate above `reference` [K], all objectives maximised; 0.0 for no points.

    Points that are not above the reference in every objective, dominated points and duplicates do not contribute.
    Raises NovaError for numbers that are not finite and for rows of different lengths.
    """
    return _volume(_front(_above(points, reference)))


def contributions(points: Iterable[Any], reference: Any) -> list[float]:
    """HV(A) - HV(A without point i), for each point, in order: the volume that only it dominates. Computed as its box
    minus the part dominated by others: exactly 0.0 for a dominated or duplicated point, without cancellation."""
    boxes = _above(points, reference)
    return [_exclusive(box, boxes[:i] + boxes[i + 1 :]) for i, box in enumerate(boxes)]


def _above(points: Iterable[Any], reference: Any) -> list[Vector]:
    """The points relative to the reference; all 0 for points that are not above it."""
    origin = vector(reference, name="reference point")
    boxes = []
    for point in points:
        box = tuple(p - r for p, r in zip(vector(point, size=len(origin)), origin, strict=True))
        boxes.append(box if min(box) > 0 else (0.0,) * len(origin))
    return boxes


def _front(boxes: Iterable[Vector]) -> list[Vector]:
    """The boxes not contained in another, without duplicates, in ascending order of the last objective."""
    kept: list[Vector] = []
    for box in sorted(set(boxes), reverse=True):  # a box that contains another comes before it
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
    # WFG: for each box, the part not contained in later ones. These are larger in the last objective, so the
    # intersections have equal extent there, which reduces the dimension by one.
    flat = [box[:-1] for box in front]
    return math.fsum(box[-1] * _exclusive(flat[i], flat[i + 1 :]) for i, box in enumerate(front))


def _sweep(front: Sequence[Vector]) -> float:
    """Area: the second objective rises along the front, and the first falls."""
    floors = [0.0, *(y for _, y in front)]
    return math.fsum(x * (y - floor) for (x, y), floor in zip(front, floors, strict=False))


def _slices(front: Sequence[Vector]) -> float:
    """Volume: from the top down, the area of the cross-section times the height to the next point."""
    volume, area = [], 0.0
    stair: list[tuple[float, float]] = [(0.0, math.inf), (math.inf, 0.0)]  # x rises, y falls
    heights = [0.0, *(box[2] for box in front)]
    for (x, y, top), below in zip(reversed(front), reversed(heights[:-1]), strict=True):
        area += _step(stair, x, y)
        volume.append(area * (top - below))
    return math.fsum(volume)


def _step(stair: list[tuple[float, float]], x: float, y: float) -> float:
    """Insert the corner (x, y) into the staircase and remove covered ones. Returns the added area."""
    right = bisect_left(stair, (x, -math.inf))  # the first corner at or beyond x
    corner, edge, gained = right, x, []
    while stair[corner][1] < y:
        start = stair[corner - 1][0]
        gained.append((edge - start) * (y - stair[corner][1]))
        corner, edge = corner - 1, start
    if gained:
        stair[corner + 1 : right] = [(x, y)]
    return math.fsum(gained)
