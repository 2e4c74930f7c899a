"""Per-step advantages from rewards and values.

All functions take keywords only: `rewards` and `values` [S, T], any float dtype; `mask` [S, T], bool, True where the
policy chose the token; `bootstrap` [S], the value of the state after a row's last step, 0 if the row terminated;
`gamma`, the discount per step. `values[:, t]` is the value of the state in which `tokens[t]` was chosen. They return
`(advantage, returns)`, both [S, T], 0 outside the mask, without gradient, in the input dtype; 16-bit dtypes are
computed in float32. `returns` are the regression targets for a critic.

Steps are exactly the columns of the mask: padding and environment turns are skipped, so t + 1 below is the next chosen
column, and values and log-probs outside the mask are never read. A reward outside the mask is credited to the preceding
chosen column (a tool's result belongs to the call), or to the first one if there is none. Rewards are lost only if the
policy chose nothing in that row.

    delta_t = r_t + gamma V_{t+1} - V_t            rho_t = pi(token_t) / mu(token_t), mu the sampling policy

On policy (rho = 1) `gae`, `td_lambda`, `retrace` and `vtrace` are the same estimator; with lam=1 it is `monte_carlo`.
`n_step` ranges from delta (n=1) to `monte_carlo` (n >= T).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from novarl.algos.advantages.steps import Steps, accumulate, ahead
from novarl.core.errors import NovaError


def gae(
    *, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """A_t = delta_t + gamma lam A_{t+1}, returns A_t + V_t (https://arxiv.org/abs/1506.02438).

    lam=1 is Monte Carlo minus the value: unbiased for any values. lam=0 is delta: as biased as the values.
    """
    steps = Steps.of(rewards, values, mask, bootstrap)
    advantage = accumulate(steps.delta(gamma), gamma * lam)
    return steps.spread(advantage, advantage + steps.value)


def monte_carlo(
    *, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """G_t = r_t + gamma G_{t+1}, from the bootstrap past the last step; A_t = G_t - V_t, returns G_t."""
    steps = Steps.of(rewards, values, mask, bootstrap)
    returns = accumulate(steps.reward + gamma * torch.where(steps.last, steps.next_value, 0.0), gamma)
    return steps.spread(returns - steps.value, returns)


def td_lambda(
    *, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}), A_t = G_t - V_t, returns G_t.

    After the last step both V and G are the bootstrap. The advantage is that of GAE, written as a return (Sutton and
    Barto, Reinforcement Learning, 12.1).
    """
    steps = Steps.of(rewards, values, mask, bootstrap)
    bootstrapped = torch.where(steps.last, steps.next_value, (1.0 - lam) * steps.next_value)
    returns = accumulate(steps.reward + gamma * bootstrapped, gamma * lam)
    return steps.spread(returns - steps.value, returns)


def n_step(
    *, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor, n: int, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """G_t = sum_{k < n} gamma^k r_{t+k} + gamma^n V_{t+n}, A_t = G_t - V_t, returns G_t.

    Within n steps of the row's end the sum is truncated and followed by the bootstrap, discounted accordingly.
    """
    if n < 1:
        raise NovaError(f"n must be at least 1, not {n}", where="advantages.n_step", fix="n=1 is delta")
    steps = Steps.of(rewards, values, mask, bootstrap)
    returns, following = steps.value, steps.next_value
    for _ in range(min(n, mask.shape[1])):
        returns = steps.reward + gamma * following
        following = torch.where(steps.last, steps.next_value, ahead(returns))
    return steps.spread(returns - steps.value, returns)


def vtrace(
    *,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap: Tensor,
    logp: Tensor,
    behavior_logp: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    rho_max: float = 1.0,
    c_max: float = 1.0,
    pg_rho_max: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (https://arxiv.org/abs/1802.01561), with the lambda bootstrap of its policy gradient.

        v_t - V_t = min(rho_max, rho_t) delta_t + gamma lam min(c_max, rho_t) (v_{t+1} - V_{t+1})
        A_t = min(pg_rho_max, rho_t) (r_t + gamma (lam v_{t+1} + (1 - lam) V_{t+1}) - V_t),   returns v_t

    logp, behavior_logp [S, T]: of the trained policy and of the sampling policy (not the reference). The fixed point of
    the values is the value of the policy proportional to min(rho_max mu, pi): that of pi if rho_max is never reached,
    and that of mu as rho_max goes to 0; c_max and lam affect only the convergence speed. A_t already includes the ratio
    of its own step, so the surrogate must not multiply by pi/mu again. States are weighted by the visits of mu.
    """
    steps = Steps.of(rewards, values, mask, bootstrap)
    rho, delta = steps.ratio(logp, behavior_logp), steps.delta(gamma)
    error = accumulate(rho.clamp(max=rho_max) * delta, gamma * lam * rho.clamp(max=c_max))
    return steps.spread(rho.clamp(max=pg_rho_max) * (delta + gamma * lam * ahead(error)), error + steps.value)


def retrace(
    *,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap: Tensor,
    logp: Tensor,
    behavior_logp: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    c_max: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """A_t = delta_t + gamma lam min(c_max, rho_{t+1}) A_{t+1}, returns A_t + V_t: Retrace(lambda)
    (https://arxiv.org/abs/1606.02647) with the state's value in place of Q.

    logp, behavior_logp [S, T]: of the trained policy and of the sampling policy. A_t estimates the advantage of the
    chosen token and does not include its ratio: off policy, the surrogate should multiply by pi/mu. Likewise `returns`
    estimate Q of the chosen token; a state value fitted to them off policy is the mean of Q under mu (use `vtrace` for
    the value of pi). Unbiased for exact values if c_max is never reached.
    """
    steps = Steps.of(rewards, values, mask, bootstrap)
    trace = lam * steps.ratio(logp, behavior_logp).clamp(max=c_max)
    advantage = accumulate(steps.delta(gamma), gamma * ahead(trace))
    return steps.spread(advantage, advantage + steps.value)


def clipped_is(
    *,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap: Tensor,
    logp: Tensor,
    behavior_logp: Tensor,
    gamma: float = 1.0,
    level: Literal["decision", "trajectory"] = "decision",
    rho_min: float = 0.0,
    rho_max: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Importance-weighted Monte Carlo with weights clipped to [rho_min, rho_max].

        level="decision":    A_t = w_t (r_t + gamma G_{t+1} - V_t),  G_t = w_t (r_t + gamma G_{t+1}),  w_t = clip(rho_t)
                             returns G_t; after the last step G is the bootstrap
        level="trajectory":  A_t = w (G_t - V_t),  G_t the plain return,  w = clip(prod_t rho_t) of the whole row
                             returns V_t + A_t

    logp, behavior_logp [S, T]: of the trained policy and of the sampling policy. The weight multiplies return *minus*
    value: weighting only the return would make the value a bias. Without clipping both are unbiased for any values. Per
    decision (Precup, Sutton and Singh, Eligibility traces for off-policy policy evaluation, 2000), states are weighted
    by the visits of mu; per trajectory the gradient is exactly grad J, with a variance that grows with length. A_t
    already includes its ratios, so the surrogate must not multiply by pi/mu again.
    """
    if level not in ("decision", "trajectory"):
        raise NovaError(f"unknown level {level!r}", where="advantages.clipped_is", fix="'decision' or 'trajectory'")
    steps = Steps.of(rewards, values, mask, bootstrap)
    received = steps.reward + gamma * torch.where(steps.last, steps.next_value, 0.0)
    if level == "decision":
        weight = steps.ratio(logp, behavior_logp).clamp(min=rho_min, max=rho_max)
        returns = accumulate(weight * received, gamma * weight)
        return steps.spread(returns - weight * steps.value, returns)
    whole = steps.log_ratio(logp, behavior_logp).sum(1, keepdim=True)
    weight = whole.exp().clamp(min=rho_min, max=rho_max)
    advantage = weight * (accumulate(received, gamma) - steps.value)
    return steps.spread(advantage, advantage + steps.value)
