"""The exact side of truncated sampling: the rule by sorting probabilities, and enumeration of what it leaves.

Written from the definitions alone; must not import the library. The supports are those of the policy as it is, and are
held fixed where gradients are taken: a rule moves them at isolated points only, so that finite differences of the whole
thing, rule included, are the same (`difference`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from tests.certificates.exact import state_distribution
from tests.certificates.world import Answer, Policy, World


@dataclass(frozen=True, slots=True)
class Rule:
    """top_k (0: off), then top_p, then min_p."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def kept(self, p: list[float]) -> set[int]:
        order = sorted(range(len(p)), key=lambda v: -p[v])[: self.top_k or len(p)]
        total, before, kept = sum(p[v] for v in order), 0.0, set()
        for v in order:
            if before / total < self.top_p:
                kept.add(v)
            before += p[v]
        return {v for v in kept if p[v] >= self.min_p * p[order[0]]}


def supports(world: World, rule: Rule) -> dict[Answer, set[int]]:
    """The tokens that the rule leaves of the policy in each state."""
    return {s: rule.kept(state_distribution(world, world.policy, s).tolist()) for s in world.states}


def within(world: World, policy: Policy, cut: dict[Answer, set[int]], state: Answer) -> Tensor:
    """The distribution in a state, renormalised over its support; 0 outside."""
    p = state_distribution(world, policy, state)
    inside = torch.tensor([v in cut[state] for v in range(len(p))])
    return torch.where(inside, p, 0.0) / p[inside].sum()


def probabilities(world: World, policy: Policy, cut: dict[Answer, set[int]]) -> Tensor:
    """The probability of each answer [Y], 0 where one of its tokens was cut."""
    tables = {state: within(world, policy, cut, state) for state in world.states}
    return torch.stack([prod(tables[y[:t]][token] for t, token in enumerate(y)) for y in world.answers])


def _gradient(world: World, value: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, world.policy.parameters)])


def reward_gradient(world: World, rule: Rule) -> Tensor:
    """grad J_S, J_S the expected reward of truncated sampling."""
    return _gradient(world, (probabilities(world, world.policy, supports(world, rule)) * world.reward).sum())


def kl(world: World, rule: Rule) -> Tensor:
    """KL(pi_S, ref_S) over whole answers, both renormalised over the policy's supports; differentiable."""
    cut = supports(world, rule)
    p, q = probabilities(world, world.policy, cut), probabilities(world, world.reference, cut).detach()
    some = p > 0
    return (p[some] * (p[some] / q[some]).log()).sum()


def kl_regularised_gradient(world: World, rule: Rule, beta: float) -> Tensor:
    """grad (J_S - beta KL(pi_S, ref_S))."""
    return reward_gradient(world, rule) - beta * _gradient(world, kl(world, rule))


def entropy_gradient(world: World, rule: Rule) -> Tensor:
    """sum_s d(s) grad H(pi_S(s)), the visits d of truncated sampling held fixed."""
    cut = supports(world, rule)
    visits = dict.fromkeys(world.states, 0.0)
    for answer, p in zip(world.answers, probabilities(world, world.policy, cut).tolist(), strict=True):
        for t in range(len(answer)):
            visits[answer[:t]] += p
    total = torch.zeros((), dtype=torch.float64)
    for state, often in visits.items():
        p = within(world, world.policy, cut, state)
        p = p[p > 0]
        total = total - often * (p * p.log()).sum()
    return _gradient(world, total)


def difference(world: World, rule: Rule, direction: Tensor, size: float = 1e-5) -> float:
    """d J_S along a direction of the parameters by central differences, the rule applied anew at either side."""
    sizes = [parameter.numel() for parameter in world.policy.parameters]

    def value(step: float) -> float:
        parts = (step * direction).split(sizes)
        embed, head = (
            (parameter.detach() + part.view_as(parameter)).requires_grad_()
            for parameter, part in zip(world.policy.parameters, parts, strict=True)
        )
        moved = replace(world, policy=Policy(embed, head, world.policy.temperature))
        return float((probabilities(moved, moved.policy, supports(moved, rule)) * world.reward).sum().detach())

    return (value(size) - value(-size)) / (2 * size)
