"""Bias and variance of the baselines beside one another, by enumeration, for the report of the certificates."""

from __future__ import annotations

import torch

from tests.certificates import exact, losses, temporal_groups
from tests.certificates.certificate import MIDDLE, grad_j
from tests.certificates.expected import minibatches
from tests.certificates.losses import Credit

K = 3
BASELINES: dict[str, Credit] = {
    "none": losses.none,
    "constant 0.7": losses.constant,
    "ema of earlier batches, 0.3": losses.ema,
    "greedy answer (scst, remax)": losses.scst,
    "mean of the group": losses.group,
    "mean of the others (leave_one_out)": losses.leave_one_out,
    "length-weighted mean (opo)": temporal_groups.opo,
    "mean, over the deviation (group with norm_std)": losses.group_std,
}
HEADER = ["baseline", "bias", "cosine of E g and grad J", "variance / norm of E g squared"]


def moments(credit: Credit) -> tuple[float, float, float]:
    """(|E g - grad J| / |grad J|, the cosine between them, E|g - E g|^2 / |E g|^2), g the direction of K answers."""
    scores = torch.stack([exact.score_gradient(MIDDLE, one) for one in torch.eye(len(MIDDLE.answers)).double()])
    each, chance = [], []
    for drawn, probability, minibatch in minibatches(MIDDLE, K):
        each.append(credit(minibatch) @ scores[list(drawn)] / K)
        chance.append(probability)
    direction, weight, truth = torch.stack(each), torch.stack(chance), grad_j(MIDDLE)()
    mean = weight @ direction
    variance = weight @ (direction - mean).square().sum(1)
    cosine = torch.cosine_similarity(mean, truth, dim=0)
    return float((mean - truth).norm() / truth.norm()), float(cosine), float(variance / mean.square().sum())


def rows() -> list[list[str]]:
    """One for each baseline, under HEADER."""
    return [[name, *(f"{number:.3f}" for number in moments(credit))] for name, credit in BASELINES.items()]
