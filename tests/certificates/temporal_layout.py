"""The library's side of credit over time: every answer in a row as a rollout has it, and expectations over the rows.

A row begins with padding and a prompt, and after every token of the answer there is a column that the policy did not
choose, as a tool's answer would be, and in which half of the token's reward arrives. Such columns hold numbers that
would be seen at once if anything read them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from novarl.algos import advantages
from tests.certificates.expected import pack, token_logp
from tests.certificates.temporal_exact import Episode, Numbers, step_of
from tests.certificates.world import Policy

BEFORE = 3
JUNK = 99.0
WITH_RATIO = ("vtrace", "retrace", "clipped_is")


def columns_of(length: int) -> list[int]:
    """Where the tokens of an answer lie in their row."""
    return [BEFORE + 2 * t for t in range(length)]


def inputs(episode: Episode, values: Numbers, sampler: Policy) -> dict[str, Tensor]:
    """What all estimators take, one row for each answer of the world."""
    world = episode.world
    shape = len(world.answers), BEFORE + 2 * world.longest + 1
    logp, behavior_logp = (answer_logp(episode, policy).detach() for policy in (world.policy, sampler))
    filled = {name: torch.full(shape, JUNK, dtype=torch.float64) for name in ("values", "logp", "behavior_logp")}
    rewards, mask = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
    segment = torch.full(shape, -1)
    for y, answer in enumerate(world.answers):
        for t, column in enumerate(columns_of(len(answer))):
            mask[y, column] = True
            rewards[y, column : column + 2] = episode.reward[answer[: t + 1]] / 2
            filled["values"][y, column] = values[answer[:t]]
            filled["logp"][y, column], filled["behavior_logp"][y, column] = logp[y, t], behavior_logp[y, t]
            segment[y, column] = step_of(answer, t)
    after = [episode.after.get(answer, 0.0) for answer in world.answers]
    bootstrap = torch.tensor(after, dtype=torch.float64)
    return {"rewards": rewards, "mask": mask, "bootstrap": bootstrap, "segment": segment, **filled}


def answer_logp(episode: Episode, policy: Policy) -> Tensor:
    """The library's log-probs of every answer's tokens [Y, longest], 0 past the end."""
    packed = pack(episode.world)
    flat = token_logp(packed, policy)[0]
    rows = [flat[torch.tensor(span)][packed.mask[torch.tensor(span)]] for span in packed.spans]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def estimates(
    episode: Episode, name: str, values: Numbers, sampler: Policy | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """(advantage, returns) of every token of every answer [Y, longest], by the library's function of that name."""
    wanted = {"rewards", "values", "mask", "bootstrap"}
    wanted |= {"logp", "behavior_logp"} if name in WITH_RATIO else {"segment"} if name == "segment_gae" else set()
    every = inputs(episode, values, sampler or episode.world.policy)
    results = getattr(advantages, name)(**{key: every[key] for key in wanted}, **options)
    where = columns_of(episode.world.longest)
    return results[0][:, where], results[1][:, where]


def update(episode: Episode, advantage: Tensor, sampler: Policy | None = None) -> Tensor:
    """E over the sampler's answers of sum_t A_t grad log pi(token_t), through the library's log-probs."""
    world = episode.world
    chance = probabilities(episode, sampler)
    objective = (chance[:, None] * advantage * answer_logp(episode, world.policy)).sum()
    return torch.cat([part.flatten() for part in torch.autograd.grad(objective, world.policy.parameters)])


def probabilities(episode: Episode, sampler: Policy | None = None) -> Tensor:
    """Of each answer [Y], by the library's log-probs."""
    return answer_logp(episode, sampler or episode.world.policy).detach().sum(1).exp()


def mean_returns(episode: Episode, returns: Tensor, sampler: Policy | None = None) -> Tensor:
    """The mean of the returns in each state, over what the sampler says from there; states in the order of prefixes."""
    chance = probabilities(episode, sampler)
    means = []
    for state in sorted(episode.world.states):
        rows = [
            y for y, answer in enumerate(episode.world.answers) if answer[: len(state)] == state and answer != state
        ]
        means.append((chance[rows] * returns[rows, len(state)]).sum() / chance[rows].sum())
    return torch.stack(means)
