"""Scoring that begins as each rollout ends, while others are still being sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from novarl.core.types import Rollout
from novarl.rewards.verdict import Verdict

Key = tuple[int, str, int]


class Early:
    """One reward's verdicts on rollouts that end one after another.

    ask:   called with those that have ended and are not asked for yet
    room:  how many rollouts the reward could begin with at once, beside those that it has. Where that is none, those
           that end wait for the first call to return

    How many rollouts a call has depends on the clock; a reward that looks at one at a time says the same whoever comes
    with it.
    """

    def __init__(
        self, ask: Callable[[Sequence[Rollout]], Awaitable[Sequence[Verdict]]], room: Callable[[], int]
    ) -> None:
        self._ask, self._room = ask, room
        self._ended: list[Rollout] = []
        self._verdicts: dict[Key, Verdict] = {}
        self._asking: list[asyncio.Task[None]] = []
        self._calls = 0
        """Tasks that will look again for rollouts that have ended. A task counts itself out in the same breath as its
        last look: no rollout can fall between."""

    def add(self, rollout: Rollout) -> None:
        self._ended.append(rollout)
        if self._calls == 0 or self._room() > 0:
            self._calls += 1
            self._asking.append(asyncio.get_running_loop().create_task(self._drain()))

    async def of(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict]:
        """The verdicts on these rollouts, each of which was added."""
        await asyncio.gather(*self._asking)
        return [self._verdicts[_key(rollout)] for rollout in rollouts]

    async def _drain(self) -> None:
        while ended := self._ended:
            self._ended = []
            verdicts = await self._ask(ended)
            self._verdicts |= {_key(rollout): verdict for rollout, verdict in zip(ended, verdicts, strict=True)}
        self._calls -= 1


@dataclass(frozen=True, slots=True)
class Begun:
    """What was begun of the rollouts of one step: by reward, those that look at one rollout at a time."""

    columns: Mapping[str, Early]

    def add(self, rollout: Rollout) -> None:
        """A rollout has ended. One that failed is not scored."""
        if rollout.status != "failed":
            for column in self.columns.values():
                column.add(rollout)


def _key(rollout: Rollout) -> Key:
    """A rollout's name within its step."""
    return rollout.group, rollout.role, rollout.index
