"""Per-token estimators of KL(pi || pi_ref) from tokens that pi sampled (http://joschu.net/blog/kl-approx.html).

With x_t = log pi(token_t) - log pi_ref(token_t), all [N] -> [N], in nats per token:

    estimator   value E[k]        as a loss, gradient E[grad k] (states as sampled)   as reward or advantage
    k1          KL, any sign      0: no signal at all; a config refuses it             the right one
    k2          biased, >= 0      grad KL(pi || pi_ref): the right one                 biased
    k3          KL, >= 0          grad KL(pi_ref || pi): the other direction (GRPO)    biased

"As a loss" the estimator is differentiated and its sampled states are held fixed: it moves each token's distribution
towards the reference, but is blind to what a token does to the KL of later ones, and so is KL as "advantage". KL as
"reward", -beta sum_t k1_t on the trajectory, is credited to every token of the trajectory: its expected gradient is
that of E[R] - beta KL(pi || pi_ref) over whole trajectories, exactly. `make certificates` shows each of these by
enumeration. All statements are on-policy; under an old policy they hold for the tokens it sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """x: unbiased, of either sign. Its expected gradient as a loss is zero: use it as reward or advantage only."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """x^2 / 2: never negative, biased in value; as a loss its gradient is that of KL(pi || pi_ref), per token."""
    return 0.5 * (logp - ref_logp).square()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """x + exp(-x) - 1: unbiased and never negative; as a loss its gradient is that of KL(pi_ref || pi), per token.

    Written with expm1, which keeps its digits where the policies nearly agree: there k3 is about x^2 / 2, and
    `exp(-x) - 1` would round it away.
    """
    x = logp - ref_logp
    return x + torch.expm1(-x)
