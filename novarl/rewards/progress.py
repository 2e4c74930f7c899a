"""How far a run is, as rewards that change over a run are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """`step` of the run's `steps` are done. 0 of 0 where nothing is trained."""

    step: int = 0
    steps: int = 0
