"""Importance weights for tokens sampled from mu, if it differs from the learner's initial policy pi_old.

The two differ numerically (another engine or dtype) or by age (stale weights). The weight is always pi_old / mu; the
ratio since the first update, pi / pi_old, is handled by the surrogate. A weight multiplies the surrogate, not the
regularizers. With rho_t = pi_old(token_t) / mu(token_t):

    weight                     of a token                                              exact, without bounds, for
    truncated_weight           min(rho_t, maximum)                                     answers of one token
    masked_weight              rho_t if low <= rho_t <= high, else 0 (IcePop)          answers of one token
    sequence_truncated_weight  min(rho, maximum), rho = product of its rho_t           any answers
    sequence_masked_weight     rho if low <= rho <= high, else 0                       any answers

and with `geometric`, rho = (product of its rho_t)^(1/length), which is not exact but does not explode with length. Each
is [N] or [S, T] like its arguments, 0 outside the mask, without gradient. `sequence` holds int64 ids of the shape of
old_logp; None means the rows of [S, T], and raises ValueError for [N]. `make certificates` shows the effect on the
expected update, and compares bias and variance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from novarl.algos import aggregate


def truncated_weight(old_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, maximum: float) -> Tensor:
    """min(pi_old(token_t) / mu(token_t), maximum) per token; 0 outside the mask; carries no gradient.

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl). It corrects each token's distribution but
    not that of its prefix: exact for answers of one token without truncation, otherwise biased, with a variance that
    does not grow with length. It multiplies the surrogate, not the regularizers.
    """
    return _where(mask, _ratio(old_logp, behavior_logp, mask).clamp(max=maximum))


def masked_weight(old_logp: Tensor, behavior_logp: Tensor, mask: Tensor, *, low: float, high: float) -> Tensor:
    """pi_old(token_t) / mu(token_t) where it lies within [low, high], else 0: the token is left out.

    IcePop (https://arxiv.org/abs/2510.18855), with its bounds. Large differences are more often numerical errors than
    information, so the token is dropped instead of capped. TRL 1.16 calls it "token_mask".
    """
    return _where(mask, _within(_ratio(old_logp, behavior_logp, mask), low, high))


def sequence_truncated_weight(
    old_logp: Tensor,
    behavior_logp: Tensor,
    mask: Tensor,
    *,
    sequence: Tensor | None = None,
    maximum: float,
    geometric: bool = False,
) -> Tensor:
    """min(rho, maximum) at every token of a sequence, rho = pi_old(sequence) / mu(sequence).

    Without truncation it is unbiased for any length, but its variance grows exponentially with it. `geometric` takes
    the length-th root. TRL 1.16 calls it "sequence_truncate", without the root.
    """
    ratio = _sequence_ratio(old_logp, behavior_logp, mask, sequence, geometric=geometric)
    return _where(mask, ratio.clamp(max=maximum))


def sequence_masked_weight(
    old_logp: Tensor,
    behavior_logp: Tensor,
    mask: Tensor,
    *,
    sequence: Tensor | None = None,
    low: float,
    high: float,
    geometric: bool = False,
) -> Tensor:
    """rho at every token of a sequence if it is within [low, high], else 0: the sequence is dropped.

    Masked importance sampling over sequences (https://richardli.xyz/rl-collapse). `geometric` takes the length-th root.
    TRL 1.16 calls it "sequence_mask", without the root.
    """
    ratio = _sequence_ratio(old_logp, behavior_logp, mask, sequence, geometric=geometric)
    return _where(mask, _within(ratio, low, high))


def staleness(version: Tensor, current: int, mask: Tensor) -> Tensor:
    """Mean of current - version_t over the masked tokens, 0-d, in weight versions; 0 without tokens.

    version int64: of the weights that sampled the token; current: of the trained weights. 0 on-policy.
    """
    return torch.where(mask, current - version, 0).sum() / mask.sum().clamp(min=1)


def effective_sample_size(weight: Tensor, mask: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2) over the n masked entries, 0-d: the effective fraction of samples under the weights.

    1 if all weights are equal, 1/n if one dominates, 0 without entries.
    """
    chosen = weight[mask]
    total = chosen.numel() * chosen.square().sum()
    return torch.where(total > 0, chosen.sum().square() / total, 0.0)


def _ratio(old_logp: Tensor, behavior_logp: Tensor, mask: Tensor) -> Tensor:
    return _where(mask, old_logp - behavior_logp).detach().exp()


def _sequence_ratio(
    old_logp: Tensor, behavior_logp: Tensor, mask: Tensor, sequence: Tensor | None, *, geometric: bool
) -> Tensor:
    """The ratio of the whole sequence, at each of its tokens."""
    log_ratio = _where(mask, old_logp - behavior_logp).detach()
    total, index = aggregate.per_sequence(log_ratio, mask, sequence)
    if geometric:
        length, _ = aggregate.per_sequence(torch.ones_like(log_ratio), mask, sequence)
        total = total / length.clamp(min=1)
    return total[index].exp()


def _within(ratio: Tensor, low: float, high: float) -> Tensor:
    return _where((ratio >= low) & (ratio <= high), ratio)


def _where(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)
