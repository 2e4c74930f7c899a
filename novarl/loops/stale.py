"""The story of `online` with sampling and learning overlapped: while step k is learnt from, step k + 1 is sampled.

    this process     publish w_k · credit and update on rollout k ──► w_k+1      publish w_k+1 · update on rollout k+1
    the sampler's        └─► sample and score rollout k + 1, by w_k ──────────────┘  └─► rollout k + 2, by w_k+1

So every rollout but a run's first is learnt from one step after the weights that sampled it, never more and never less:
the sampler waits for the learner as the learner does for it. Old log-probabilities are those of the weights that a
step's first update starts from, and the ratio pi_old / mu corrects for the step between. Which prompts are played, and
in which order they are admitted, is the same pure function of seed and rewards as in `online`; the clock has no say.

    One-step off-policy learning of language models: https://arxiv.org/abs/2410.18252
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from novarl.core.types import Prompt, Record, Scored
from novarl.loops.online import Stages, gather, prepare, update
from novarl.loops.state import Gathered, LoopState


class Sampler(Protocol):
    """The process that samples and scores. Calls come from one thread at a time, and never two at a time."""

    def publish(self, version: int) -> None:
        """Hand it the learner's weights of this moment, under this name."""

    def play(self, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
        """Sampled and scored rollouts of the (group, prompt) pairs, by the weights that were published last."""


def stale(state: LoopState, stages: Stages, sampler: Sampler, *, steps: int) -> Iterator[Record]:
    """Run until `steps` steps are done, yielding after every optimiser update.

    `state.ahead` is what the sampler is at, or has ready, at a yield. After the last step that is nothing: a run that
    is then given more steps begins them as a run begins, with a rollout of its own weights.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="novarl-ahead")

    def begin(step: int, stream: dict[str, Any]) -> Future[Gathered]:
        """Let a step's rollouts be sampled by the weights of this moment."""
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
        thread.shutdown(wait=False, cancel_futures=True)  # whoever closes the sampler ends what it is at


def _check_version(gathered: Gathered) -> None:
    """The sampler used the weights it was given: a late or lost publication would go unnoticed, yet teach wrongly."""
    sequences = [sequence for item in gathered.scored for sequence in item.rollout.sequences]
    used = {version for sequence in sequences for version in sequence.versions if version >= 0}
    if used - {gathered.version}:
        raise RuntimeError(f"the sampler used weights of versions {sorted(used)}, and was given {gathered.version}")
