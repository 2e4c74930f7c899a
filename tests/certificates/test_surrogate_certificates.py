"""That the certificates of `surrogate_cases` are not vacuous, and what bias and variance the corrections have."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from torch import Tensor

from tests.certificates import exact, surrogate_cases as cases, surrogate_exact, surrogate_moments
from tests.certificates.certificate import CAP, LONG, MIDDLE
from tests.certificates.surrogate_exact import answer_ratio, outside, rooted

GOOD = LONG.reward > 0


def test_the_exact_side_does_not_import_the_library() -> None:
    tree = ast.parse(inspect.getsource(surrogate_exact))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert "torch" in imported and not [name for name in imported if name.startswith("novarl")]


def test_every_bound_of_a_surrogate_is_active() -> None:
    ratio = exact.ratios(LONG, LONG.policy, LONG.old)
    good = GOOD[:, None]
    assert (good & (ratio > cases.HIGH)).any() and (~good & (ratio < cases.LOW)).any()
    high, dual = cases.DUAL_HIGH, cases.DUAL
    assert (good & (ratio > high)).any() and (~good & (ratio > dual)).any()
    assert (~good & (ratio > high) & (ratio < dual)).any(), "the third bound would be the second"
    s = rooted(LONG, answer_ratio(LONG, LONG.policy, LONG.old))
    assert (GOOD & (s > 1.12)).any() and (~GOOD & (s < 0.92)).any() and (~outside(s, 0.92, 1.12)).any()


@pytest.mark.parametrize(
    ("ratio", "band"),
    [
        (exact.ratios(LONG, LONG.policy, LONG.behavior), cases.TOKEN_BAND),
        (answer_ratio(MIDDLE, MIDDLE.policy, MIDDLE.behavior), cases.SEQUENCE_BAND),
        (rooted(MIDDLE, answer_ratio(MIDDLE, MIDDLE.policy, MIDDLE.behavior)), cases.ROOT_BAND),
    ],
    ids=["token", "sequence", "geometric"],
)
def test_every_bound_of_a_weight_is_active(ratio: Tensor, band: dict[str, float]) -> None:
    assert (ratio < band["low"]).any() and (ratio > band["high"]).any() and (ratio > CAP).any()
    assert (~outside(ratio, **band)).any()


def test_bias_and_variance_of_the_corrections() -> None:
    """Only the whole, untruncated ratio has no bias; every bound takes variance away."""
    found = {name: surrogate_moments.moments(LONG, loss) for name, loss in surrogate_moments.CORRECTIONS.items()}
    assert found["sequence, no cap"][0] < 1e-8
    assert all(bias > 1e-3 for name, (bias, _) in found.items() if name != "sequence, no cap")
    assert found["token, no cap"][0] < found["none"][0]
    for level in ("token", "sequence"):
        assert found[f"{level}, at most 1.1"][1] < found[f"{level}, no cap"][1]


def test_the_two_directions_of_kl_differ_where_the_correction_is_certified() -> None:
    """Uncorrected k3 would have another gradient on these answers."""
    backward = exact.per_state_gradient(LONG, "reverse_kl")
    assert (backward - exact.per_state_gradient(LONG, "forward_kl")).abs().max() > 1e-3
    assert (backward - surrogate_exact.visited_kl_gradient(LONG, LONG.old)).abs().max() > 1e-3
    torch.testing.assert_close(surrogate_exact.visited_kl_gradient(LONG, LONG.policy), backward)
