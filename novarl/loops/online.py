"""The reinforcement-learning loop: sample, score, credit, update, sync.

`online` yields the Record of each optimiser update, the same on every rank, and has no hidden state between yields:
evaluation and checkpoints are ordinary code in the caller's loop, and a state saved at any yield resumes exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from novarl.algos import off_policy
from novarl.control.governor import Governor
from novarl.control.guards import AlarmGuard
from novarl.core.bus import Bus
from novarl.core.seeds import derive
from novarl.core.types import Batch, Prompt, Record, Rollout, Scored
from novarl.data.pack import minibatches, pack
from novarl.data.stream import Stream
from novarl.distributed.ranks import Ranks
from novarl.learn import fitting
from novarl.learn.credit import CreditRule
from novarl.learn.guard import STOP
from novarl.learn.plan import trajectory_of_tokens
from novarl.learn.policy import PolicyLearner
from novarl.learn.supplier import Supplier
from novarl.loops.admit import Admission, describe, in_order
from novarl.loops.state import Gathered, LoopState, Pending

Play = Callable[[Sequence[tuple[int, Prompt]], int], list[Scored]]
"""`play(asked, step)` returns sampled and scored rollouts of the (group, prompt) pairs."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The replaceable parts of an online run.

    `sample(asked, step)` returns all rollouts of the (group, prompt) pairs; `score(rollouts)` adds rewards;
    `publish(version)` sends the learner's weights to the engine; `check(batch, rollouts)` runs once, before the first
    update; `keep(step, scored, pending)` writes the rollout log before the first update, and sets `pending.measured` if
    the step is logged; `keep_measured(step, measured)` adds what the updates measured. `supplier` provides what credit
    needs besides rewards, and is trained too; for the first `frozen_steps` steps only it is. With `mask_truncated`,
    truncated answers are not trained on. `guard` acts on alerts.
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
    mask_truncated: bool = False
    keep_measured: Callable[[int, Mapping[str, Tensor]], None] | None = None
    guard: AlarmGuard | None = None


def online(state: LoopState, stages: Stages, *, steps: int) -> Iterator[Record]:
    """Run until step `steps`, yielding after every optimiser update."""
    state.ahead = None  # left by a run that sampled one step ahead
    while state.step < steps:
        if state.pending is None:
            stages.publish(state.update)
            gathered = gather(stages, partial(play, stages), state.stream, step=state.step, version=state.update)
            state.pending = prepare(state, stages, gathered)
        yield update(state, state.pending, stages)


def play(stages: Stages, asked: Sequence[tuple[int, Prompt]], step: int) -> list[Scored]:
    """Sample and score in this process."""
    with stages.bus.span("rollout"):
        rollouts = stages.sample(asked, step)
    with stages.bus.span("reward"):
        return stages.score(rollouts)


def update(state: LoopState, pending: Pending, stages: Stages) -> Record:
    """One optimiser update; the last of a rollout completes the step."""
    with stages.bus.span("update"):
        record = learn(state, pending, stages)
    fitting.report(record, state.step + 1, stages.bus)
    state.update += 1
    if pending.used_up or record.get(STOP):
        if pending.measured and stages.keep_measured is not None:
            stages.keep_measured(state.step + 1, pending.measured)
        state.pending = None
        state.step += 1
        stages.learner.end_step()
        record |= stages.governor.observe(record)
    return record


def learn(state: LoopState, pending: Pending, stages: Stages) -> Record:
    """Update the policy and the supplier of credit on the next minibatch."""
    part, scores, credit = pending.next()
    record: Record = {}
    guard = stages.guard
    before = None if guard is None else guard.before(stages.learner.optimizer)
    if state.step >= stages.frozen_steps:
        stages.governor.rule(stages.learner)
        measured: dict[str, Tensor] | None = None if pending.measured is None else {}
        asked = {} if measured is None else {"measured": measured}
        update = partial(stages.learner.update, part, scores, credit, **asked)
        record = update() if guard is None else guard.attempt(state.step + 1, update, stages.learner.optimizer)
        if measured is not None:
            pending.note(measured)
        record["staleness"] = off_policy.staleness(part.version, state.update, part.mask).item()
    if stages.supplier is not None:
        record = fitting.joined(record, stages.supplier.learn(part, scores, credit))
    record = record | pending.record
    if guard is None:
        return record
    return record | guard.judge(state.step + 1, record, stages.learner.optimizer, before)


