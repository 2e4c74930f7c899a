"""Golden numbers, extremes and the table of the losses on preferences; their gradients: tests/certificates."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from novarl.algos.preference_losses import (
    LOSSES,
    implicit_rewards,
    kto_point,
    kto_unpaired,
    margins,
    preferred,
    robust,
)

COLUMNS = ([-2.0, -1.0], [-3.0, -4.0], [-2.5, -1.0], [-2.0, -2.0])
"""log pi and log ref of two pairs: h = 0.5 and -1, then 0 and -2; D = 1.5 and 2."""
LENGTHS = {"chosen_length": torch.tensor([2, 1]), "rejected_length": torch.tensor([4, 2])}


def column(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def columns(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [column(*values, dtype=dtype) for values in COLUMNS]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def odds(logp: float) -> float:
    return math.exp(logp) / (1 - math.exp(logp))


GOLDEN: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "sigmoid": ("sigmoid", {}, [softplus(-0.75), softplus(-1.0)]),
    "sigmoid, smoothed": (
        "sigmoid",
        {"label_smoothing": 0.1},
        [0.9 * softplus(-0.75) + 0.1 * softplus(0.75), 0.9 * softplus(-1.0) + 0.1 * softplus(1.0)],
    ),
    "ipo": ("ipo", {}, [(1.5 - 1) ** 2, (2 - 1) ** 2]),
    "ipo, per token": ("ipo", LENGTHS, [(0.25 + 0.25 - 1) ** 2, (0.0 + 1.0 - 1) ** 2]),
    "dpop": ("dpop", {"penalty": 50.0}, [softplus(-0.75), softplus(-1.0)]),
    "robust": (
        "robust",
        {"label_smoothing": 0.2},
        [(0.8 * softplus(-x) - 0.2 * softplus(x)) / 0.6 for x in (0.75, 1.0)],
    ),
    "hinge": ("hinge", {}, [0.25, 0.0]),
    "simpo": ("simpo", {"gamma": 0.3, **LENGTHS}, [softplus(0.3 + 0.125), softplus(0.3 - 0.5)]),
    "orpo": (
        "orpo",
        LENGTHS,
        [
            1.0 + 0.5 * math.log1p(odds(-0.75) / odds(-1.0)),
            1.0 + 0.5 * math.log1p(odds(-2.0) / odds(-1.0)),
        ],
    ),
    "kto": (
        "kto",
        {"kl": 0.5, "desirable_weight": 2.0},
        [0.5 * (2 / 2 + 1 / (1 + math.exp(0.75))), 0.5 * (2 / (1 + math.exp(-0.25)) + 1 / (1 + math.exp(1.25)))],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str) -> None:
    """beta 1/2."""
    loss, options, expected = GOLDEN[name]
    assert LOSSES[loss].function(*columns(), beta=0.5, **options).tolist() == pytest.approx(expected, abs=1e-12)


def test_dpop_charges_for_a_chosen_answer_that_falls() -> None:
    """h = -0.1 and -1: D = 0.9, less 50 times 0.1."""
    falling = [column(-2.1), column(-3.0), column(-2.0), column(-2.0)]
    loss = LOSSES["dpop"].function
    assert loss(*falling, beta=1.0, penalty=50.0).item() == pytest.approx(softplus(-(0.9 - 5.0)))
    assert loss(*falling, beta=1.0, penalty=0.0).item() == pytest.approx(softplus(-0.9))


def test_the_table_says_what_the_functions_take() -> None:
    for name, entry in LOSSES.items():
        parameters = inspect.signature(entry.function).parameters
        assert list(parameters)[:4] == ["chosen_logp", "rejected_logp", "ref_chosen_logp", "ref_rejected_logp"], name
        keywords = {key for key, value in parameters.items() if value.kind is value.KEYWORD_ONLY}
        assert keywords == {"beta"} | entry.options | (set(LENGTHS) if entry.lengths else set()), name
        assert (parameters["ref_chosen_logp"].default is not None) == entry.reference, name


@pytest.mark.parametrize("name", LOSSES)
def test_dtype_and_shape_are_kept_and_beta_is_enough(name: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        found = LOSSES[name].function(*columns(dtype), beta=0.5)
        assert found.dtype == dtype and found.shape == (2,)


@pytest.mark.parametrize("name", [name for name, entry in LOSSES.items() if not entry.reference])
def test_a_loss_without_a_reference_reads_none(name: str) -> None:
    chosen, rejected, *reference = columns()
    function = LOSSES[name].function
    assert torch.equal(function(chosen, rejected, beta=0.5), function(chosen, rejected, *reference, beta=0.5))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1.0, 300.0, 3e4])
def test_no_size_of_log_probability_overflows(name: str, size: float) -> None:
    """Two answers far apart, each way round: a log of a sigmoid that rounds to 0 would give infinity, or NaN."""
    chosen = column(-size, 0.0, -size, dtype=torch.float32).requires_grad_()
    rejected = column(0.0, -size, -size, dtype=torch.float32).requires_grad_()
    reference = column(-1.0, -1.0, -1.0, dtype=torch.float32)
    loss = LOSSES[name].function(chosen, rejected, reference, reference, beta=1.0)
    gradients = torch.autograd.grad(loss.sum(), [chosen, rejected])
    assert loss.isfinite().all() and all(gradient.isfinite().all() for gradient in gradients)
    if name in ("sigmoid", "robust", "dpop", "simpo"):
        assert gradients[0][0] < -0.5, "a wrong order still pulls"


@given(st.floats(-50, 50), st.floats(0, 0.49))
def test_robust_is_unbiased_under_flips(difference: float, flips: float) -> None:
    zero = column(0.0)
    right = robust(column(difference), zero, zero, zero, beta=1.0, label_smoothing=flips)
    wrong = robust(zero, column(difference), zero, zero, beta=1.0, label_smoothing=flips)
    expected = (1 - flips) * right + flips * wrong
    assert expected.item() == pytest.approx(max(0.0, -difference) + softplus(-abs(difference)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("flips", [0.5, -0.1, 1.0])
def test_robust_refuses_labels_that_say_nothing(flips: float) -> None:
    with pytest.raises(ValueError, match=r"below 0\.5"):
        robust(*columns(), beta=1.0, label_smoothing=flips)


def test_kto_comes_apart() -> None:
    """The mean over pairs is the mean over their rows, for any weights and point."""
    chosen, rejected, ref_chosen, ref_rejected = columns()
    options: dict[str, Any] = {"beta": 0.3, "desirable_weight": 1.4, "undesirable_weight": 0.6}
    pairs = LOSSES["kto"].function(chosen, rejected, ref_chosen, ref_rejected, kl=0.2, **options)
    rows = kto_unpaired(
        torch.cat([chosen, rejected]), torch.cat([ref_chosen, ref_rejected]), column(1, 1, 0, 0), 0.2, **options
    )
    assert pairs.mean().item() == pytest.approx(rows.mean().item(), rel=1e-14)


def test_no_gradient_passes_through_the_point_of_reference() -> None:
    logp, ref = column(-1.0, -2.0).requires_grad_(), column(-2.0, -2.5)
    point = kto_point(logp, ref)
    assert point.item() == 0.75 and not point.requires_grad
    assert kto_point(ref, logp).item() == 0.0, "never below 0"
    live = (logp - ref).mean()
    (through,) = torch.autograd.grad(kto_unpaired(logp, ref, column(1, 0), live, beta=1.0).sum(), logp)
    (expected,) = torch.autograd.grad(kto_unpaired(logp, ref, column(1, 0), 0.75, beta=1.0).sum(), logp)
    assert torch.equal(through, expected)


def test_rewards_margins_and_ties() -> None:
    logp, ref = column(-1.0, -2.0, -3.0).requires_grad_(), column(-2.0, -2.0, -2.0)
    reward = implicit_rewards(logp, ref, beta=0.5)
    assert reward.tolist() == [0.5, 0.0, -0.5] and not reward.requires_grad
    assert margins(reward, reward.flip(0)).tolist() == [1.0, 0.0, -1.0]
    assert preferred(reward, reward.flip(0)).tolist() == [1.0, 0.0, 0.0], "a tie is not preferred"
    assert implicit_rewards(ref, ref, beta=0.5).eq(0).all()


def test_dpop_charges_nobody_for_rounding() -> None:
    """Where training begins, the policy is the reference, as nearly as two passes agree: the gradient is DPO's."""
    reference = torch.tensor([-250.0, -250.0, -3.0, -0.0])
    off = torch.tensor([-1e-4, 1e-4, -1e-6, 0.0])

    def gradient(loss: str) -> Tensor:
        chosen = (reference + off).requires_grad_()
        losses = LOSSES[loss].function(chosen, reference - 1.0, reference, reference - 1.0, beta=0.1)
        return torch.autograd.grad(losses.sum(), chosen)[0]

    torch.testing.assert_close(gradient("dpop"), gradient("sigmoid"), rtol=1e-4, atol=0.0)
