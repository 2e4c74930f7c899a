"""The exact side of OPO, REINFORCE++ and PRIME: who the other members of a group may be, enumerated.

Like `exact`, this file must not import the library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.certificates import exact
from tests.certificates.world import World


def length_weighted(world: World, k: int) -> Tensor:
    """E over the k - 1 others of R(y) less the length-weighted mean of all k [Y]."""
    p, r, length = exact.fixed(world, world.policy), world.reward, world.lengths
    everyone = torch.cartesian_prod(*[torch.arange(len(p))] * k)
    mean = (length[everyone] * r[everyone]).sum(1) / length[everyone].sum(1)
    chance = p[everyone[:, 1:]].prod(1)
    return torch.zeros_like(p).index_add(0, everyone[:, 0], chance * (r[everyone[:, 0]] - mean))


def batch_deviation(world: World) -> Tensor:
    """E of (R(y) - R(y'))/2 over the deviation of two pairs' centred rewards, (y, y') one of them [Y].

    The four are half a difference from 0 each, two of each sign: the sum of squares is (d^2 + e^2)/2, over three.
    """
    p, r = exact.fixed(world, world.policy), world.reward
    own = (r[:, None] - r)[:, :, None, None]
    other = (r[:, None] - r)[None, None]
    deviation = ((own**2 + other**2) / 6).sqrt()
    advantage = torch.where(deviation > 0, own / 2 / deviation, 0.0)
    return torch.einsum("abcd,b,c,d->a", advantage, p, p, p)


def process_rewards(world: World) -> Tensor:
    """log pi_old/pi_ref of every token [Y, longest], 0 past the end: an implicit reward model that is pi_old."""
    return exact.ratios(world, world.old, world.reference).log() * exact.real_tokens(world)


def mean_process_reward(world: World) -> Tensor:
    """E of the mean over an answer's tokens."""
    return (exact.fixed(world, world.policy) * process_rewards(world).sum(1) / world.lengths).sum()


def prime_objective(world: World, coef: float) -> Tensor:
    """R + coef (sum_t r_t - E[m] L) of each answer [Y], E[m] a number."""
    return world.reward + coef * (process_rewards(world).sum(1) - mean_process_reward(world) * world.lengths)


def prime_advantage(world: World, gamma: float, coef: float) -> Tensor:
    """R - J + coef sum_{s >= t} gamma^(s-t) (r_s - E[m]) [Y, longest]."""
    centred = (process_rewards(world) - mean_process_reward(world)) * exact.real_tokens(world)
    table = torch.zeros_like(centred)
    for t in range(world.longest):
        for s in range(t, world.longest):
            table[:, t] += gamma ** (s - t) * centred[:, s]
    return (world.reward - exact.expected_reward(world))[:, None] + coef * table


def best_baseline(world: World) -> Tensor:
    """E[|grad log pi(y)|^2 R] / E[|grad log pi(y)|^2] of a uniform policy with parameters of its own in each state.

    This b makes the trace of the variance of (R - b) grad log pi(y) smallest: its derivative by b vanishes there.
    """
    logits = torch.zeros(len(world.states), 3, dtype=torch.float64, requires_grad=True)
    p, norms = [], []
    for answer in world.answers:
        tokens = [(world.states[answer[:t]], token) for t, token in enumerate(answer)]
        score = torch.stack([logits[state, token] - logits[state].exp().sum().log() for state, token in tokens]).sum()
        norms.append(torch.autograd.grad(score, logits)[0].square().sum())
        p.append(3.0 ** -len(answer))
    weight = torch.tensor(p, dtype=torch.float64) * torch.stack(norms)
    return (weight * world.reward).sum() / weight.sum()
