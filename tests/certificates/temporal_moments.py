"""Bias and variance of the estimators over time, by enumeration, for the report of the certificates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.certificates import exact
from tests.certificates.certificate import CAP, LONG
from tests.certificates.temporal_claims import EPISODE, FAR, grad_j, true_values
from tests.certificates.temporal_layout import answer_logp, estimates, probabilities
from tests.certificates.world import Policy

ON_POLICY: dict[str, tuple[str, dict[str, Any]]] = {
    "gae, lam=0": ("gae", {"lam": 0.0}),
    "gae, lam=0.5": ("gae", {"lam": 0.5}),
    "gae, lam=0.95": ("gae", {"lam": 0.95}),
    "gae, lam=1; monte_carlo": ("gae", {"lam": 1.0}),
    "n_step, n=2": ("n_step", {"n": 2}),
    "segment_gae, lam=0": ("segment_gae", {"lam": 0.0}),
}
OFF_POLICY: dict[str, tuple[str, dict[str, Any]]] = {
    "gae, lam=0.95, no correction": ("gae", {"lam": 0.95}),
    "vtrace": ("vtrace", {}),
    "vtrace, no caps": ("vtrace", {"rho_max": FAR, "c_max": FAR, "pg_rho_max": FAR}),
    "retrace, weighed by pi/mu": ("retrace", {}),
    "retrace, no cap, weighed by pi/mu": ("retrace", {"c_max": FAR}),
    "clipped_is per decision, at most 1.1": ("clipped_is", {"rho_max": CAP}),
    "clipped_is per decision, no clip": ("clipped_is", {"rho_max": FAR}),
    "clipped_is per trajectory, at most 1.1": ("clipped_is", {"rho_max": CAP, "level": "trajectory"}),
    "clipped_is per trajectory, no clip": ("clipped_is", {"rho_max": FAR, "level": "trajectory"}),
}
HEADER = [
    "estimator",
    "answers of",
    *(f"{what}, {values} values" for values in ("exact", "wrong") for what in ("bias", "variance")),
]


def moments(name: str, options: dict[str, Any], *, exact_values: bool, sampler: Policy | None) -> tuple[float, float]:
    """(|E g - grad J| / |grad J|, E|g - E g|^2 / |grad J|^2) of the direction g that one answer gives."""
    advantage, _ = estimates(EPISODE, name, true_values() if exact_values else EPISODE.guess, sampler, **options)
    if name == "retrace" and sampler is not None:
        advantage = advantage * exact.ratios(LONG, LONG.policy, sampler)
    truth, chance = grad_j(), probabilities(EPISODE, sampler)
    each = torch.stack([_direction(row) for row in advantage * answer_logp(EPISODE, LONG.policy)])
    mean = chance @ each
    variance = chance @ (each - mean).square().sum(1)
    return float((mean - truth).norm() / truth.norm()), float(variance / truth.square().sum())


def _direction(row: Tensor) -> Tensor:
    parts = torch.autograd.grad(row.sum(), LONG.policy.parameters, retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def rows() -> list[list[str]]:
    """One for each estimator and sampler, under HEADER."""
    table = []
    for variants, sampler, label in ((ON_POLICY, None, "pi"), (OFF_POLICY, LONG.behavior, "mu")):
        for name, (function, options) in variants.items():
            found = [moments(function, options, exact_values=values, sampler=sampler) for values in (True, False)]
            table.append([name, label, *(f"{number:.3f}" for pair in found for number in pair)])
    return table
