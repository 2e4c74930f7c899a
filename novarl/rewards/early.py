"""Scoring that begins as each rollout ends, while others are still being sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from novarl.core.types import Rollout
from novarl.rewards.verdict import Verdict

Key = tuple[int, str, int]


class Early:
    """One reward's verdicts on rollouts as they end: those of one turn of the event loop are asked for together."""

    def __init__(self, ask: Callable[[Sequence[Rollout]], Awaitable[Sequence[Verdict]]]) -> None:
        self._ask = ask
        self._ended: list[Rollout] = []
        self._asked: list[asyncio.Task[None]] = []
        self._verdicts: dict[Key, Verdict] = {}

    def add(self, rollout: Rollout) -> None:
        if not self._ended:
            self._asked.append(asyncio.get_running_loop().create_task(self._score()))
        self._ended.append(rollout)

    async def of(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict]:
        """The verdicts on these rollouts, each of which was added."""
        await asyncio.gather(*self._asked)
        return [self._verdicts[_key(rollout)] for rollout in rollouts]

    async def _score(self) -> None:
        ended, self._ended = self._ended, []
        verdicts = await self._ask(ended)
        self._verdicts |= {_key(rollout): verdict for rollout, verdict in zip(ended, verdicts, strict=True)}


@dataclass(frozen=True, slots=True)
class Begun:
    """The scoring of one step that has begun: by reward, for those that look at one rollout at a time."""

    columns: Mapping[str, Early]

    def add(self, rollout: Rollout) -> None:
        """A rollout has ended. One that failed is not scored."""
        if rollout.status != "failed":
            for column in self.columns.values():
                column.add(rollout)


def _key(rollout: Rollout) -> Key:
    """A rollout's name within its step."""
    return rollout.group, rollout.role, rollout.index
