"""How far a run is, as rewards that change over a run are told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """`step` of the run's `steps` are done. Where nothing is trained, it is as at the end of a run: 1 of 1."""

    step: int = 1
    steps: int = 1
