"""Measures of order and calibration against their definitions, counted row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st

from novarl.algos.calibration import accuracy, auroc, brier, ece, reliability

ROWS = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.5, 0.7, 0.99, 1.0]), st.booleans()), min_size=1)


def columns(rows: list[tuple[float, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    scores, labels = zip(*rows, strict=True)
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(labels, dtype=torch.float64)


@given(ROWS)
def test_auroc_is_counted_over_pairs(rows: list[tuple[float, bool]]) -> None:
    wins = [(good > bad) + 0.5 * (good == bad) for good, a in rows if a for bad, b in rows if not b]
    found = auroc(*columns(rows)).item()
    assert math.isnan(found) if not wins else found == pytest.approx(sum(wins) / len(wins), abs=1e-12)


@given(ROWS)
def test_auroc_knows_only_the_order(rows: list[tuple[float, bool]]) -> None:
    score, label = columns(rows)
    torch.testing.assert_close(auroc(score, label), auroc(3 * score.exp() - 7, label), equal_nan=True)
    torch.testing.assert_close(auroc(score, label), 1 - auroc(-score, label), equal_nan=True)


@given(ROWS, st.integers(1, 12))
def test_ece_is_counted_over_bins(rows: list[tuple[float, bool]], bins: int) -> None:
    expected = 0.0
    for b in range(bins):
        inside = [(p, y) for p, y in rows if min(int(p * bins), bins - 1) == b]
        if inside:
            confidence = sum(p for p, _ in inside) / len(inside)
            frequency = sum(y for _, y in inside) / len(inside)
            expected += len(inside) / len(rows) * abs(confidence - frequency)
    assert ece(*columns(rows), bins=bins).item() == pytest.approx(expected, abs=1e-12)
    assert reliability(*columns(rows), bins=bins).rows.sum() == len(rows)


@given(ROWS)
def test_brier_and_accuracy(rows: list[tuple[float, bool]]) -> None:
    assert brier(*columns(rows)).item() == pytest.approx(sum((p - y) ** 2 for p, y in rows) / len(rows), abs=1e-12)
    right = [(p > 0.5) == y and p != 0.5 for p, y in rows]
    assert accuracy(*columns(rows)).item() == pytest.approx(sum(right) / len(rows))


def test_perfect_probabilities_are_calibrated() -> None:
    generator = torch.Generator().manual_seed(0)
    probability = torch.rand(100_000, generator=generator, dtype=torch.float64)
    label = (torch.rand(100_000, generator=generator, dtype=torch.float64) < probability).double()
    assert ece(probability, label) == pytest.approx(0.3 * (10 / 100_000) ** 0.5, rel=0.8)
    assert ece(probability**2, label) > 0.1 and auroc(probability**2, label) == auroc(probability, label)
    table = reliability(probability, label)
    assert table.edge.tolist() == pytest.approx([b / 10 for b in range(10)])
    torch.testing.assert_close(table.confidence, table.frequency, atol=0.02, rtol=0)


def test_dtype_is_kept() -> None:
    p, y = torch.tensor([0.2, 0.8]), torch.tensor([0.0, 1.0])
    assert {f(p, y).dtype for f in (accuracy, auroc, brier, ece)} == {torch.float32}
    assert math.isnan(auroc(p, torch.ones(2)).item())
