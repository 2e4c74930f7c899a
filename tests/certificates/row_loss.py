"""The loss of a row of the table as a run of `novarl rl algo=...` puts it together: its own credit and objective.

Only what a model or an environment supplies is made up here: log-probs, a critic's values, process rewards, and the
reward of the greedy answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from novarl.algos import aggregate
from novarl.compose.resolve import resolve_rl
from novarl.compose.stages import credit_rule, objective
from novarl.config.tree import RLConfig
from novarl.core.types import Batch, Scores
from novarl.learn.plan import trajectory_of_tokens
from tests.certificates.expected import Loss, Minibatch
from tests.certificates.temporal_exact import Numbers, step_of
from tests.certificates.world import World


def row_loss(
    algo: str, world: World, *, settings: Mapping[str, Any] | None = None, values: Numbers | None = None
) -> Loss:
    """The loss of a rollout's first update, where the whole rollout is one minibatch.

    `settings` are those of the run beside `algo`; `values` of states are what the critic, or continuations, say.
    """
    config = RLConfig.model_validate(
        {"algo": algo, "task": "arithmetic", "rollout": {"max_tokens": world.longest}, **(settings or {})}
    )
    plan = resolve_rl(config)
    rule, goal = credit_rule(config, plan), objective(config, plan)
    row = plan.algorithm

    def loss(drawn: Minibatch) -> Tensor:
        batch = _batch(drawn, twins="greedy" in row.needs)
        known = Scores(
            old_logp=_padded(drawn.logp.detach(), batch) if plan.needs_old_logp else None,
            ref_logp=_padded(drawn.ref_logp, batch) if plan.needs_reference else None,
            values=_by_state(world, values, drawn) if values is not None else None,
            token_reward=drawn.old_logp - drawn.ref_logp if "process" in row.needs else None,
            segment=_steps(world, drawn) if row.values == "continuations" else None,
        )
        credit, _, _ = rule(batch, known, None)
        losses, _ = goal.losses(
            batch, _padded(drawn.logp, batch), _padded(drawn.entropy, batch), scores=known, advantage=credit.advantage
        )
        weight = aggregate.weights(
            batch.mask,
            trajectory_of_tokens(batch),
            how=goal.aggregation,
            constant=goal.constant,
            trajectories=int((~batch.baseline).sum()),
            dtype=torch.float64,
        )
        return torch.stack([goal.coefficient(name) * (part * weight).sum() for name, part in losses.items()]).sum()

    return loss


def _batch(drawn: Minibatch, *, twins: bool) -> Batch:
    """k answers, and with `twins` one more trajectory for each group: its greedy answer, never trained on."""
    ids = drawn.group.unique() if twins else drawn.group[:0]
    count = len(drawn.reward) + len(ids)
    sizes = torch.cat([torch.bincount(drawn.traj), torch.ones_like(ids)])
    reward = torch.cat([drawn.reward, drawn.greedy[:1].expand(len(ids))])
    tokens = int(sizes.sum())
    nothing = torch.zeros(tokens, dtype=torch.int64)
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[: len(drawn.mask)] = drawn.mask
    return Batch(
        tokens=nothing,
        position_ids=nothing,
        prev=nothing - 1,
        cu_seqlens=torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]),
        mask=mask,
        behavior_logp=torch.zeros(tokens, dtype=torch.float64),
        version=nothing,
        traj=torch.arange(count),
        group=torch.cat([drawn.group, ids]),
        reward=reward,
        rewards=reward[:, None],
        reward_names=("reward",),
        truncated=torch.zeros(count, dtype=torch.bool),
        baseline=torch.arange(count) >= len(drawn.reward),
    )


def _padded(column: Tensor, batch: Batch) -> Tensor:
    """A column of the answers, and 0 for the twins' tokens."""
    return torch.cat([column, column.new_zeros(len(batch.mask) - len(column))])


def _by_state(world: World, numbers: Numbers, drawn: Minibatch) -> Tensor:
    """A state's number for each token chosen in it; what is not an answer's token gets one that would be seen."""
    table = torch.full((len(world.states) + 2,), 99.0, dtype=torch.float64)
    for state, row in world.states.items():
        table[row] = numbers[state]
    return table[drawn.state]


def _steps(world: World, drawn: Minibatch) -> Tensor:
    """The macro-step of each token, which follows from the state it was chosen in."""
    numbers = {state: float(step_of((*state, 0), len(state))) for state in world.states}
    return _by_state(world, numbers, drawn).long()
