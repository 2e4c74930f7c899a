"""The collector of garbage rests while a command starts, and is seldom afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from novarl.core import collector


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_it_rests_until_started() -> None:
    with collector.resting():
        assert not gc.isenabled()
        collector.started()
        assert gc.isenabled() and gc.get_threshold()[0] == collector.OFTEN and gc.get_freeze_count() > 0
    assert gc.isenabled()


def test_nothing_changes_where_none_rests() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    collector.started()
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
