from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from novarl.core.errors import NovaError
from novarl.data.stream import Stream


def test_every_epoch_holds_every_row_once_in_its_own_order() -> None:
    taken = Stream(50, seed=3).take(150)
    epochs = [[index for epoch, index in taken if epoch == e] for e in range(3)]
    assert [epoch for epoch, _ in taken] == [0] * 50 + [1] * 50 + [2] * 50
    assert all(sorted(order) == list(range(50)) for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert list(range(50)) not in epochs
    assert epochs[0] != [index for _, index in Stream(50, seed=4).take(50)]


@settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 20), st.lists(st.integers(0, 30), max_size=6))
def test_how_much_is_taken_at_once_changes_nothing(length: int, sizes: list[int]) -> None:
    stream = Stream(length, seed=0)
    assert [row for k in sizes for row in stream.take(k)] == Stream(length, seed=0).take(sum(sizes))


@settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 20), st.integers(0, 50))
def test_a_restarted_stream_goes_on(length: int, before: int) -> None:
    stream, restarted = Stream(length, seed=9), Stream(length, seed=9)
    stream.take(before)
    restarted.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert restarted.take(45) == stream.take(45)


def test_a_state_goes_back_as_well() -> None:
    stream = Stream(7, seed=1)
    state = stream.state_dict()
    first = stream.take(30)
    stream.load_state_dict(state)
    assert stream.take(30) == first


def test_the_order_is_the_same_in_every_process() -> None:
    code = "from novarl.data.stream import Stream; print(Stream(100, 5).take(130))"
    root = str(Path(__file__).parents[2])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {f"{Stream(100, 5).take(130)}\n".encode()}


def test_states_of_other_data_are_refused() -> None:
    with pytest.raises(NovaError, match="length 9, but this run has 10"):
        Stream(10, seed=0).load_state_dict(Stream(9, seed=0).state_dict())
    with pytest.raises(NovaError, match="seed 1, but this run has 0"):
        Stream(10, seed=0).load_state_dict(Stream(10, seed=1).state_dict())
    with pytest.raises(NovaError, match="no rows"):
        Stream(0, seed=0)