def gather(stages: Stages, play: Play, stream: dict[str, Any], *, step: int, version: int) -> Gathered:
    """Sample and score prompts from the data position `stream` on, until the admission has enough groups; how many
    depends on the rewards in prompt order, not on which answer finished first."""
    asked: list[tuple[int, Prompt]] = []
    scored: list[Scored] = []
    while wanted := stages.admission.missing(scored, stages.prompts_per_rollout, asked=len(asked)):
        epoch, prompts, stream = next_prompts(stages, stream, wanted)
        fresh = list(enumerate(prompts, start=len(asked)))
        mine = play(stages.ranks.share(fresh), step)
        asked += fresh
        scored += in_order(stages.ranks.gather(mine), [group for group, _ in fresh])
    return Gathered(scored, stream, epoch, version)


def prepare(state: LoopState, stages: Stages, gathered: Gathered) -> Pending:
    """Select rollouts, compute their scores under the current weights, and compute credit."""
    state.stream, scored = gathered.stream, gathered.scored
    for item in scored:  # before any error is raised: if every rollout failed, these events explain why
        if item.reward is None:
            stages.bus.event(
                "failed_rollout",
                step=state.step + 1,
                prompt=item.rollout.prompt.id,
                index=item.rollout.index,
                error=item.error,
            )
    kept = stages.admission.keep(scored, stages.prompts_per_rollout)
    batch = pack(kept)
    with stages.bus.span("score"):
        agreed = stages.check(batch, [item.rollout for item in kept]) if state.update == 0 else {}
        scores, supplied = stages.learner.score(batch), Record()
        if stages.supplier is not None:
            scores, supplied = stages.supplier.supply(kept, batch, scores, state.step)
    weighed, about_objectives = stages.governor.weigh(batch, scores)
    credit, about_credit, state.ema = stages.credit(
        batch, scores, state.ema, reward=weighed, kl_coef=stages.governor.kl_coef
    )
    record = describe(scored, kept) | agreed | supplied | about_objectives | about_credit
    record["epoch"] = float(gathered.epoch)
    learnt = without_truncated(batch) if stages.mask_truncated else batch
    pending = Pending(learnt, scores, credit, minibatch_order(learnt, state.step, stages), record)
    stages.keep(state.step + 1, scored, pending)
    return pending


def next_prompts(stages: Stages, position: dict[str, Any], count: int) -> tuple[int, list[Prompt], dict[str, Any]]:
    """(the epoch from 1, the next `count` prompts of the shuffled stream, the position after them)."""
    stream = Stream(len(stages.prompts), derive(stages.seed, "prompts"))
    if position:
        stream.load_state_dict(position)
    taken = stream.take(count)
    return taken[-1][0] + 1, [stages.prompts[index] for _, index in taken], stream.state_dict()


def without_truncated(batch: Batch) -> Batch:
    """The batch with truncated answers excluded from the loss, its denominators and the minibatches. Credit is computed
    before, so their rewards are part of the baselines."""
    cut = batch.truncated[trajectory_of_tokens(batch)]
    return replace(batch, mask=batch.mask & ~cut, baseline=batch.baseline | batch.truncated)


def minibatch_order(batch: Batch, step: int, stages: Stages) -> list[list[int]]:
    """The trajectories of each update: per epoch all trained ones once, shuffled, with groups together if possible."""
    per_epoch = stages.updates_per_rollout // stages.epochs_per_rollout
    trained = (~batch.baseline).nonzero().flatten().tolist()
    if not trained:  # every answer was truncated: one update without a gradient
        return [list(range(batch.reward.numel()))]
    groups = batch.group[trained].tolist()
    seeds = [derive(stages.seed, "minibatches", step, epoch) for epoch in range(stages.epochs_per_rollout)]
    parts = [part for seed in seeds for part in minibatches(groups, per_epoch, seed=seed)]
    return [[trained[index] for index in part] for part in parts]
