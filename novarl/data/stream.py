"""The order of rows: reshuffled each epoch, as a pure function of the seed and the epoch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.seeds import derive


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The shuffled rows of an epoch. Cached, because a loop takes a few rows at a time and there may be millions."""
    order = list(range(length))
    random.Random(derive(seed, "shuffle", epoch)).shuffle(order)
    return tuple(order)


class Stream:
    """An endless stream of row indices; every epoch contains each row once.

    The order of an epoch is a pure function of (seed, epoch), so the position is the whole state: a restored stream
    continues exactly, and no generator is saved.

    >>> sorted(index for _, index in Stream(3, seed=0).take(3))
    [0, 1, 2]
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise NovaError("there are no rows", where="data", fix="provide at least one valid row")
        self.length, self.seed, self.position = length, seed, 0

    def take(self, k: int) -> list[tuple[int, int]]:
        """The next `k` rows as (epoch, index), continuing into the next epochs as needed."""
        places = [divmod(position, self.length) for position in range(self.position, self.position + k)]
        self.position += k
        return [(epoch, _order(self.length, self.seed, epoch)[offset]) for epoch, offset in places]

    def state_dict(self) -> dict[str, Any]:
        return {"length": self.length, "seed": self.seed, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises NovaError if it belongs to other data or another seed."""
        for name, mine in (("length", self.length), ("seed", self.seed)):
            if state[name] != mine:
                what = f"the data order of the checkpoint has {name} {state[name]}, but this run has {mine}"
                raise NovaError(what, where="data", fix="resume with the same data and seed, or start a new run")
        self.position = int(state["position"])
