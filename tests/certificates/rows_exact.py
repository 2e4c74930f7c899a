"""The exact side of the table's rows: every batch that can be drawn, enumerated, and every token's share of its update.

Like `exact`, this file must not import the library.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.certificates import exact
from tests.certificates.temporal_exact import Episode, Numbers, errors
from tests.certificates.temporal_group_exact import process_rewards
from tests.certificates.world import World

Advantages = Callable[[Tensor], Tensor]
"""Batches as numbers of answers [M, k] -> the advantage of each of their tokens [M, k, longest]."""


def drawn_weights(world: World, k: int, advantages: Advantages, how: str) -> Tensor:
    """E over the other k - 1 answers of what multiplies grad log pi(y_t), summed over the k places of y [Y, longest].

    `how`: a token is divided by the tokens of all k ("token"), k times its own answer's length ("sequence"), or k
    ("constant").
    """
    p, length = exact.fixed(world, world.policy), world.lengths
    everyone = torch.cartesian_prod(*[torch.arange(len(p))] * k).reshape(-1, k)
    table, tokens = advantages(everyone), length[everyone]
    divisor = {"token": tokens.sum(1, keepdim=True).expand_as(tokens), "sequence": k * tokens}.get(
        how, torch.full_like(tokens, k)
    )
    total = torch.zeros(len(p), world.longest, dtype=torch.float64)
    for place in range(k):
        others = p[everyone[:, [i for i in range(k) if i != place]]].prod(1)
        total.index_add_(0, everyone[:, place], (others / divisor[:, place])[:, None] * table[:, place])
    return total


def pairs_over_the_deviation(world: World, eps: float = 1e-6) -> Advantages:
    """Four answers, the first of one prompt with the third and the second with the fourth: R less its pair's mean, over
    the sample deviation of the four differences."""

    def advantages(everyone: Tensor) -> Tensor:
        r = world.reward[everyone]
        centred = (r - r.roll(2, 1)) / 2
        deviation = (centred**2).sum(1, keepdim=True).div(3).sqrt()
        return (centred / (deviation + eps))[..., None].expand(-1, -1, world.longest)

    return advantages


def whitened(world: World, table: Tensor, eps: float = 1e-8) -> Advantages:
    """A table of advantages [Y, longest], less their mean over all tokens of the batch, over their sample deviation."""
    real = exact.real_tokens(world)

    def advantages(everyone: Tensor) -> Tensor:
        inside, count = real[everyone], world.lengths[everyone].sum(1)[:, None, None]
        mean = (table[everyone] * inside).sum((1, 2), keepdim=True) / count
        centred = (table[everyone] - mean) * inside
        deviation = (centred**2).sum((1, 2), keepdim=True).div(count - 1).sqrt()
        return torch.where(deviation > 1e-12, centred / (deviation + eps), 0.0)

    return advantages


def prime(world: World) -> Advantages:
    """R less the others' mean, and for every token still to come its process reward less the mean of the others' mean
    ones."""
    process = process_rewards(world)
    to_come = process.flip(1).cumsum(1).flip(1)
    tokens_to_come = (world.lengths[:, None] - torch.arange(world.longest)).clamp(min=0)
    mean = process.sum(1) / world.lengths

    def less(x: Tensor) -> Tensor:
        return (x.sum(1, keepdim=True) - x) / (x.shape[1] - 1)

    def advantages(everyone: Tensor) -> Tensor:
        r = world.reward[everyone]
        baseline = less(mean[everyone])[..., None] * tokens_to_come[everyone]
        return (r - less(r))[..., None] + to_come[everyone] - baseline

    return advantages


def outcome_episode(world: World, beta: float) -> Episode:
    """The reward with the last token, less beta log pi/ref of every token; `guess` is wrong."""
    table = exact.ratios(world, world.policy, world.reference).log()
    reward: Numbers = {}
    for y, answer in enumerate(world.answers):
        for t in range(len(answer)):
            reward[answer[: t + 1]] = -beta * float(table[y, t])
    for answer, outcome in zip(world.answers, world.reward.tolist(), strict=True):
        reward[answer] += outcome
    guess = {state: 0.3 + 0.4 * row for state, row in world.states.items()}
    return Episode(world, reward, {}, guess)


def answer_gae(episode: Episode, values: Numbers, lam: float) -> Tensor:
    """sum_l lam^l delta_{t+l} along each answer [Y, longest]."""
    delta, world = errors(episode, values, 1.0), episode.world
    table = torch.zeros(len(world.answers), world.longest, dtype=torch.float64)
    for y, answer in enumerate(world.answers):
        total = 0.0
        for t in reversed(range(len(answer))):
            total = delta[answer[: t + 1]] + lam * total
            table[y, t] = total
    return table
