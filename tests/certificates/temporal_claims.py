"""What certificates of credit over time claim: something of the expected update, or of the mean of the returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.certificates import exact, temporal_exact as tree
from tests.certificates.certificate import LONG, Certificate
from tests.certificates.temporal_exact import Numbers
from tests.certificates.temporal_layout import estimates, mean_returns, update

EPISODE = tree.make_episode(LONG)
TARGET, SAMPLER = tree.chances(LONG, LONG.policy), tree.chances(LONG, LONG.behavior)
FAR = 1e9
"""A bound that no ratio reaches."""
GAMMA = 0.9

Variant = tuple[str, dict[str, Any]]


def true_values(gamma: float = 1.0) -> Numbers:
    return tree.state_values(EPISODE, TARGET, gamma)


def grad_j() -> Tensor:
    return exact.objective_gradient(LONG, tree.total_reward(EPISODE))


def gradient(
    name: str,
    claim: str,
    variant: Variant,
    values: Callable[[], Numbers],
    right: Callable[[], Tensor],
    *,
    behind: bool = False,
    weigh: bool = False,
) -> Certificate:
    """That the expected update is `right`; over the behaviour's answers if `behind`, weighed by pi/mu if `weigh`."""
    sampler = LONG.behavior if behind else None

    def ours() -> Tensor:
        advantage, _ = estimates(EPISODE, variant[0], values(), sampler, **variant[1])
        if weigh:
            advantage = advantage * exact.ratios(LONG, LONG.policy, LONG.behavior)
        return update(EPISODE, advantage, sampler)

    return Certificate(name, claim, ours, right)


def returns(
    name: str,
    claim: str,
    variant: Variant,
    values: Callable[[], Numbers],
    right: Callable[[], Numbers],
    *,
    behind: bool = False,
) -> Certificate:
    """That the mean of the returns in each state is `right`."""
    sampler = LONG.behavior if behind else None

    def ours() -> Tensor:
        return mean_returns(EPISODE, estimates(EPISODE, variant[0], values(), sampler, **variant[1])[1], sampler)

    return Certificate(name, claim, ours, lambda: tree.as_vector(right()))


def added(left: Numbers, right: Numbers) -> Numbers:
    return {state: left[state] + right[state] for state in left}
