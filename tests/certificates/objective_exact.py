"""The exact side of several objectives: expected values of a policy, scalarised by the definitions, differentiated.

Like `exact`, this must not import the library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tests.certificates import exact
from tests.certificates.world import World

WEIGHTS = (1.0, 0.7, 1.3)
MORE_IS_BETTER = (True, False, False)


def values(world: World) -> Tensor:
    """What each answer is worth in each of three objectives [3, Y]: its reward, its length, its reward squared."""
    return torch.stack([world.reward, world.lengths, world.reward.square()])


def means(world: World) -> Tensor:
    """E[value] [3], differentiable."""
    return values(world) @ exact.probabilities(world, world.policy)


def deviations(world: World) -> Tensor:
    """The standard deviations of the values under the policy [3], as numbers."""
    p, table = exact.fixed(world, world.policy), values(world)
    return ((table - (table @ p)[:, None]).square() @ p).sqrt()


def scalarised(world: World, earlier: Tensor, method: str, *, mu: float, rho: float) -> Tensor:
    """S of the policy's expected objectives, each in units of its deviation, where `earlier` [3] was seen before."""
    parts = []
    for mean, before, spread, up, weight in zip(
        means(world), earlier, deviations(world), MORE_IS_BETTER, WEIGHTS, strict=True
    ):
        best = (torch.maximum if up else torch.minimum)(mean.detach(), before)
        short = (best - mean if up else mean - best) / spread
        parts.append((weight * short, weight * (mean if up else -mean) / spread))
    regrets = torch.stack([regret for regret, _ in parts])
    if method == "weighted_sum":
        return torch.stack([gain for _, gain in parts]).sum()
    if method == "smooth_tchebycheff":
        return -mu * (regrets / mu).exp().sum().log()
    return -regrets.max() - (rho * regrets.sum() if method == "augmented_tchebycheff" else 0.0)


def gradient(world: World, earlier: Tensor, method: str, *, mu: float, rho: float) -> Tensor:
    """grad S, one flat vector."""
    value = scalarised(world, earlier, method, mu=mu, rho=rho)
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, world.policy.parameters)])
