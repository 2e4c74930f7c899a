"""Corrections for tokens that another distribution sampled: mu, the sampler's, where the learner starts from pi_old.

They differ by numerics (another engine, another dtype) or by age (weights that were published late). The weight is
always pi_old / mu: what has happened since the first update, pi / pi_old, is the surrogate's business.
"""

from __future__ import annotations

import torch
from torch import Tensor


def truncated_weight(old_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, maximum: float = 2.0) -> Tensor:
    """min(pi_old(token_t) / mu(token_t), maximum) per token [N]; 0 outside the mask; carries no gradient.

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl). It corrects each token's own distribution
    and leaves its prefix as mu sampled it: exact for answers of one token and no truncation, otherwise biased in return
    for a variance that does not grow with length. It multiplies the surrogate, not the regularizers.
    """
    ratio = torch.where(mask, old_logp - behavior_logp, 0.0).detach().exp()
    return torch.where(mask, ratio.clamp(max=maximum), 0.0)


def effective_sample_size(weight: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over the n masked entries, 0-d: the share of samples that the weights leave effective.

    1 where all weights are equal, 1/n where one outweighs the rest, 0 where there is nothing.
    """
    chosen = weight[mask]
    total = chosen.numel() * chosen.square().sum()
    return torch.where(total > 0, chosen.sum().square() / total, 0.0)
