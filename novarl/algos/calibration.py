"""Metrics of scores as a ranking (AUROC), as decisions (accuracy) and as probabilities (ECE, Brier, reliability).

Labels are 1 (good) or 0, scores arbitrary, probabilities from 0 to 1, all [n]. Each function returns a scalar tensor of
the scores' dtype, or NaN if undefined (no rows, or only one class for AUROC).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Reliability(NamedTuple):
    """One entry per bin of predicted probability, all [bins]: its lower `edge`, the number of `rows`, their mean
    prediction (`confidence`) and the fraction of good ones (`frequency`), both 0 in an empty bin."""

    edge: Tensor
    rows: Tensor
    confidence: Tensor
    frequency: Tensor


def accuracy(probability: Tensor, label: Tensor) -> Tensor:
    """The fraction of rows on the right side of 1/2; a prediction of exactly 1/2 counts as wrong."""
    right = torch.where(label > 0.5, probability > 0.5, probability < 0.5)
    return right.to(probability.dtype).mean()


def auroc(score: Tensor, label: Tensor) -> Tensor:
    """P(score of a good row > score of a bad row) + P(equal) / 2: the area under the ROC curve.

    From ranks (Mann and Whitney), with mean ranks for ties:
    (sum of the good rows' ranks - n1 (n1 + 1) / 2) / (n1 n0).
    """
    _, where, count = torch.unique(score, return_inverse=True, return_counts=True)
    last = count.cumsum(0).double()
    rank = (last - (count.double() - 1.0) / 2.0)[where]
    good = label > 0.5
    n_good, n_bad = good.sum().double(), (~good).sum().double()
    area: Tensor = (rank[good].sum() - n_good * (n_good + 1.0) / 2.0) / (n_good * n_bad)
    return area.to(score.dtype)


def brier(probability: Tensor, label: Tensor) -> Tensor:
    """Mean squared error of the probabilities, from 0 (perfect) to 1; 1/4 for a constant 1/2."""
    return (probability - label.to(probability.dtype)).square().mean()


def reliability(probability: Tensor, label: Tensor, *, bins: int = 10) -> Reliability:
    """Rows grouped by predicted probability into `bins` bins of equal width; a probability of 1 is in the last one."""
    which = (probability * bins).long().clamp(0, bins - 1)
    membership = torch.nn.functional.one_hot(which, bins).to(probability.dtype)
    count = membership.sum(0)
    filled = count.clamp(min=1.0)
    return Reliability(
        edge=torch.arange(bins, dtype=probability.dtype, device=probability.device) / bins,
        rows=count.long(),
        confidence=(membership * probability[:, None]).sum(0) / filled,
        frequency=(membership * label.to(probability.dtype)[:, None]).sum(0) / filled,
    )


def ece(probability: Tensor, label: Tensor, *, bins: int = 10) -> Tensor:
    """sum_b (n_b / n) |confidence_b - frequency_b|: expected calibration error (https://arxiv.org/abs/1706.04599).

    With few rows it is well above 0 even for perfect probabilities: about 0.3 sqrt(bins / n) if they are uniform.
    """
    table = reliability(probability, label, bins=bins)
    gap = (table.confidence - table.frequency).abs() * table.rows
    return gap.sum() / probability.numel()
