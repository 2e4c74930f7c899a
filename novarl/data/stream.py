"""The order in which rows are used: shuffled anew each epoch, and known from a seed and a number alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.seeds import derive


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The rows of an epoch, shuffled. Kept, as a loop asks for a few rows at a time and there may be millions."""
    order = list(range(length))
    random.Random(derive(seed, "shuffle", epoch)).shuffle(order)
    return tuple(order)


class Stream:
    """An endless stream of row indices; every epoch holds each row once.

    The order of an epoch is a pure function of (seed, epoch), so the position is the whole state: a restarted stream
    goes on exactly where it stopped, and no generator has to be saved.

    >>> sorted(index for _, index in Stream(3, seed=0).take(3))
    [0, 1, 2]
    """

    def __init__(self, length: int, seed: int) -> None:
        if length < 1:
            raise NovaError("there are no rows to draw from", where="data", fix="give it at least one usable row")
        self.length, self.seed, self.position = length, seed, 0

    def take(self, k: int) -> list[tuple[int, int]]:
        """The next `k` rows, as (epoch, index); goes on into the next epochs as needed."""
        taken = [self._at(position) for position in range(self.position, self.position + k)]
        self.position += k
        return taken

    def _at(self, position: int) -> tuple[int, int]:
        epoch, offset = divmod(position, self.length)
        return epoch, _order(self.length, self.seed, epoch)[offset]

    def state_dict(self) -> dict[str, Any]:
        return {"length": self.length, "seed": self.seed, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stopped. NovaError: it belongs to other data or another seed."""
        for name, mine in (("length", self.length), ("seed", self.seed)):
            if state[name] != mine:
                what = f"the checkpoint's data order has {name} {state[name]}, this run's {mine}"
                raise NovaError(what, where="data", fix="resume with the same data and seed, or start a new run")
        self.position = int(state["position"])
