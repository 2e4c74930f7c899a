"""Where the rows of a cache go when some of them are left, so that few move and long ones come first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def settle(parents: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where rows go of which those with numbers `parents` (rising) are left: to rows 0 .. n - 1, the largest of `sizes`
    first. One that is in a place of its size stays there; others of the same number are copies of it. Returns the new
    places, and the indices of those that move."""
    ordered = -np.sort(-sizes)
    settled = parents < len(parents)
    settled[1:] &= parents[1:] != parents[:-1]
    settled[settled] = ordered[parents[settled]] == sizes[settled]
    places = parents.copy()
    movers = np.flatnonzero(~settled)
    movers = movers[np.argsort(-sizes[movers], kind="stable")]
    places[movers] = others(parents[settled], len(parents))
    return places, movers


def others(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Of 0 .. count - 1 those that are not among `places`."""
    free = np.ones(count, bool)
    free[places] = False
    return np.flatnonzero(free)
