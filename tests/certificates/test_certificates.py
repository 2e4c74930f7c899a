"""Every estimator, surrogate, correction, regularizer and aggregation against exact enumeration, and planted faults."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch

from novarl.algos import (
    advantages,
    aggregate,
    calibration,
    implicit_prm,
    kl,
    off_policy,
    preference_losses as preference,
    reward_modeling,
    surrogates,
)
from novarl.control import constraints, objectives
from novarl.kernels import logprobs
from tests.certificates import (
    constraint_exact,
    exact,
    expected,
    losses,
    objective_exact,
    preference_exact,
    rows_exact,
    temporal_exact,
    temporal_group_exact,
    truncation_exact,
    world,
)
from tests.certificates.cases import CERTIFICATES
from tests.certificates.certificate import BINARY, CLIP, COLD, LONG, MIDDLE, SHORT, TOLERANCE, Certificate
from tests.certificates.faults import FAULTS, Fault
from tests.certificates.truncation_cases import ALL, K, P

ZERO = {"k1 as loss"}
"""Certificates whose claim is that there is nothing."""
NO_GRADIENT = {"off_policy.effective_sample_size", "off_policy.staleness", "logprobs.logits_logprobs"}
"""Functions that no update goes through: diagnostics, and the definition that tests compare with."""


@pytest.mark.parametrize("case", CERTIFICATES.values(), ids=CERTIFICATES)
def test_certificate(case: Certificate) -> None:
    assert case.error() <= TOLERANCE
    assert (float(case.exact().detach().abs().max()) < 1e-3) == (case.name in ZERO), (
        "a claim about nothing certifies nothing"
    )


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.where}: {fault.name} [{fault.caught_by}]" for fault in FAULTS])
def test_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault.module, fault.function, fault.plant(getattr(fault.module, fault.function)))
    assert CERTIFICATES[fault.caught_by].error() > 1e4 * TOLERANCE


def test_every_public_function_has_a_fault_planted() -> None:
    public = {
        f"{module.__name__.rsplit('.', 1)[-1]}.{name}"
        for module in (
            *(advantages, aggregate, calibration, constraints, implicit_prm, kl, logprobs),
            *(objectives, off_policy, preference, reward_modeling, surrogates),
        )
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_")
        if f"{value.__module__}.".startswith(f"{module.__name__}.")  # a module's own, and a package's
    }
    public |= {"guard.backtrack", "guard.early_stop"}  # of a module that has classes of its own beside them
    assert public - NO_GRADIENT == {fault.where for fault in FAULTS if inspect.ismodule(fault.module)}


def test_the_exact_side_does_not_import_the_library() -> None:
    for module in (
        *(constraint_exact, exact, objective_exact, preference_exact),
        *(rows_exact, temporal_exact, temporal_group_exact, truncation_exact, world),
    ):
        tree = ast.parse(inspect.getsource(module))
        imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert "torch" in imported
        assert not [name for name in imported if name.startswith("novarl")]


@pytest.mark.parametrize("here", [LONG, MIDDLE, SHORT, BINARY, COLD])
def test_a_world_is_complete_and_uneven(here: world.World) -> None:
    """Everything that can be said is listed once, and nothing is nearly certain or nearly impossible."""
    p = exact.fixed(here, here.policy)
    assert len(set(here.answers)) == len(here.answers)
    torch.testing.assert_close(p.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert p.max() < 0.8 and p.max() > 2 * p.min()
    assert here.reward.unique().numel() > 1


@pytest.mark.parametrize(("here", "rule"), [(LONG, K), (COLD, P), (LONG, ALL)])
def test_a_truncation_cuts_and_its_gradient_is_that_of_finite_differences(
    here: world.World, rule: truncation_exact.Rule
) -> None:
    """With the rule applied anew at either side: that the support is held fixed loses nothing."""
    sizes = {len(kept) for kept in truncation_exact.supports(here, rule).values()}
    assert min(sizes) < 3, "nothing is cut"
    exact_gradient = truncation_exact.reward_gradient(here, rule)
    for seed in range(3):
        direction = torch.randn(len(exact_gradient), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        measured = truncation_exact.difference(here, rule, direction)
        assert measured == pytest.approx(float(exact_gradient @ direction), abs=1e-8)


def test_both_clips_are_active_in_the_off_policy_certificate() -> None:
    ratio, reward = (
        exact.ratios(LONG, LONG.policy, LONG.old),
        LONG.reward[:, None],
    )
    low, high = CLIP
    assert ((ratio > 1 + high) & (reward > 0)).any() and ((ratio < 1 - low) & (reward < 0)).any()
    assert ((ratio > 1 + low) & (ratio < 1 + high) & (reward > 0)).any(), "clip-higher would change nothing"


def test_k1_as_a_loss_is_noise() -> None:
    """It has no gradient on average, yet one in every sample: the certificate of its zero is not vacuous."""
    batch_losses = losses.kl_loss("k1")
    packed = expected.pack(LONG)
    logp, entropy = expected.token_logp(packed, LONG.policy)
    reference, _ = expected.token_logp(packed, LONG.reference)
    span = torch.tensor(packed.spans[0])
    one = expected.Minibatch(
        *[
            column[span]
            for column in (logp, entropy, logp.detach(), logp.detach(), reference.detach(), packed.mask, packed.state)
        ],
        torch.zeros(len(span), dtype=torch.int64),
        *[torch.zeros(1, dtype=torch.float64)] * 2,
        torch.zeros(1, dtype=torch.int64),
    )
    (gradient,) = torch.autograd.grad(batch_losses(one), LONG.policy.head)
    assert gradient.abs().max() > 1e-2
