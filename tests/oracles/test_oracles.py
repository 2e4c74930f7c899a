"""The committed numbers of rlax, TRL and scikit-learn (`make oracles` asks for them anew) and ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.oracles import inputs
from tests.oracles.faults import FAULTS, Fault
from tests.oracles.ours import CASES, TOLERANCE, Case, recorded


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equal(case: Case) -> None:
    assert case.error() <= TOLERANCE
    assert max(float(theirs.abs().max()) for theirs in case.numbers().values()) > 1e-2, "nothing is compared"


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.where}: {fault.name}" for fault in FAULTS])
def test_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault.module, fault.function, fault.plant(getattr(fault.module, fault.function)))
    assert CASES[fault.caught_by].error() > 10 * TOLERANCE


def test_every_recorded_number_is_compared() -> None:
    assert CASES.keys() == recorded()["numbers"].keys()
    for case in CASES.values():
        assert case.numbers().keys() <= case.compute().keys()


def test_every_function_compared_has_a_fault_planted() -> None:
    named = {name for case in CASES.values() for name in re.findall(r"[a-z_]+\.\w+", case.ours)}
    assert named <= {fault.where for fault in FAULTS}


def test_the_numbers_come_from_the_pinned_versions() -> None:
    lines = Path(__file__).with_name("requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    versions = recorded()["versions"]
    assert {name: pinned[name] for name in ("trl", "rlax", "jax", "scikit-learn")}.items() <= versions.items()


def test_the_rollouts_are_worth_trying() -> None:
    """Every bound is met on both sides, and one group of equal rewards."""
    rows = inputs.rollouts()
    ratio, advantage = (rows.logp - rows.old_logp).exp(), rows.advantage[:, None]
    good, bad = rows.mask & (advantage > 0), rows.mask & (advantage < 0)
    low, high = inputs.CLIP
    assert (good & (ratio > 1 + high)).any() and (bad & (ratio < 1 - low)).any()
    assert (good & (ratio > 1 + low) & (ratio < 1 + high)).any(), "clip-higher would change nothing"
    assert (bad & (ratio > inputs.TWO_SIDED)).any() and (rows.mask & (ratio > inputs.CISPO_HIGH)).any()
    weight = (rows.old_logp - rows.behavior_logp).exp()[rows.mask]
    assert (weight < inputs.LOW).any() and (weight > inputs.HIGH).any()
    assert rows.rewards[rows.group == 1].unique().numel() == 1


def test_the_steps_are_worth_trying() -> None:
    """Gaps, a row of one step, ends and bootstraps, ratios beyond every clip."""
    given = inputs.steps()
    rho = (given.logp - given.behavior_logp).exp()[given.mask]
    assert (rho < 0.5).any() and (rho > 1.7).any() and ((rho > 1.0) & (rho < 1.3)).any()
    assert (given.mask.sum(1) == 1).any() and (given.bootstrap == 0).any() and (given.bootstrap > 0).any()
    assert (given.values[~given.mask] == inputs.JUNK).all()


def test_the_preferences_and_judgements_are_worth_trying() -> None:
    rows, given = inputs.preferences(), inputs.judgements()
    assert (rows.strangers - rows.stranger_ref).mean() > 0, "KTO's clamp must not hide its point"
    contrast = rows.logp.sum(1) - rows.ref
    assert (contrast.abs() > 0.05).all()
    assert given.score.unique().numel() < len(given.score) / 4
    counts = torch.histc(given.probability, bins=inputs.BINS, min=0.0, max=1.0)
    assert (counts == 0).any() and given.probability.min() == 0 and given.probability.max() == 1
