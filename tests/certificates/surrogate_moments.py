"""Bias and variance of the corrections beside one another, by enumeration, for the report of the certificates."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.certificates import exact, losses
from tests.certificates.certificate import CAP, LONG
from tests.certificates.expected import Loss, ascent
from tests.certificates.surrogate_cases import ROOT_BAND, SEQUENCE_BAND, TOKEN_BAND, corrected_loss
from tests.certificates.world import World

NO_CAP = {"maximum": 1e9}
CAPPED = {"maximum": CAP}
CORRECTIONS: dict[str, Loss] = {
    "none": losses.policy_loss(losses.none),
    "token, no cap": corrected_loss("truncated_weight", bounds=NO_CAP),
    "token, at most 1.1": corrected_loss("truncated_weight", bounds=CAPPED),
    "token, 0 outside [0.75, 1.2] (IcePop)": corrected_loss("masked_weight", bounds=TOKEN_BAND),
    "sequence, no cap": corrected_loss("sequence_truncated_weight", bounds=NO_CAP, by_sequence=True),
    "sequence, at most 1.1": corrected_loss("sequence_truncated_weight", bounds=CAPPED, by_sequence=True),
    "sequence, 0 outside [0.8, 1.1]": corrected_loss("sequence_masked_weight", bounds=SEQUENCE_BAND, by_sequence=True),
    "sequence, geometric, at most 1.1": corrected_loss(
        "sequence_truncated_weight", bounds=CAPPED, by_sequence=True, geometric=True
    ),
    "sequence, geometric, 0 outside [0.88, 1.06]": corrected_loss(
        "sequence_masked_weight", bounds=ROOT_BAND, by_sequence=True, geometric=True
    ),
}
HEADER = ["correction of answers that mu sampled", "bias", "variance"]


def moments(world: World, loss: Loss) -> tuple[float, float]:
    """(|E g - grad J| / |grad J|, E|g - E g|^2 / |grad J|^2) of the direction g that one answer of `behavior` gives."""
    chance, truth = exact.fixed(world, world.behavior), exact.objective_gradient(world, world.reward)
    each = torch.stack([_direction(world, loss, reward) for reward in world.reward])
    mean = chance @ each
    variance = chance @ (each - mean).square().sum(1)
    return float((mean - truth).norm() / truth.norm()), float(variance / truth.square().sum())


def _direction(world: World, loss: Loss, reward: Tensor) -> Tensor:
    """Of the one answer that has this reward; no two have the same."""
    return ascent(world, 1, loss, admitted=lambda batch: bool(batch.reward == reward))


def rows() -> list[list[str]]:
    """One for each correction, under HEADER."""
    return [[name, *(f"{value:.3f}" for value in moments(LONG, loss))] for name, loss in CORRECTIONS.items()]
