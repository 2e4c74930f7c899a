"""Process rewards without process labels (https://arxiv.org/abs/2412.01981; online in PRIME, 2502.01456).

A language model phi trained only on outcomes, with the reward r(y) = beta log phi(y | x) / ref(y | x), also gives a
reward for each step: the log-ratio of its tokens. With shapes [..., T], where columns t = 0, 1, ... are the tokens of
an answer,

    r_t = beta log phi(y_t | y_<t) / ref(y_t | y_<t)       reward of a token
    Q_t = r_0 + ... + r_t = beta log E_ref[exp(r(y) / beta) | y_<=t]      the soft value after y_<=t
    V_t = Q_(t-1), V_0 = 0                                  the soft value of the state before t

so that r_t = Q_t - V_t is an advantage, and the sum over t is r(y). With phi = ref everything is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_rewards(logp: Tensor, ref_logp: Tensor, mask: Tensor, *, beta: float) -> Tensor:
    """r_t = beta (logp_t - ref_logp_t), 0 outside the mask; any shape, also the flat axis [N]. Differentiable."""
    return torch.where(mask, beta * (logp - ref_logp), torch.zeros((), dtype=logp.dtype, device=logp.device))


def outcome(rewards: Tensor) -> Tensor:
    """r(y) = sum_t r_t: token rewards [..., T] -> [...]."""
    return rewards.sum(-1)


def q_values(rewards: Tensor) -> Tensor:
    """Q_t = sum_{i <= t} r_i: token rewards [..., T] -> [..., T]. The last one is the outcome."""
    return rewards.cumsum(-1)


def step_rewards(rewards: Tensor, step: Tensor, *, count: int) -> Tensor:
    """Rewards of steps [..., K = count]: the sums of the token rewards [..., T] of each step. They sum to the outcome.

    `step` [..., T] int64 is the step index of each token, from 0; tokens with a negative index are ignored. Raises
    RuntimeError for a step of `count` or above.
    """
    inside = step >= 0
    totals = rewards.new_zeros(*rewards.shape[:-1], count)
    return totals.scatter_add(-1, step.clamp(min=0), torch.where(inside, rewards, torch.zeros_like(rewards)))
