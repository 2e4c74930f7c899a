"""Metrics add up the same however they were cut."""

from __future__ import annotations

import pytest
import torch

from novarl.distributed.ranks import Ranks
from novarl.learn.ledger import Ledger

VALUES = torch.tensor([1.0, 2.0, 4.0, 9.0, -3.0])


@pytest.mark.parametrize("cuts", [[5], [1, 4], [2, 0, 3]])
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    ledger = Ledger()
    for part in VALUES.split(cuts):
        ledger.mean("entropy", part)
        ledger.moments("kl", part)
        ledger.sum("loss", part.sum())
        ledger.max("ratio_max", part)
    record = ledger.reduce(Ranks())
    assert record["entropy"] == pytest.approx(2.6) and record["kl_mean"] == pytest.approx(2.6)
    assert record["kl_std"] == pytest.approx(VALUES.std(unbiased=False).item())
    assert record["loss"] == 13.0 and record["ratio_max"] == 9.0


def test_nothing_added_is_nothing_reported() -> None:
    ledger = Ledger()
    ledger.mean("entropy", torch.zeros(0))
    ledger.max("ratio_max", torch.zeros(0))
    assert ledger.reduce(Ranks()) == {}
