"""Reinforcement learning as one story: sample, score, credit, update, sync.

`online` is a generator over an explicit state. It yields the Record of each optimiser update, the same on every rank,
and keeps nothing to itself between two yields: evaluation, checkpoints and early stopping are ordinary code in the
caller's `for`, and a state saved at any yield continues as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from novarl.core.bus import Bus
from novarl.core.seeds import derive
from novarl.core.types import Batch, Prompt, Record, Rollout, Scored
from novarl.data.pack import minibatches, pack
from novarl.data.stream import Stream
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.governor import Governor
from novarl.learn.guard import STOP
from novarl.learn.policy import PolicyLearner
from novarl.learn.supplier import Supplier
from novarl.loops.admit import Admission, describe, in_order
from novarl.loops.state import LoopState, Pending


@dataclass(frozen=True, slots=True)
class Stages:
    """The parts of an online run, each replaceable on its own.

    `sample(asked, step)` returns all rollouts of the (group, prompt) pairs asked for; `score(rollouts)` adds rewards;
    `publish(version)` hands the learner's weights to the engine; `check(batch, rollouts)` runs once, before the very
    first update; `keep(step, scored, pending)` writes the rollout log. `supplier` gives the credit rule what it needs
    beyond rewards, and learns to; for the first `frozen_steps` steps it alone does.
    """

    prompts: Sequence[Prompt]
    sample: Callable[[Sequence[tuple[int, Prompt]], int], list[Rollout]]
    score: Callable[[list[Rollout]], list[Scored]]
    credit: CreditRule
    learner: PolicyLearner
    governor: Governor
    supplier: Supplier | None
    publish: Callable[[int], None]
    check: Callable[[Batch, Sequence[Rollout]], Record]
    keep: Callable[[int, Sequence[Scored], Pending], None]
    admission: Admission
    ranks: Ranks
    bus: Bus
    prompts_per_rollout: int
    updates_per_rollout: int
    epochs_per_rollout: int
    seed: int
    frozen_steps: int = 0


def online(state: LoopState, stages: Stages, *, steps: int) -> Iterator[Record]:
    """Run until `steps` steps are done, yielding after every optimiser update."""
    while state.step < steps:
        if state.pending is None:
            state.pending = collect(state, stages)
        with stages.bus.span("update"):
            record = learn(state, state.pending, stages)
        state.update += 1
        if state.pending.used_up or record.get(STOP):
            state.pending = None
            state.step += 1
            stages.learner.end_step()
            record |= stages.governor.observe(record)
        yield record


def learn(state: LoopState, pending: Pending, stages: Stages) -> Record:
    """One update of the policy, and of whoever supplies its credit, on the next minibatch."""
    part, scores, credit = pending.next()
    record: Record = {}
    if state.step >= stages.frozen_steps:
        stages.governor.rule(stages.learner)
        record = stages.learner.update(part, scores, credit)
        record["staleness"] = (state.update - part.version[part.mask]).double().mean().item()
    if stages.supplier is not None:
        record |= stages.supplier.learn(part, scores, credit)
    return record | pending.record


def collect(state: LoopState, stages: Stages) -> Pending:
    """Sample and score until the admission is content, then work out the credit."""
    bus = stages.bus
    asked: list[tuple[int, Prompt]] = []
    scored: list[Scored] = []
    stages.publish(state.update)
    while wanted := stages.admission.missing(scored, stages.prompts_per_rollout, asked=len(asked)):
        epoch, prompts = next_prompts(state, stages, wanted)
        fresh = list(enumerate(prompts, start=len(asked)))
        with bus.span("rollout"):
            rollouts = stages.sample(stages.ranks.share(fresh), state.step)
        with bus.span("reward"):
            mine = stages.score(rollouts)
        asked += fresh
        scored += in_order(stages.ranks.gather(mine), [group for group, _ in fresh])
    kept = stages.admission.keep(scored, stages.prompts_per_rollout)
    batch = pack(kept)
    with bus.span("score"):
        agreed = stages.check(batch, [item.rollout for item in kept]) if state.update == 0 else {}
        scores, supplied = stages.learner.score(batch), Record()
        if stages.supplier is not None:
            scores, supplied = stages.supplier.supply(kept, batch, scores, state.step)
    weighed, about_objectives = stages.governor.weigh(batch, scores)
    credit, about_credit, state.ema = stages.credit(
        batch, scores, state.ema, reward=weighed, kl_coef=stages.governor.kl_coef
    )
    record = describe(scored, kept) | agreed | supplied | about_objectives | about_credit | {"epoch": float(epoch)}
    pending = Pending(batch, scores, credit, minibatch_order(batch, state.step, stages), record)
    stages.keep(state.step + 1, scored, pending)
    return pending


def next_prompts(state: LoopState, stages: Stages, count: int) -> tuple[int, list[Prompt]]:
    """(the epoch, counted from 1, and the next `count` prompts of the shuffled stream)."""
    stream = Stream(len(stages.prompts), derive(stages.seed, "prompts"))
    if state.stream:
        stream.load_state_dict(state.stream)
    taken = stream.take(count)
    state.stream = stream.state_dict()
    return taken[-1][0] + 1, [stages.prompts[index] for _, index in taken]


def minibatch_order(batch: Batch, step: int, stages: Stages) -> list[list[int]]:
    """The trajectories of each update: per epoch all that are trained on, once, shuffled, groups whole if possible."""
    per_epoch = stages.updates_per_rollout // stages.epochs_per_rollout
    trained = (~batch.baseline).nonzero().flatten().tolist()
    groups = batch.group[trained].tolist()
    seeds = [derive(stages.seed, "minibatches", step, epoch) for epoch in range(stages.epochs_per_rollout)]
    parts = [part for seed in seeds for part in minibatches(groups, per_epoch, seed=seed)]
    return [[trained[index] for index in part] for part in parts]
