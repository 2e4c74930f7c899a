"""The exact side: gradients from probabilities, by summing over everything that can happen.

Written from the definitions alone. This file must not import the library (a test looks), so that no mistake there can
be repeated here. A gradient is one flat float64 vector over all parameters of the policy being trained.

The tools: `objective_gradient(f)` differentiates any function of probabilities; `score_gradient(w)` is
sum_y sum_t w[y, t] grad log pi(y_t | y_<t) for given numbers w, which is what a policy gradient is.
"""

from __future__ import annotations

from math import comb, prod

import torch
from torch import Tensor

from tests.certificates.world import Policy, World


def token_probabilities(world: World, policy: Policy) -> list[list[Tensor]]:
    """pi(y_t | y_<t) for each answer y and each t."""
    tables = {state: state_distribution(world, policy, state) for state in world.states}
    return [[tables[answer[:t]][token] for t, token in enumerate(answer)] for answer in world.answers]


def state_distribution(world: World, policy: Policy, state: tuple[int, ...]) -> Tensor:
    """The distribution of the next token after a prefix."""
    logits = torch.stack([(policy.embed[world.states[state]] * row).sum() for row in policy.head]) / policy.temperature
    odds = (logits - logits.detach().max()).exp()
    return odds / odds.sum()


def probabilities(world: World, policy: Policy) -> Tensor:
    """The probability of each answer [Y]."""
    return torch.stack([prod(tokens[1:], start=tokens[0]) for tokens in token_probabilities(world, policy)])


def fixed(world: World, policy: Policy) -> Tensor:
    """`probabilities` as plain numbers."""
    return probabilities(world, policy).detach()


def reach(world: World) -> dict[tuple[int, ...], float]:
    """How likely the policy is to come by each state, as plain numbers."""
    total = dict.fromkeys(world.states, 0.0)
    for answer, p in zip(world.answers, fixed(world, world.policy).tolist(), strict=True):
        for t in range(len(answer)):
            total[answer[:t]] += p
    return total


def _gradient(world: World, objective: Tensor) -> Tensor:
    parts = torch.autograd.grad(objective, world.policy.parameters)
    return torch.cat([part.flatten() for part in parts])


def objective_gradient(world: World, values: Tensor) -> Tensor:
    """grad sum_y pi(y) values[y]: of the expectation of fixed numbers."""
    return _gradient(world, (probabilities(world, world.policy) * values.detach()).sum())


def score_gradient(world: World, weight: Tensor) -> Tensor:
    """sum_y sum_t weight[y, t] grad log pi(y_t | y_<t); weight [Y], or [Y, longest] (columns past the end unused)."""
    tokens = token_probabilities(world, world.policy)
    table = weight[:, None].expand(-1, world.longest) if weight.ndim == 1 else weight
    terms = [table[y, t].detach() * p.log() for y, row in enumerate(tokens) for t, p in enumerate(row)]
    return _gradient(world, torch.stack(terms).sum())


def per_state_gradient(world: World, divergence: str) -> Tensor:
    """sum_s d(s) grad f(s), the visits d(s) held fixed: f the entropy, or a KL to the reference in either direction."""
    total = world.policy.embed.new_zeros(())
    for state, visits in reach(world).items():
        p = state_distribution(world, world.policy, state)
        q = state_distribution(world, world.reference, state).detach()
        value = {
            "entropy": -(p * p.log()).sum(),
            "reverse_kl": (p * (p / q).log()).sum(),
            "forward_kl": (q * (q / p).log()).sum(),
        }[divergence]
        total = total + visits * value
    return _gradient(world, total)


def ratios(world: World, over: Policy, under: Policy) -> Tensor:
    """over(y_t) / under(y_t) as plain numbers [Y, longest], 1 past the end."""
    table = torch.ones(len(world.answers), world.longest, dtype=torch.float64)
    above, below = token_probabilities(world, over), token_probabilities(world, under)
    for y, (tops, bottoms) in enumerate(zip(above, below, strict=True)):
        for t, (top, bottom) in enumerate(zip(tops, bottoms, strict=True)):
            table[y, t] = (top / bottom).detach()
    return table


def real_tokens(world: World) -> Tensor:
    """1 where the answer has a token, 0 past its end [Y, longest]."""
    return (torch.arange(world.longest) < world.lengths[:, None]).double()


