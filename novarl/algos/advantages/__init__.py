"""Advantage estimators for trajectories, steps and tokens; the first of an algorithm's five axes.

    of whole trajectories, [R] -> [R]      constant_baseline, ema_baseline, scst = remax, batch, group, leave_one_out,
                                           reinforce_pp, opo
    of steps, [S, T] -> (advantage, returns) [S, T]
                                           gae, monte_carlo, td_lambda, n_step; off policy: vtrace, retrace, clipped_is
    of macro-steps, the same shapes        segment_gae (VinePPO)
    of tokens and outcome together         prime

The expected gradient of each, compared with grad J = E[R grad log pi] (verified by `make certificates`):

    constant, ema_baseline, scst           unbiased: the baseline is independent of the sample leave_one_out unbiased
    group, batch                           (1 - 1/k) grad J: the mean of k samples includes the sample's own reward
    group with norm_std                    another objective: with k = 2, the probability of beating another sample
    reinforce_pp                           the same direction as `group`, scaled by a deviation that depends on the
    sample opo                                    as `group` for equal lengths; otherwise biased by length prime grad J
    of outcome and process rewards, less mean process reward x grad E[L] gae, td_lambda, n_step, segment_gae unbiased
    for exact values; with lam=1, or n >= T, for any values monte_carlo                            unbiased for any
    values vtrace, retrace, clipped_is            on policy as gae or monte_carlo; off policy see their docstrings

`whiten` standardises any of them over a batch; `zero_variance_groups` counts the groups without a gradient.
"""

from novarl.algos.advantages.baselines import (
    batch,
    constant_baseline,
    ema_baseline,
    group,
    leave_one_out,
    opo,
    reinforce_pp,
    remax,
    scst,
    whiten,
    zero_variance_groups,
)
from novarl.algos.advantages.process import prime
from novarl.algos.advantages.segments import segment_gae
from novarl.algos.advantages.temporal import clipped_is, gae, monte_carlo, n_step, retrace, td_lambda, vtrace

__all__ = [
    "batch",
    "clipped_is",
    "constant_baseline",
    "ema_baseline",
    "gae",
    "group",
    "leave_one_out",
    "monte_carlo",
    "n_step",
    "opo",
    "prime",
    "reinforce_pp",
    "remax",
    "retrace",
    "scst",
    "segment_gae",
    "td_lambda",
    "vtrace",
    "whiten",
    "zero_variance_groups",
]
