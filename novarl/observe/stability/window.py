"""The part of a run's metrics that rules read: its first updates and its most recent ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean

FIRST, RECENT = 8, 64
"""Updates that a window holds: the first ones of the phase, and the last ones."""

Record = Mapping[str, float]


class Window:
    """The first `FIRST` and the last `RECENT` updates of a phase, in order. Memory does not grow with the run."""

    def __init__(self, records: Sequence[Record] = (), *, limit: str = "max_new_tokens") -> None:
        self.limit = limit
        """The setting that truncates answers, in words."""
        self.first: list[Record] = []
        self.recent: deque[Record] = deque(maxlen=RECENT)
        self.updates = 0
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Append the metrics of one update."""
        if len(self.first) < FIRST:
            self.first.append(record)
        self.recent.append(record)
        self.updates += 1

    @property
    def now(self) -> Record:
        """The newest update."""
        return self.recent[-1]

    @property
    def whole(self) -> bool:
        """Whether the window still holds every update of the phase."""
        return self.updates == len(self.recent)

    def last(self, name: str, count: int, *, skip: int = 0) -> list[float]:
        """The finite values of a metric in the last `count` updates that have one, before the last `skip` updates."""
        held = (record.get(name) for record in islice(reversed(self.recent), skip, None))
        finite = (value for value in held if value is not None and math.isfinite(value))
        return list(islice(finite, count))[::-1]

    def early(self, name: str, count: int = FIRST) -> list[float]:
        """The finite values of a metric in the first `count` updates."""
        held = [record[name] for record in self.first[:count] if record.get(name) is not None]
        return [value for value in held if math.isfinite(value)]

    def steps(self, count: int) -> list[Record]:
        """The last record of each of the last `count` steps. A step may have several updates, which repeat its counts
        of groups and answers."""
        found = {record.get("step", place): record for place, record in enumerate(self.recent)}
        return list(found.values())[-count:]

    def step_count(self) -> int:
        """The steps in `recent`."""
        return len({record.get("step", place) for place, record in enumerate(self.recent)})

    def gained(self) -> bool:
        """Whether the mean reward of the last steps is above that of the first ones by more than their noise."""
        before = [record["reward_mean"] for record in self.first[: FIRST // 2] if "reward_mean" in record]
        after = [record["reward_mean"] for record in self.steps(FIRST // 2) if "reward_mean" in record]
        if not before or not after:
            return False
        answers = max(1.0, self.first[0].get("episodes", 1.0)) * len(before)
        noise = self.first[0].get("reward_std", 0.0) / math.sqrt(answers)
        return fmean(after) > fmean(before) + max(2.0 * noise, 1e-6)

    def state_dict(self) -> dict[str, object]:
        """What a checkpoint needs to continue with the same window."""
        return {"first": self.first, "recent": list(self.recent), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """The inverse of `state_dict`."""
        first, recent, updates = state["first"], state["recent"], state["updates"]
        assert isinstance(first, list) and isinstance(recent, list) and isinstance(updates, int)
        self.first, self.recent, self.updates = list(first), deque(recent, maxlen=RECENT), updates
