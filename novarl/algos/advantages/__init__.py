"""Advantages: how much better than expected each trajectory, step or token did; the first of an algorithm's five axes.

    of whole trajectories, [R] -> [R]      constant_baseline, ema_baseline, scst = remax, batch, group, leave_one_out,
                                           reinforce_pp, opo
    of steps, [S, T] -> (advantage, returns) [S, T]
                                           gae, monte_carlo, td_lambda, n_step; off policy: vtrace, retrace, clipped_is
    of macro-steps, the same shapes        segment_gae (VinePPO)
    of tokens and outcome together         prime

What each makes of the expected policy gradient grad J = E[R grad log pi] (proved by `make certificates`):

    constant, ema_baseline, scst           unbiased: the baseline does not know the sample
    leave_one_out                          unbiased
    group, batch                           (1 - 1/k) grad J: the mean of k samples holds the sample's own reward
    group with norm_std                    another objective: with k = 2, the probability to beat one's own twin
    reinforce_pp                           the same directions as `group`, weighed by a deviation that knows the sample
    opo                                    as `group` for equal lengths; otherwise biased by length
    prime                                  grad J of outcome and process rewards, less mean process reward x grad E[L]
    gae, td_lambda, n_step, segment_gae    unbiased for exact values; with lam=1, or n >= T, for any values
    monte_carlo                            unbiased for any values
    vtrace, retrace, clipped_is            on policy as gae or monte_carlo; off policy see their own words

`whiten` standardises any of them over a batch; `zero_variance_groups` counts the groups that teach nothing.
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
