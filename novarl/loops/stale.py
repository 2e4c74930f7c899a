"""The loop of `online` with sampling and training overlapped: step k + 1 is sampled while training on step k.

    this process     publish w_k · credit and update on rollout k ──► w_k+1      publish w_k+1 · update on rollout k+1
    the sampler's        └─► sample and score rollout k + 1, by w_k ──────────────┘  └─► rollout k + 2, by w_k+1

Every rollout except the first is exactly one step stale. Old log-probabilities are those of the weights at the start of
a step's first update, and pi_old / mu corrects for the step in between (https://arxiv.org/abs/2410.18252).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from novarl.core.types import Prompt, Record, Scored
from novarl.loops.online import Stages, gather, prepare, update
from novarl.loops.state import Gathered, LoopState


class Sampler(Protocol):
    """The process that samples and scores. Calls are never concurrent."""

    def publish(self, version: int) -> None:
        """Send it the learner's current weights as `version`."""

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
        """Sampled and scored rollouts of the (group, prompt) pairs, with the last published weights."""


def stale(state: LoopState, stages: Stages, sampler: Sampler, *, steps: int) -> Iterator[Record]:
    """Run until step `steps`, yielding after every optimiser update. `state.ahead` is the rollout in progress or ready;
    after the last step there is none."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="novarl-ahead")

    def begin(step: int, stream: dict[str, Any]) -> Future[Gathered]:
        """Start sampling a step's rollouts with the current weights."""
        sampler.publish(state.update)
        return thread.submit(gather, stages, sampler.play, stream, step=step, version=state.update)

    try:
        while state.step < steps:
            if state.pending is None:
                stages.publish(state.update)
                ahead = state.ahead or begin(state.step, state.stream)
                with stages.bus.span("rollout"):
                    gathered = ahead.result()
                _check_version(gathered)
                state.ahead = begin(state.step + 1, gathered.stream) if state.step + 1 < steps else None
                state.pending = prepare(state, stages, gathered)
            yield update(state, state.pending, stages)
    finally:
        thread.shutdown(wait=False, cancel_futures=True)  # closing the sampler ends its work


def _check_version(gathered: Gathered) -> None:
    """Check that the sampler used the published weights, because a late or lost update would go unnoticed."""
    sequences = [sequence for item in gathered.scored for sequence in item.rollout.sequences]
    used = {version for sequence in sequences for version in sequence.versions if version >= 0}
    if used - {gathered.version}:
        raise RuntimeError(f"the sampler used weights of versions {sorted(used)} instead of {gathered.version}")
