"""Assign cache rows after some have finished, so that few move and long ones come first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def settle(parents: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Assign the remaining rows `parents` (ascending) to rows 0 .. n - 1, largest of `sizes` first; few of them move.
    Repeated entries are copies. Returns the new places and the indices of the rows that move."""
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
    """The numbers 0 .. count - 1 that are not in `places`."""
    free = np.ones(count, bool)
    free[places] = False
    return np.flatnonzero(free)
