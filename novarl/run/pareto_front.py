"""The Pareto front of a run with several objectives, from its held-out evaluations.

Every evaluation is offered to a Pareto archive, which is stored in the checkpoints; front.json and figures/front.png
show it. KL and entropy are measured on training samples only; front.json lists them under `not_measured`. The metric
`eval/hypervolume` is the volume dominated by all evaluations so far above a reference point, by default the first one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from novarl.control.front_figure import draw_front
from novarl.control.hypervolume import Vector, hypervolume
from novarl.control.pareto import Direction, Evaluated, ParetoArchive, Prune, maximised
from novarl.core.errors import visible
from novarl.core.types import Scored

if TYPE_CHECKING:
    from novarl.loops.evaluate import Evaluation
    from novarl.run.session import Session

FACT = "front"
"""The archive's key in a checkpoint's facts."""
NOT_MEASURED = ("kl", "entropy")
"""Objectives that an evaluation does not measure."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One objective of a front: `epsilon` is the box size, `reference` the worst value of interest."""

    direction: Direction
    epsilon: float = 0.0
    reference: float | None = None


class Front:
    """The archive of one run, and all evaluations offered to it, in step order."""

    def __init__(self, axes: Mapping[str, Axis], session: Session, *, size: int, prune: Prune) -> None:
        self.session = session
        self.directions: dict[str, Direction] = {
            name: axis.direction for name, axis in axes.items() if name not in NOT_MEASURED
        }
        self.not_measured = [name for name in axes if name in NOT_MEASURED]
        specs = [axes[name] for name in self.directions]
        self.asked = [spec.reference for spec in specs]
        self.archive = ParetoArchive(
            size,
            [spec.epsilon for spec in specs],
            prune,
            reference=None if None in self.asked else [value for value in self.asked if value is not None],
            directions=list(self.directions.values()),
        )
        self.evaluated: dict[str, Evaluated] = {}
        if (saved := session.facts.get(FACT)) is not None:
            self.load_state_dict(saved)
            self._write()  # the file may be from a step after the checkpoint

    @property
    def reference(self) -> Vector:
        """The reference point of the hypervolume: as configured, otherwise the first evaluation."""
        first = next(iter(self.evaluated.values())).vector
        return tuple(value if asked is None else asked for asked, value in zip(self.asked, first, strict=True))

    def hypervolume(self) -> float | None:
        """The hypervolume of all evaluations so far; None before the first one, or with a single objective."""
        if len(self.directions) < 2 or not self.evaluated:
            return None
        ways = list(self.directions.values())
        rows = [maximised(entry.vector, ways) for entry in self.evaluated.values()]
        return hypervolume(rows, maximised(self.reference, ways))

    def add(self, found: Evaluation, step: int) -> None:
        """Offer an evaluation of the policy at `step`. It is ignored if the reward failed for every row; a second
        evaluation of the same step replaces the first."""
        rows = [item for item in found.rows if item.reward is not None]
        columns = [[measured(item, name) for item in rows] for name in self.directions]
        if not rows or any(not math.isfinite(value) for column in columns for value in column):
            return
        means = tuple(fmean(column) for column in columns)
        errors = tuple(stdev(column) / math.sqrt(len(rows)) for column in columns) if len(rows) > 1 else ()
        name = f"step-{step:06d}"
        self.archive.add(name, means, errors, step=step)
        self.evaluated[name] = Evaluated(name, means, errors, step)
        self.session.facts[FACT] = self.state_dict()
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """The archive and all evaluations, as plain lists and numbers."""
        return {"archive": self.archive.state_dict(), "evaluated": [asdict(entry) for entry in self.evaluated.values()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self.archive.load_state_dict(state["archive"])
        entries = [Evaluated.of(entry) for entry in state["evaluated"]]
        self.evaluated = {entry.name: entry for entry in entries}

    def draw(self) -> None:
        """Draw figures/front.png if two or more objectives were measured; on the first rank only."""
        if self.session.ranks.rank != 0 or len(self.directions) < 2 or not self.evaluated:
            return
        path = self.session.rundir.path / "figures" / "front.png"
        entries, names = list(self.evaluated.values()), [visible(name) for name in self.directions]
        title = visible(f"Held-out Pareto front of {self.session.rundir.path.resolve().name}")
        with self.session.drawing("the Pareto front"):
            path.parent.mkdir(exist_ok=True)
            ways, reference = list(self.directions.values()), self.reference
            draw_front(entries, path, names, directions=ways, reference=reference, title=title)

    def _write(self) -> None:
        """Write front.json, for people and tools; a resumed run reads the checkpoint instead."""
        if self.session.ranks.rank != 0:
            return
        document = {
            "objectives": [{"name": name, "direction": way} for name, way in self.directions.items()],
            "not_measured": self.not_measured,
            "reference": dict(zip(self.directions, self.reference, strict=True)),
            "hypervolume": self.hypervolume(),
            "front": [self._entry(entry) for entry in self.archive.front()],
            "evaluated": [self._entry(entry) for entry in self.evaluated.values()],
        }
        self.session.rundir.write_json("front.json", document)

    def _entry(self, entry: Evaluated) -> dict[str, Any]:
        """An evaluation with its values by objective name."""
        means = dict(zip(self.directions, entry.vector, strict=True))
        errors = dict(zip(self.directions, entry.errors, strict=True)) if entry.errors else None
        return {"name": entry.name, "step": entry.step, "means": means, "standard_errors": errors}


def measured(item: Scored, name: str) -> float:
    """The value of one objective for an answer; NaN if its rewards do not include it."""
    if name == "length" and name not in item.rewards:
        return float(sum(sum(sequence.mask) for sequence in item.rollout.sequences))
    if name == "reward" and name not in item.rewards:
        return math.nan if item.reward is None else item.reward
    return item.rewards.get(name, math.nan)
