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
enumeration. All statements are on-policy; `corrected` makes one of them hold under an old policy too.

Per token or per sequence (`kl.unit`): the KL of a sequence is the sum over its tokens, `aggregate.per_sequence`, in
nats per sequence; E[sum_t k1_t] = E[sum_t k3_t] = KL(pi || pi_ref) over whole answers.
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


_STEEPEST = 20.0
"""Beyond this log-ratio a clamped k3 is constant anyway, and exp would overflow in its gradient."""


def k3(logp: Tensor, ref_logp: Tensor, *, most: float | None = None) -> Tensor:
    """x + exp(-x) - 1: unbiased and never negative; as a loss its gradient is that of KL(pi_ref || pi), per token.

    Written with expm1, which keeps its digits where the policies nearly agree: there k3 is about x^2 / 2, and
    `exp(-x) - 1` would round it away. With `most`, values above it are cut to it and have no gradient: a token that the
    reference finds likely and the policy all but impossible then pulls no more. (verl cuts at 10.) It is biased where
    it cuts.
    """
    x = logp - ref_logp
    if most is None:
        return x + torch.expm1(-x)
    x = x.clamp(min=-_STEEPEST)
    return (x + torch.expm1(-x)).clamp(max=most)


def corrected(kl: Tensor, logp: Tensor, old_logp: Tensor) -> Tensor:
    """r_t kl_t, r_t = pi(token_t) / pi_old(token_t), for tokens that pi_old sampled; r_t carries its gradient.

    In a state as sampled, sum_a pi_old(a) r(a) k(a) = sum_a pi(a) k(a), which for k1 and k3 is KL(pi || pi_ref) as a
    function of pi and not only in value: its gradient is therefore that of KL(pi || pi_ref), on-policy and off. The
    states stay those that pi_old visits. Token by token, with x = log pi - log pi_ref,

        grad (r k3) = r (k3 + 1 - exp(-x)) grad log pi = r x grad log pi,      grad (r k1) = r (x + 1) grad log pi.

    On-policy, r = 1 changes no value of k3, and turns its gradient into that of k2: what it adds, k3 grad log pi, is
    what differentiating k3 alone leaves out. For k1 it makes a loss out of one that has no signal, with the noise
    r grad log pi on top. k2 is not for it: grad (r k2) is that of k2's biased value, E[x^2] / 2.

    DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556). TRL 1.16 does so to k3 by default (`use_bias_correction_kl`), and
    takes the sequence's ratio for r where its surrogate does.
    """
    return kl * (logp - old_logp).exp()
