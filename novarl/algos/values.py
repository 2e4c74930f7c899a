"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 per token, and `value_clip_fraction`.

    values [N] carries the gradient; old_values [N] are those of the critic before the rollout's first update; columns
    outside the mask give 0. Without `clip` it is half the squared error. The clip is that of the PPO code
    (https://arxiv.org/abs/1707.06347; evaluated in https://arxiv.org/abs/2005.12729): a value that has already moved by
    more than c in this rollout gets no gradient to move further.
    """
    free = torch.where(mask, values - returns, 0.0).square()
    if clip is None:
        return 0.5 * free, {"value_clip_fraction": torch.zeros_like(mask)}
    near = torch.where(mask, old_values + (values - old_values).clamp(-clip, clip) - returns, 0.0).square()
    return 0.5 * torch.maximum(free, near), {"value_clip_fraction": mask & (near > free).detach()}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(R - V) / Var(R) over the masked entries, 0-d: 1 is a perfect critic, 0 no better than a constant, below 0
    worse. 0 if the returns are constant."""
    target, error = returns[mask], (returns - values)[mask]
    if not target.numel():
        return target.new_zeros(())
    spread = target.var(unbiased=False)
    return torch.where(spread > 0, 1.0 - error.var(unbiased=False) / spread.clamp(min=1e-30), 0.0)
