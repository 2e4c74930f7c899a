"""What a certificate is, and the words it is written in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tests.certificates import exact
from tests.certificates.expected import Loss, Minibatch, ascent
from tests.certificates.world import Policy, World, make_world

TOLERANCE = 1e-8
LONG, MIDDLE, SHORT = make_world(3), make_world(2), make_world(1)
"""15 answers of up to three tokens, 7 of up to two, 3 of one."""
BINARY = make_world(2, binary=True, seed=3)
COLD = make_world(3, temperature=0.7)
CLIP = (0.2, 0.28)
WIDE_CLIP = (0.9, 9.0)
CAP = 1.1


@dataclass(frozen=True, slots=True)
class Certificate:
    """`name`: what is certified; `claim`: the exact side in a formula; both sides, computed when called."""

    name: str
    claim: str
    library: Callable[[], Tensor]
    exact: Callable[[], Tensor]

    def error(self) -> float:
        """The largest absolute difference between the two sides."""
        return float((self.library() - self.exact()).detach().abs().max())


def certify(
    name: str,
    claim: str,
    world: World,
    k: int,
    loss: Loss,
    right: Callable[[], Tensor],
    *,
    sampler: Policy | None = None,
    groups: Sequence[int] | None = None,
    admitted: Callable[[Minibatch], bool] | None = None,
) -> Certificate:
    """That the expected ascent direction of `loss`, over minibatches of k answers, is `right`."""
    return Certificate(
        name, claim, lambda: ascent(world, k, loss, sampler=sampler, groups=groups, admitted=admitted), right
    )


def grad_j(world: World, factor: float = 1.0) -> Callable[[], Tensor]:
    """The gradient of expected reward, times a factor."""
    return lambda: factor * exact.objective_gradient(world, world.reward)


def scored(world: World, weight: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """E[sum_t weight(y, t) grad log pi(y_t)] under the policy."""
    return lambda: exact.score_gradient(world, times(exact.fixed(world, world.policy), weight()))


def times(chance: Tensor, weight: Tensor) -> Tensor:
    """chance [Y] times weight [Y] or [Y, longest]."""
    return (chance if weight.ndim == 1 else chance[:, None]) * weight


def success_rate() -> float:
    """J of the world of rewards 0 and 1."""
    return float(exact.expected_reward(BINARY))
