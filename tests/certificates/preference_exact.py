"""The exact side of preferences: populations of pairs and of labelled answers, from probabilities alone.

People prefer y to y' with the probability of Bradley and Terry's model of the world's rewards; pairs are drawn from
the world's `behavior`. sigma(beta D) is written as odds of powers of probability ratios, never as a sigmoid of
differences of logarithms. Must not import the library.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.certificates import exact
from tests.certificates.world import World


def preference(world: World) -> Tensor:
    """P(y preferred to y') [Y, Y]."""
    strength = world.reward.exp()
    return strength[:, None] / (strength[:, None] + strength)


def pair_mass(world: World) -> Tensor:
    """How often (chosen y, rejected y') is in the data [Y, Y]."""
    mu = exact.fixed(world, world.behavior)
    return mu[:, None] * mu * preference(world)


def goodness(world: World) -> Tensor:
    """P(an answer is labelled good) [Y]."""
    strength = world.reward.exp()
    return strength / (1 + strength)


def answer_mass(world: World) -> Tensor:
    """How often each answer is in the data [Y]."""
    return exact.fixed(world, world.behavior)


def descent(world: World, loss: Callable[[Tensor, Tensor], Tensor], mass: Tensor) -> Tensor:
    """-grad of sum mass * loss, where loss(p, q) [like mass] is a function of the probabilities of answers under the
    policy p and the reference q, both [Y]."""
    p, q = exact.probabilities(world, world.policy), exact.fixed(world, world.reference)
    value = (mass * loss(p, q)).sum()
    return -torch.cat([part.flatten() for part in torch.autograd.grad(value, world.policy.parameters)])


def against(power: Tensor) -> Tensor:
    """power(y) / (power(y) + power(y')) [Y, Y]: what beats what, given how strong each is [Y]."""
    return power[:, None] / (power[:, None] + power)


def sigmoid(beta: float, wrong: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(p: Tensor, q: Tensor) -> Tensor:
        wins = against((p / q) ** beta)
        return -(1 - wrong) * wins.log() - wrong * wins.T.log()

    return loss


def dpop(beta: float, penalty: float, wrong: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(p: Tensor, q: Tensor) -> Tensor:
        ratio = p / q
        kept = torch.minimum(ratio, torch.ones_like(ratio)) ** (beta * penalty)
        chosen, rejected = (ratio**beta * kept)[:, None], (ratio**beta)[None]
        return -(1 - wrong) * (chosen / (chosen + rejected)).log() - wrong * (rejected / (chosen + rejected)).log()

    return loss


def hinge(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(p: Tensor, q: Tensor) -> Tensor:
        odds = ((p / q)[:, None] / (p / q)) ** beta
        return torch.where(odds < torch.e, 1 - odds.log(), torch.zeros_like(odds))

    return loss


def ipo(beta: float, length: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(p: Tensor, q: Tensor) -> Tensor:
        mean = (p / q) ** (1 / length)
        return ((mean[:, None] / mean).log() - 1 / (2 * beta)) ** 2

    return loss


def simpo(beta: float, gamma: float, length: Tensor, wrong: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(p: Tensor, q: Tensor) -> Tensor:
        strong = p ** (beta / length)
        chosen, rejected = strong[:, None], strong * torch.e**gamma
        return -(1 - wrong) * (chosen / (chosen + rejected)).log() - wrong * (rejected / (chosen + rejected)).log()

    return loss


def orpo(weight: float, length: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(p: Tensor, q: Tensor) -> Tensor:
        mean = p ** (1 / length)
        return -mean[:, None].log() - weight * against(mean / (1 - mean)).log()

    return loss


def kto(beta: float, point: float, good: float, bad: float) -> tuple[Callable[[Tensor, Tensor], Tensor], ...]:
    """What a desirable and an undesirable answer cost, each [Y]."""

    def value(p: Tensor, q: Tensor) -> Tensor:
        odds = (p / q / torch.e**point) ** beta
        return odds / (1 + odds)

    return lambda p, q: good * (1 - value(p, q)), lambda p, q: bad * value(p, q)


def labelled(world: World, pair: tuple[Callable[[Tensor, Tensor], Tensor], ...]) -> Callable[[Tensor, Tensor], Tensor]:
    """The expected cost of an answer whose label is drawn [Y]."""
    desirable, undesirable = pair
    share = goodness(world)
    return lambda p, q: share * desirable(p, q) + (1 - share) * undesirable(p, q)


def cross_entropy(beta: float) -> tuple[Callable[[Tensor, Tensor], Tensor], ...]:
    """What the label costs where sigma(reward) = odds / (1 + odds) and odds = (p / q)^beta."""
    return lambda p, q: -(1 - 1 / (1 + (p / q) ** beta)).log(), lambda p, q: (1 + (p / q) ** beta).log()


def rewarded(world: World, beta: float) -> Tensor:
    """The optimum of E[r] - beta KL(pi, ref): ref e^(r / beta), made a distribution [Y]."""
    weight = exact.fixed(world, world.reference) * (world.reward / beta).exp()
    return weight / weight.sum()


def psi_optimum(world: World, tau: float) -> Tensor:
    """The optimum of E[P(y preferred to y' from the data)] - tau KL(pi, ref) [Y] (arXiv 2310.12036, section 5)."""
    winning = preference(world) @ answer_mass(world)
    weight = exact.fixed(world, world.reference) * (winning / tau).exp()
    return weight / weight.sum()


def soft_values(world: World, beta: float) -> Tensor:
    """beta log E_ref[e^(r(y') / beta) | y' begins as y up to and with t] for each answer and t [Y, longest], 0 past the
    end; r(y) = beta log pi(y) / ref(y). By summing over the answers that begin so."""
    p, q = exact.fixed(world, world.policy), exact.fixed(world, world.reference)
    boosted = q * (p / q)
    table = torch.zeros(len(world.answers), world.longest, dtype=torch.float64)
    for y, answer in enumerate(world.answers):
        for t in range(len(answer)):
            begin = answer[: t + 1]
            same = torch.tensor([other[: len(begin)] == begin for other in world.answers])
            table[y, t] = beta * (boosted[same].sum() / q[same].sum()).log()
    return table


def area(score: Tensor, good: Tensor) -> Tensor:
    """P(a good row's score > a bad one's) + P(equal) / 2, over all pairs of rows."""
    above, equal = score[good][:, None] > score[~good], score[good][:, None] == score[~good]
    return above.double().mean() + equal.double().mean() / 2
