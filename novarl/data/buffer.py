"""Rollouts between sampling and learning."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from novarl.core.types import Scored
from novarl.data.serial import from_dict, to_dict


class RolloutBuffer:
    """A FIFO queue of rollouts, each stamped with the version of the weights that sampled it. `get` returns the oldest
    that are at most `max_staleness` versions behind (0: on-policy only; None: no limit); older ones are dropped and
    counted."""

    def __init__(self, max_staleness: int | None) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, not {max_staleness}")
        self.max_staleness, self.dropped = max_staleness, 0
        self._held: deque[tuple[int, Scored]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def put(self, scored: Seq[Scored], version: int) -> None:
        """Append rollouts sampled with weights of `version`."""
        self._held.extend((version, one) for one in scored)

    def get(self, n: int, version: int) -> list[Scored]:
        """Remove and return up to `n` of the oldest rollouts that are fresh enough for `version`."""
        if self.max_staleness is not None:
            fresh = deque(entry for entry in self._held if version - entry[0] <= self.max_staleness)
            self.dropped += len(self._held) - len(fresh)
            self._held = fresh
        return [self._held.popleft()[1] for _ in range(min(n, len(self._held)))]

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values. The round trip through `load_state_dict` is exact."""
        held = [{"version": version, "scored": to_dict(one)} for version, one in self._held]
        return {"dropped": self.dropped, "held": held}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dropped = state["dropped"]
        self._held = deque((entry["version"], from_dict(Scored, entry["scored"])) for entry in state["held"])
