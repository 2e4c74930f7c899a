"""Advantages from per-token rewards combined with an outcome reward: PRIME."""

from __future__ import annotations

import torch
from torch import Tensor

from novarl.algos.advantages.baselines import leave_one_out
from novarl.algos.advantages.steps import Steps, accumulate


def prime(
    token_rewards: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group: Tensor,
    *,
    gamma: float = 1.0,
    process_coef: float = 1.0,
) -> Tensor:
    """Leave-one-out outcome advantage plus returns of leave-one-out process rewards, [R, T] -> [R, T]: PRIME
    (https://arxiv.org/abs/2502.01456).

        A_{i,t} = R_i - mean_{j != i} R_j + process_coef sum_{s >= t} gamma^{s-t} (r_{i,s} - mean_{j != i} m_j)

    token_rewards r [R, T]: rewards of tokens, for example the differences of the log-probs of an implicit reward model
    and its reference; m_j is the mean of answer j's; outcome [R]; group [R], ids as in `leave_one_out`. Only columns in
    the mask [R, T] are read; gaps are not steps, and the result is 0 outside. A trajectory that is alone in its group
    gets 0; one without tokens counts in the mean outcome but not in the mean process reward.

    The outcome baseline is unbiased, but the process baseline is subtracted once for every remaining token, so it
    depends on the length: with gamma=1 the expected gradient is that of E[R] + process_coef (E[sum_t r_t] - E[m] E[L])
    with E[m] held fixed. Answers become shorter if process rewards are positive on average, and longer if they are
    negative. (The paper's code includes the answer's own mean in the baseline, n/(n-1) (r_{i,s} - mean_j m_j), and
    whitens the result over the batch; this function follows the paper's equation; see `whiten`.)
    """
    nothing = torch.zeros_like(token_rewards)
    steps = Steps.of(torch.where(mask, token_rewards, 0.0), nothing, mask, token_rewards.new_zeros(mask.shape[0]))
    same = (group[:, None] == group).to(steps.reward.dtype)
    others = same - torch.eye(len(group), dtype=same.dtype, device=same.device)
    counted = others * mask.any(1)
    mean = steps.reward.sum(1) / mask.sum(1).clamp(min=1)
    baseline = (counted @ mean) / counted.sum(1).clamp(min=1)
    process = accumulate(torch.where(steps.present, steps.reward - baseline[:, None], 0.0), gamma)
    whole = leave_one_out(outcome.to(steps.reward.dtype), group)
    advantage = whole[:, None] + process_coef * process
    alone = others.sum(1) == 0
    return steps.spread(torch.where(alone[:, None], 0.0, advantage), nothing)[0]
