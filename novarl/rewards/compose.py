"""Several named rewards, kept apart and combined late: reward = sum_k weight_k * reward_k.

A rollout for which any reward fails (raises, runs out of time, returns no finite number) has no combined reward: it is
marked `failed` with the reason and the traceback, and is never scored 0.0. A reward that returns None does not apply to
the rollout, and the sum is over those that do; where none applies, the rollout has failed too.
"""

from __future__ import annotations

import asyncio
import difflib
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.types import Rollout, Scored
from novarl.rewards.early import Begun, Early
from novarl.rewards.services import Progress
from novarl.rewards.verdict import Failure, Logged, Scorer, Verdict, check, miscounted


class RewardSet:
    """Named rewards with weights. `await score(rollouts)` gives one `Scored` per rollout, in order.

    rewards:    name -> reward; each is called once with the whole batch, all of them at the same time
    weights:    name -> weight; 1.0 where not named. A reward that returns several numbers by name ("format", "answer")
                appears as "name/format", "name/answer", and each part takes its own weight or else the weight of `name`
    time_limit: seconds for one call of a reward on a whole batch, None for no limit. It ends a reward that waits; one
                that computes without waiting can only be ended in a process of its own (`user_file.load`), and a
                reward that keeps its own limit says so by an attribute `time_limit`
    progress:   how far the run is, as rewards that ask are told; whoever plays a step keeps it

    Errors: NovaError for no rewards, a weight that is not finite, or a weight that names no reward.
    """

    def __init__(
        self,
        rewards: Mapping[str, Scorer],
        weights: Mapping[str, float] | None = None,
        *,
        time_limit: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.progress = progress or Progress()
        self.rewards = dict(rewards)
        self.weights = dict(weights or {})
        self.time_limit = time_limit
        if not self.rewards:
            raise NovaError("no reward is configured", where="reward", fix="set one, such as reward=file.py:reward_fn")
        for name, weight in self.weights.items():
            if name.partition("/")[0] not in self.rewards:
                near = difflib.get_close_matches(name, self.rewards, n=1)
                fix = f"did you mean {near[0]!r}?" if near else f"the rewards are {', '.join(self.rewards)}"
                raise NovaError(f"the weight {name!r} does not match any reward", where="reward weights", fix=fix)
            if not math.isfinite(weight):
                raise NovaError(
                    f"the weight of {name!r} is {weight}", where="reward weights", fix="use a finite number"
                )

    @property
    def reads(self) -> set[str] | None:
        """The data's columns that the rewards may read; None for all of them."""
        read = [getattr(reward, "reads", ()) for reward in self.rewards.values()]
        return None if None in read else {name for names in read for name in names}

    async def score(self, rollouts: Sequence[Rollout], begun: Begun | None = None) -> list[Scored]:
        """Score every rollout that has not failed. What was `begun` of them goes on and is not asked for again."""
        alive = [rollout for rollout in rollouts if rollout.status != "failed"]
        waited = begun.columns if begun is not None else {}
        columns = await asyncio.gather(
            *(waited[name].of(alive) if name in waited else self.column(name, alive) for name in self.rewards)
        )
        rows = iter(zip(*columns, strict=True))
        return [
            _lost(rollout) if rollout.status == "failed" else self._combine(rollout, next(rows)) for rollout in rollouts
        ]

    def close(self) -> None:
        """End the processes of those rewards that have one."""
        for reward in self.rewards.values():
            if hasattr(reward, "close"):
                reward.close()

    def begin(self) -> Begun:
        """Score each rollout as it ends, where a reward looks at one at a time; for one `score` in this event loop."""
        return Begun(
            {
                name: Early(partial(self.column, name))
                for name, reward in self.rewards.items()
                if getattr(reward, "one_by_one", False)
            }
        )

    async def column(self, name: str, rollouts: Sequence[Rollout]) -> Sequence[Verdict]:
        """One reward's verdict on each rollout; whatever goes wrong with the call is the failure of all of them."""
        if not rollouts:
            return []
        reward = self.rewards[name]
        limit = None if hasattr(reward, "time_limit") else self.time_limit
        try:
            async with asyncio.timeout(limit) as clock:
                verdicts = list(await reward(rollouts))
        except Exception as error:  # noqa: BLE001 - any error of a reward is its rollouts' failure, kept with its cause
            late = isinstance(error, TimeoutError) and clock.expired()
            reason = f"timed out after {limit:g} s" if late else f"raised {type(error).__name__}: {error}"
            return [Failure(reason, traceback.format_exc())] * len(rollouts)
        if len(verdicts) != len(rollouts):
            return [Failure(miscounted(len(verdicts), len(rollouts)))] * len(rollouts)
        return verdicts

    def _combine(self, rollout: Rollout, verdicts: Sequence[Any]) -> Scored:
        scores: dict[str, float] = {}
        errors: list[str] = []
        extra: dict[str, Any] = {}
        metrics: dict[str, float] = {}
        for name, verdict in zip(self.rewards, verdicts, strict=True):
            if isinstance(verdict, Logged):
                extra |= verdict.extra
                metrics |= verdict.metrics
                verdict = verdict.verdict
            if verdict is None and len(self.rewards) > 1:  # it does not apply
                continue
            found = check(verdict)
            if isinstance(found, Failure):
                errors.append(f"reward {name!r} {found}")
            elif isinstance(found, float):
                scores[name] = found
            else:
                scores |= {f"{name}/{part}": value for part, value in found.items()}
        if not scores and not errors:
            errors.append("no reward applies: each of them returned None")
        total = _exact_sum([self._weight(name) * value for name, value in scores.items()])
        if not math.isfinite(total):
            errors.append(f"the weighted sum of the rewards is {total}")
        if errors:
            failed = replace(rollout, status="failed")
            return Scored(failed, scores, None, error="\n".join(errors), extra=extra, metrics=metrics)
        return Scored(rollout, scores, total, extra=extra, metrics=metrics)

    def _weight(self, name: str) -> float:
        return self.weights.get(name, self.weights.get(name.partition("/")[0], 1.0))


def _exact_sum(values: Sequence[float]) -> float:
    """The sum, rounded once: weights of 0.3, 0.6 and 0.1 make 1 in any order."""
    plain = sum(values)
    return math.fsum(values) if math.isfinite(plain) else plain


def _lost(rollout: Rollout) -> Scored:
    return Scored(rollout, {}, None, error=str(rollout.info.get("error", "the episode failed")))
