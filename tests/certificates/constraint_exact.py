"""The exact side of the constraints: a bandit whose constrained optimum is known in closed form.

The policy that maximises E[R] - lambda KL(pi || ref) + nu H(pi) is pi ~ ref^(lambda / (lambda + nu)) exp(R / (lambda +
nu)). The multiplier that holds a limit is found by bisection. This file must not import the library.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

REFERENCE = torch.tensor([0.35, 0.25, 0.2, 0.12, 0.08], dtype=torch.float64)
REWARD = torch.tensor([0.1, -0.4, 0.5, 1.0, 0.3], dtype=torch.float64)
START = torch.tensor([0.8, -0.5, 0.3, 0.1, -1.2], dtype=torch.float64)
"""Logits of a policy that is far from the reference and from every optimum."""


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q); 0 log 0 = 0."""
    return (torch.special.xlogy(p, p) - p * q.log()).sum()


def entropy(p: Tensor) -> Tensor:
    return -torch.special.xlogy(p, p).sum()


def optimum(multiplier: float, nu: float = 0.0) -> Tensor:
    """The maximiser of E[R] - lambda KL + nu H; of E[R] alone where both are 0."""
    total = multiplier + nu
    if total == 0.0:
        return torch.nn.functional.one_hot(REWARD.argmax(), len(REWARD)).double()
    return ((multiplier * REFERENCE.log() + REWARD) / total).softmax(0)


def bisected(measure: Callable[[float], Tensor], target: float, *, falling: bool) -> float:
    """The multiplier in [1e-3, 1e3] at which a monotone measure has a value."""
    low, high = 1e-3, 1e3
    for _ in range(200):
        middle = (low * high) ** 0.5
        if (float(measure(middle)) > target) == falling:
            low = middle
        else:
            high = middle
    return low


def gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Of a loss of the probabilities, with respect to the logits, at START."""
    logits = START.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(logits.softmax(0)), logits)
    return found


def along(step: Tensor, fraction: float) -> Tensor:
    """KL(policy at START || policy at START + fraction step)."""
    return kl(START.softmax(0), (START + fraction * step).softmax(0))
