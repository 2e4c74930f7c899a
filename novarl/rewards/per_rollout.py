"""Small functions of a text or an answer, as batch-first rewards. A row that raises fails alone."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from novarl.core.types import Rollout
from novarl.rewards.verdict import Failure, Verdict

Score = float | Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class PerRollout:
    """A reward that looks at one rollout at a time: `score(rollout)`, called for each in the order given."""

    score: Callable[[Rollout], Score]

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        return [self._attempt(rollout) for rollout in rollouts]

    def _attempt(self, rollout: Rollout) -> Verdict:
        try:
            return self.score(rollout)
        except Exception as error:  # noqa: BLE001 - any error of a reward is that rollout's failure, kept with its cause
            return Failure(f"raised {type(error).__name__}: {error}", traceback.format_exc())


def by_text(score: Callable[[str], Score]) -> PerRollout:
    """A reward of the response's text alone."""
    return PerRollout(lambda rollout: score(rollout.text))


def by_answer(score: Callable[[str, Any], Score]) -> PerRollout:
    """A reward of the response's text and the row's reference answer."""
    return PerRollout(lambda rollout: score(rollout.text, rollout.prompt.answer))


def _environment_reward(rollout: Rollout) -> float:
    if "env_reward" not in rollout.info:
        raise ValueError("the environment returned no reward in this episode: interact must return {'reward': ...}")
    return float(rollout.info["env_reward"])


environment = PerRollout(_environment_reward)
"""The sum of what the environment itself gave over the episode's turns."""
