"""Losses for reward models: on the output of a scalar head, or on the log-ratio of a language model.

Rewards are per answer: the scalar at its last token, or beta (log pi(y | x) - log pi_ref(y | x)) summed over its tokens
(https://arxiv.org/abs/2412.01981), which also gives a reward for every step; see `implicit_prm`.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from novarl.algos.preference_losses import kto_unpaired


def bt(
    chosen_reward: Tensor,
    rejected_reward: Tensor,
    *,
    margin: Tensor | None = None,
    centring: float = 0.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log sigma(r_w - r_l - m) + centring (r_w + r_l)^2, all [pairs] -> [pairs].

    The Bradley-Terry likelihood (https://arxiv.org/abs/2203.02155). `margin` m requires a larger difference for a
    stronger preference (https://arxiv.org/abs/2307.09288, eq. 2). The loss is invariant to a constant shift;
    `centring`, such as 0.01, moves the mean reward to 0 (https://arxiv.org/abs/2312.09244). `label_smoothing` e assumes
    that the sides are swapped with probability e: (1 - e) loss(w, l) + e loss(l, w).
    """
    difference = chosen_reward - rejected_reward
    demanded = 0.0 if margin is None else margin
    loss = -(1.0 - label_smoothing) * F.logsigmoid(difference - demanded)
    if label_smoothing:
        loss = loss - label_smoothing * F.logsigmoid(-difference - demanded)
    if centring:
        loss = loss + centring * (chosen_reward + rejected_reward).square()
    return loss


def bce(reward: Tensor, label: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """-l log sigma(r) - (1 - l) log sigma(-r), all [rows] -> [rows]; labels l from 0 to 1, including soft labels.

    sigma(r) is the probability of a good answer. `label_smoothing` e assumes that a label is wrong with probability e.
    """
    target = label.to(reward.dtype) * (1.0 - 2.0 * label_smoothing) + label_smoothing
    return F.binary_cross_entropy_with_logits(reward, target, reduction="none")


def implicit_ce(logp: Tensor, ref_logp: Tensor, label: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """`bce` of the reward beta (logp - ref_logp), for answers labelled right or wrong: all [rows] -> [rows]."""
    return bce(beta * (logp - ref_logp), label, label_smoothing=label_smoothing)


def implicit_dpo(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    beta: float,
    margin: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """`bt` of the rewards beta (logp - ref_logp), all [pairs] -> [pairs]: DPO as a reward model."""
    chosen, rejected = beta * (chosen_logp - ref_chosen_logp), beta * (rejected_logp - ref_rejected_logp)
    return bt(chosen, rejected, margin=margin, label_smoothing=label_smoothing)


def implicit_kto(
    logp: Tensor,
    ref_logp: Tensor,
    label: Tensor,
    kl: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """`preference_losses.kto_unpaired` as a reward model: all [rows] -> [rows]."""
    return kto_unpaired(
        logp,
        ref_logp,
        label,
        kl,
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )
