"""Per-token estimators of KL(pi || pi_ref) from tokens that pi sampled (http://joschu.net/blog/kl-approx.html).

With x_t = log pi(token_t) - log pi_ref(token_t), all [N] -> [N], in nats per token:

    estimator   value E[k]        as a loss, gradient E[grad k] (states as sampled)   as reward or advantage
    k1          KL, any sign      0: no signal; rejected by the configuration          correct
    k2          biased, >= 0      grad KL(pi || pi_ref): correct                       biased
    k3          KL, >= 0          grad KL(pi_ref || pi): reversed direction (GRPO)     biased

"As a loss" the estimator is differentiated with the sampled states held fixed: it moves each token's distribution
towards the reference, but ignores the effect of a token on the KL of later ones, as does KL as "advantage". KL as
"reward", -beta sum_t k1_t on the trajectory, is credited to every token of the trajectory: its expected gradient is
exactly that of E[R] - beta KL(pi || pi_ref) over whole trajectories. `make certificates` verifies each of these by
enumeration. All statements are on-policy; `corrected` extends one of them to an old policy.

Per token or per sequence (`kl.unit`): the KL of a sequence is the sum over its tokens, `aggregate.per_sequence`, in
nats per sequence; E[sum_t k1_t] = E[sum_t k3_t] = KL(pi || pi_ref) over whole answers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """x: unbiased, of either sign. As a loss its expected gradient is zero: use it only as reward or advantage."""
    return logp - ref_logp


def k2(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """x^2 / 2: never negative, biased in value; as a loss its gradient is that of KL(pi || pi_ref), per token."""
    return 0.5 * (logp - ref_logp).square()


_STEEPEST = 20.0
"""Beyond this log-ratio a clamped k3 is constant, and exp would overflow in its gradient."""


def k3(logp: Tensor, ref_logp: Tensor, *, most: float | None = None) -> Tensor:
    """x + exp(-x) - 1: unbiased and never negative; as a loss its gradient is that of KL(pi_ref || pi), per token.

    Computed with expm1, which is accurate if the policies nearly agree: there k3 is about x^2 / 2, and `exp(-x) - 1`
    would lose it to rounding. With `most`, larger values are clamped to it and have no gradient, so tokens that are
    likely under the reference but nearly impossible under the policy have no effect. (verl clamps at 10.) This is
    biased.
    """
    x = logp - ref_logp
    if most is None:
        return x + torch.expm1(-x)
    x = x.clamp(min=-_STEEPEST)
    return (x + torch.expm1(-x)).clamp(max=most)


def corrected(kl: Tensor, logp: Tensor, old_logp: Tensor) -> Tensor:
    """r_t kl_t, r_t = pi(token_t) / pi_old(token_t), for tokens that pi_old sampled; r_t carries its gradient.

    In a sampled state, sum_a pi_old(a) r(a) k(a) = sum_a pi(a) k(a), which for k1 and k3 is KL(pi || pi_ref) as a
    function of pi and not only in value: its gradient is therefore that of KL(pi || pi_ref), on-policy and off-policy.
    The states are still those visited by pi_old. Per token, with x = log pi - log pi_ref,

        grad (r k3) = r (k3 + 1 - exp(-x)) grad log pi = r x grad log pi,      grad (r k1) = r (x + 1) grad log pi.

    On-policy, r = 1 does not change the value of k3, but turns its gradient into that of k2 by adding the missing term
    k3 grad log pi. It makes k1 usable as a loss, with additional noise r grad log pi. It does not fit k2: grad (r k2)
    is the gradient of k2's biased value, E[x^2] / 2.

    DeepSeek-V3.2 (https://arxiv.org/abs/2512.02556). TRL 1.16 applies it to k3 by default (`use_bias_correction_kl`),
    and uses the sequence's ratio for r if its surrogate does.
    """
    return kl * (logp - old_logp).exp()
