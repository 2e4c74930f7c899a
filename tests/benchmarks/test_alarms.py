"""The statistics and the page of `make bench-alarms`, and that its faults are those of the table of alerts."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.alarm_faults import FAULTS
from benchmarks.alarms import HEALTHY, clopper_pearson, page, poisson
from novarl.observe.stability import RULES

WITHOUT_A_RUN = {"always_cut", "no_gradient", "low_lr", "entropy_rise"}
"""Alerts that come with a setting, and are tested by their own runs."""


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (5, 10, 0.1871, 0.8129), (19, 20, 0.7513, 0.9987)],
)
def test_the_exact_interval_of_a_share(right: int, of: int, low: float, high: float) -> None:
    assert clopper_pearson(right, of) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("count", "low", "high"), [(0, 0.0, 3.6889), (1, 0.0253, 5.5716), (10, 4.7954, 18.3904)])
def test_the_exact_interval_of_a_count(count: int, low: float, high: float) -> None:
    assert poisson(count) == pytest.approx((low, high), abs=1e-4)


def test_every_alert_is_injected() -> None:
    assert {fault.expected for fault in FAULTS.values()} | WITHOUT_A_RUN == set(RULES)


def one(fault: str, *alerts: tuple[int, str], seed: int = 100, steps: int = 30) -> dict[str, Any]:
    return {"fault": fault, "algo": "grpo", "seed": seed, "steps": steps, "alerts": list(alerts), "seconds": 1.0}


def test_the_page_counts_names_and_delays() -> None:
    onset = FAULTS["stale"].onset
    text = page(
        [
            one("stale", (onset + 1, "stale_weights")),
            one("stale", (onset, "kl_explosion"), (onset + 1, "dtype"), (onset + 2, "stale_weights"), seed=101),
            one("lr_x300", (FAULTS["lr_x300"].onset - 1, "kl_explosion")),
            one(HEALTHY, (7, "gradient_spike")),
            one(HEALTHY, seed=101),
        ]
    )
    assert "| stale | stale_weights | grpo | 2 | 1 | 0.013 | 1 |" in text, "the second had another name first"
    assert "| lr_x300 | kl_explosion | grpo | 1 | 0 | 0.000 | - |" in text, "an alert before the fault does not count"
    assert "| all | 2 | 60 | 1 | 16.67 | 0.42 to 92.86 | gradient_spike 1 |" in text
    assert "small sample" in text
