"""Surrogates: per-token losses whose gradient is a policy gradient.

Each takes (logp, old_logp, advantage, mask), all [N], and returns (loss [N] to be minimised, statistics by name [N]).
logp carries the gradient; old_logp is of the policy before the rollout's first update, the advantage is data. Columns
outside the mask give loss 0 and gradient 0, whatever they hold. What the loss is summed over and divided by is the
business of `aggregate`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reinforce(logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-A_t log pi(token_t): REINFORCE (Williams, 1992, https://doi.org/10.1007/BF00992696).

    Exact where the policy itself sampled the tokens; it does not look at `old_logp`. With A = 1 it is supervised
    fine-tuning. Nothing is ever clipped, so `clip_fraction` is False throughout.
    """
    loss = -torch.where(mask, advantage, 0.0) * torch.where(mask, logp, 0.0)
    return loss, {"clip_fraction": torch.zeros_like(mask)}


def ppo_clip(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t), r_t = pi(token_t) / pi_old(token_t).

    PPO (https://arxiv.org/abs/1707.06347); a larger `clip_high` is DAPO's clip-higher
    (https://arxiv.org/abs/2503.14476). Where r_t = 1 its gradient is that of `reinforce`.

    `clip_fraction`: True where the clip is active and the gradient zero, which is r_t > 1 + clip_high for A_t > 0 and
    r_t < 1 - clip_low for A_t < 0; a ratio beyond a bound that an update may still bring back is not counted.
    """
    # Zeroed before exp: a column outside the mask may hold anything, and inf * 0 would be NaN in the gradient.
    ratio = torch.where(mask, logp - old_logp, 0.0).exp()
    free = ratio * advantage
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage
    loss = torch.where(mask, -torch.minimum(free, clipped), 0.0)
    return loss, {"clip_fraction": mask & (free > clipped).detach()}
