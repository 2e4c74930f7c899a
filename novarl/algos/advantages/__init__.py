"""Advantage estimators for trajectories, steps and tokens; the first of an algorithm's five axes.

The expected gradient of each, compared with grad J = E[R grad log pi] (verified by `make certificates`):

    constant, ema_baseline, scst, leave_one_out    unbiased: the baseline is independent of the sample
    group, batch          (1 - 1/k) grad J: the mean of k samples includes the sample's own reward
    group with norm_std   another objective: with k = 2, the probability of beating another sample
    reinforce_pp          the direction of `group`, scaled by a deviation that depends on the sample
    opo                   as `group` for equal lengths; otherwise biased by length
    prime                 grad J of outcome and process rewards, less mean process reward x grad E[L]
    gae, td_lambda, n_step, segment_gae    unbiased for exact values; with lam=1, or n >= T, for any values
    monte_carlo           unbiased for any values
"""

from novarl.algos.advantages.baselines import (
    batch as batch,
    constant_baseline as constant_baseline,
    ema_baseline as ema_baseline,
    group as group,
    leave_one_out as leave_one_out,
    opo as opo,
    reinforce_pp as reinforce_pp,
    remax as remax,
    scst as scst,
    whiten as whiten,
    zero_variance_groups as zero_variance_groups,
)
from novarl.algos.advantages.process import prime as prime
from novarl.algos.advantages.segments import segment_gae as segment_gae
from novarl.algos.advantages.temporal import (
    clipped_is as clipped_is,
    gae as gae,
    monte_carlo as monte_carlo,
    n_step as n_step,
    retrace as retrace,
    td_lambda as td_lambda,
    vtrace as vtrace,
)
