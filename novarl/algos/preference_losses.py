"""Losses on preference pairs: direct preference optimization and related methods.

Every paired loss is called as

    loss(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp, *, beta, ...) -> [pairs], to be minimised

with log pi(y | x) of each answer summed over its tokens (without the prompt), all [pairs], in nats. Write h = log pi(y
| x) - log pi_ref(y | x) for the log-ratio of an answer, D = h_chosen - h_rejected for that of a pair, and |y| for the
number of tokens of an answer. Reference-free losses ignore the reference arguments. `LOSSES` lists all of them.

TRL 1.16.0 computes the same for sigmoid (without label smoothing, which it removed), hinge, robust, ipo with lengths
and kto_unpaired. Differences: the likelihood term of its orpo includes the prompt's tokens and is a mean over all
tokens of the batch; its simpo is `cpo` with cpo_alpha 0 and the same lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROUNDING = 64.0
"""Tolerated difference between two passes over the same weights, in ulps of an answer's log-likelihood."""


def sigmoid(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-(1 - e) log sigma(beta D) - e log sigma(-beta D): DPO (https://arxiv.org/abs/2305.18290).

    The Bradley-Terry likelihood of the preferences with the reward beta h. `label_smoothing` e assumes that labels are
    wrong with probability e ("conservative DPO"): the minimum is at sigma(beta D) = 1 - e.
    """
    logits = beta * _contrast(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return _smoothed(logits, label_smoothing)


def ipo(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    beta: float,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
) -> Tensor:
    """(D - 1 / (2 beta))^2: IPO (https://arxiv.org/abs/2310.12036, eq. 17, where beta is called tau).

    Its optimum is a finite margin even if all preferences agree. With lengths each side's h is divided by its length,
    so the margin is per token and does not grow with the answer, as in the authors' experiments and in TRL.
    """
    chosen = _per_token(chosen_logp - ref_chosen_logp, chosen_length)
    rejected = _per_token(rejected_logp - ref_rejected_logp, rejected_length)
    return (chosen - rejected - 1.0 / (2.0 * beta)).square()


def dpop(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    beta: float,
    penalty: float = 50.0,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log sigma(beta (D - penalty max(0, -h_chosen))): DPO-positive (https://arxiv.org/abs/2402.13228).

    DPO can increase D by making both answers less likely; this penalises every nat by which the chosen one falls below
    the reference. `penalty` is the paper's lambda, `label_smoothing` as in `sigmoid`. Differences within rounding are
    ignored, because training begins at the reference, where rounding would decide which pairs are penalised.
    """
    fall = ref_chosen_logp - chosen_logp
    fall = torch.where(fall > ROUNDING * torch.finfo(fall.dtype).eps * ref_chosen_logp.abs(), fall, 0.0)
    contrast = _contrast(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    return _smoothed(beta * (contrast - penalty * fall), label_smoothing)


def robust(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """(-(1 - e) log sigma(beta D) + e log sigma(-beta D)) / (1 - 2e): robust DPO (https://arxiv.org/abs/2403.00409).

    If labels are flipped with probability `label_smoothing` e, its expectation over the flips is the loss of the true
    labels: unbiased, whereas `sigmoid` is conservative. Raises ValueError unless 0 <= e < 1/2.
    """
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"robust needs a label_smoothing from 0 to below 0.5, got {label_smoothing}")
    logits = beta * _contrast(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp)
    kept, flipped = (1.0 - label_smoothing) * F.logsigmoid(logits), label_smoothing * F.logsigmoid(-logits)
    return (flipped - kept) / (1.0 - 2.0 * label_smoothing)


def hinge(
    chosen_logp: Tensor, rejected_logp: Tensor, ref_chosen_logp: Tensor, ref_rejected_logp: Tensor, *, beta: float
) -> Tensor:
    """max(0, 1 - beta D): SLiC's hinge on DPO's margin (https://arxiv.org/abs/2309.06657)."""
    return F.relu(1.0 - beta * _contrast(chosen_logp, rejected_logp, ref_chosen_logp, ref_rejected_logp))


def simpo(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor | None = None,
    ref_rejected_logp: Tensor | None = None,
    *,
    beta: float,
    gamma: float = 0.5,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log sigma(beta (log pi(y_w) / |y_w| - log pi(y_l) / |y_l|) - gamma): SimPO (https://arxiv.org/abs/2405.14734).

    Reference-free: the reward is beta times the mean log-probability per token, with a target margin `gamma`. Without
    lengths the log-probabilities are assumed to be means already.
    """
    chosen, rejected = _per_token(chosen_logp, chosen_length), _per_token(rejected_logp, rejected_length)
    return _smoothed(beta * (chosen - rejected) - gamma, label_smoothing)


def orpo(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor | None = None,
    ref_rejected_logp: Tensor | None = None,
    *,
    beta: float,
    chosen_length: Tensor | None = None,
    rejected_length: Tensor | None = None,
) -> Tensor:
    """-log p_w - beta log sigma(log odds(p_w) - log odds(p_l)): ORPO (https://arxiv.org/abs/2403.07691).

    p = exp(log pi(y) / |y|) is the geometric mean of an answer's token probabilities and odds(p) = p / (1 - p): the
    likelihood of the chosen answer plus, weighted by `beta` (the paper's lambda), the odds ratio. Reference-free.
    Without lengths the log-probabilities are assumed to be per token already.
    """
    chosen, rejected = _per_token(chosen_logp, chosen_length), _per_token(rejected_logp, rejected_length)
    return -chosen - beta * F.logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def kto(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    beta: float,
    kl: Tensor | float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Half the sum of `kto_unpaired` over both sides: the mean over pairs equals the mean over the separate rows."""
    weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
    good, bad = torch.ones_like(chosen_logp), torch.zeros_like(rejected_logp)
    chosen = kto_unpaired(chosen_logp, ref_chosen_logp, good, kl, beta=beta, **weights)
    rejected = kto_unpaired(rejected_logp, ref_rejected_logp, bad, kl, beta=beta, **weights)
    return 0.5 * (chosen + rejected)


def kto_unpaired(
    logp: Tensor,
    ref_logp: Tensor,
    label: Tensor,
    kl: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO on answers labelled good or bad (https://arxiv.org/abs/2402.01306, eq. 7), all [rows] -> [rows].

        desirable (label 1):     w_d (1 - sigma(beta (h - kl)))
        undesirable (label 0):   w_u (1 - sigma(beta (kl - h)))

    Following prospect theory, the value of an answer is a saturating function of its distance from a reference point.
    That point is `kl`, the estimate max(0, mean of h over answers to other prompts) of KL(pi || pi_ref), without
    gradient.
    """
    point = kl.detach() if isinstance(kl, Tensor) else kl
    distance = beta * (logp - ref_logp - point)
    # 1 - sigma(x) = sigma(-x), without the cancellation.
    desirable, undesirable = torch.sigmoid(-distance), torch.sigmoid(distance)
    return torch.where(label > 0.5, desirable_weight * desirable, undesirable_weight * undesirable)


def kto_point(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """KTO's reference point, a scalar: max(0, mean h) over answers [rows] to other prompts; no gradient."""
    return (logp - ref_logp).detach().mean().clamp(min=0.0)


def implicit_rewards(logp: Tensor, ref_logp: Tensor, *, beta: float) -> Tensor:
    """beta (log pi - log pi_ref), no gradient: the reward for which the policy is optimal, up to a constant per prompt,
    which cancels in comparisons."""
    return beta * (logp - ref_logp).detach()


def margins(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """The reward margin of the chosen answer [pairs]."""
    return chosen_reward - rejected_reward


def preferred(chosen_reward: Tensor, rejected_reward: Tensor) -> Tensor:
    """1 if the chosen reward is strictly higher [pairs], else 0 (ties too, as in RewardBench). The mean is the
    accuracy."""
    return (chosen_reward > rejected_reward).to(chosen_reward.dtype)


@dataclass(frozen=True, slots=True)
class PairLoss:
    """A paired loss, whether it uses the reference, whether it takes `chosen_length` and `rejected_length`, and its
    keywords besides `beta`."""

    function: Callable[..., Tensor]
    reference: bool
    lengths: bool
    options: frozenset[str]


LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": PairLoss(sigmoid, reference=True, lengths=False, options=frozenset({"label_smoothing"})),
    "ipo": PairLoss(ipo, reference=True, lengths=True, options=frozenset()),
    "dpop": PairLoss(dpop, reference=True, lengths=False, options=frozenset({"penalty", "label_smoothing"})),
    "robust": PairLoss(robust, reference=True, lengths=False, options=frozenset({"label_smoothing"})),
    "hinge": PairLoss(hinge, reference=True, lengths=False, options=frozenset()),
    "simpo": PairLoss(simpo, reference=False, lengths=True, options=frozenset({"gamma", "label_smoothing"})),
    "orpo": PairLoss(orpo, reference=False, lengths=True, options=frozenset()),
    "kto": PairLoss(
        kto, reference=True, lengths=False, options=frozenset({"kl", "desirable_weight", "undesirable_weight"})
    ),
}
"""All paired losses by their name in `novarl dpo loss=`."""


def _contrast(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """D. Each side is compared with its reference first: those differences are small, unlike the sums over answers."""
    return (chosen - ref_chosen) - (rejected - ref_rejected)


def _per_token(value: Tensor, length: Tensor | None) -> Tensor:
    return value if length is None else value / length.to(value.dtype)


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigma(z) - e log sigma(-z)."""
    loss = -F.logsigmoid(logits)
    return loss if label_smoothing == 0.0 else loss + label_smoothing * logits


def _log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of p = exp(logp), accurate for p near 0 and 1.

    A probability that rounds to 1 is replaced by the next smaller number, without gradient.
    """
    below_one = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    near = below_one > -math.log(2.0)
    # Each branch gets a safe argument; otherwise its unused gradient would be NaN.
    log_rest = torch.where(
        near,
        torch.log(-torch.expm1(torch.where(near, below_one, -1.0))),
        torch.log1p(-torch.exp(torch.where(near, -1.0, below_one))),
    )
    return below_one - log_rest