def expected_reward(world: World) -> Tensor:
    """J = E[R]."""
    return (fixed(world, world.policy) * world.reward).sum()


def true_kl(world: World) -> Tensor:
    """KL(pi || pi_ref) over whole answers, as a number."""
    p, q = fixed(world, world.policy), fixed(world, world.reference)
    return (p * (p / q).log()).sum()


def kl_regularised_gradient(world: World, beta: float) -> Tensor:
    """grad (E[R] - beta KL(pi || pi_ref)), by differentiating the definition."""
    p, q = probabilities(world, world.policy), fixed(world, world.reference)
    return _gradient(world, (p * world.reward).sum() - beta * (p * (p / q).log()).sum())


def win_rate_gradient(world: World) -> Tensor:
    """grad_pi E[sign(R(y) - R(y'))], y from pi, y' from a frozen twin of it."""
    sign = (world.reward[:, None] - world.reward).sign()
    return objective_gradient(world, sign @ fixed(world, world.policy))


def standardised_success_factor(p: float, k: int) -> float:
    """What dividing by the group's deviation makes of grad P(success): E[A | success] - E[A | failure].

    With m successes among k, A = (1 - m/k)/s or -(m/k)/s, where s^2 = m (k - m) / (k (k - 1)), and 0 if s is.
    """

    def advantage(success: bool, m: int) -> float:
        spread = (m * (k - m) / (k * (k - 1))) ** 0.5
        return 0.0 if spread == 0 else (float(success) - m / k) / spread

    others = [comb(k - 1, j) * p**j * (1 - p) ** (k - 1 - j) for j in range(k)]
    return sum(share * (advantage(True, j + 1) - advantage(False, j)) for j, share in enumerate(others))


def mixed_rate(p: float, k: int) -> float:
    """The probability that k draws are neither all successes nor all failures."""
    return 1.0 - p**k - (1.0 - p) ** k


def group_weights(world: World, k: int, *, std: bool, how: str, eps: float = 1e-6) -> Tensor:
    """E over the other k - 1 members of what multiplies grad log pi of an answer, summed over its k places [Y].

    Enumerates who the others may be. `how` says what a token of the answer is divided by: the tokens of all k
    ("token"), k times its own answer's length ("sequence"), or k ("constant").
    """
    p, r, length = fixed(world, world.policy), world.reward, world.lengths
    everyone = torch.cartesian_prod(*[torch.arange(len(p))] * k)
    own = everyone[:, 0]
    mean = r[everyone].sum(1) / k
    advantage = r[own] - mean
    if std:
        deviation = ((r[everyone] - mean[:, None]) ** 2).sum(1).div(k - 1).sqrt()
        advantage = torch.where(deviation > 1e-12, advantage / (deviation + eps), 0.0)
    divisor = {"token": length[everyone].sum(1), "sequence": k * length[own], "constant": torch.full_like(mean, k)}[how]
    chance = p[everyone[:, 1:]].prod(1)
    return k * torch.zeros_like(p).index_add(0, own, chance * advantage / divisor)


def length_mixing(world: World, k: int) -> Tensor:
    """k E[1 / (|y| + the lengths of k - 1 others)] for each answer y [Y]: from the distribution of lengths alone."""
    p, length = fixed(world, world.policy), world.lengths
    sums = {0: 1.0}
    for _ in range(k - 1):
        longer: dict[int, float] = {}
        for total, chance in sums.items():
            for own, share in zip(length.tolist(), p.tolist(), strict=True):
                longer[total + int(own)] = longer.get(total + int(own), 0.0) + chance * share
        sums = longer
    return torch.stack([k * (chance / (length + total)) for total, chance in sums.items()]).sum(0)


def whitened_pair_weights(world: World) -> Tensor:
    """What multiplies grad log pi(y) when the rewards of two answers' tokens are whitened together [Y].

    |y| entries R and |y'| entries R', n in all, have R - mean = |y'| (R - R')/n and sample variance
    |y||y'| (R - R')^2 / (n (n - 1)).
    """
    p, r, length = fixed(world, world.policy), world.reward, world.lengths
    n = length[:, None] + length
    apart = r[:, None] - r
    deviation = (length[:, None] * length * apart**2 / (n * (n - 1))).sqrt()
    advantage = torch.where(deviation > 0, length * apart / n / deviation, 0.0)
    return p * (advantage @ p)
