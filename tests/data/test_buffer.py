from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from novarl.core.errors import NovaError
from novarl.core.types import Buffer, Prompt, Rollout, Scored, Sequence
from novarl.data.buffer import RolloutBuffer
from novarl.data.serial import from_dict, to_dict

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
EXTRA = st.dictionaries(st.text(max_size=5), JSON, max_size=3)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}), max_size=3).map(tuple)
NUMBERS = st.floats(allow_nan=False)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    n = draw(st.integers(0, 4))

    def column(of: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(of, min_size=n, max_size=n)))

    ids = st.integers(0, 2**40)
    return Sequence(column(ids), column(st.booleans()), column(NUMBERS), column(NUMBERS), column(ids))


PROMPTS = st.builds(Prompt, st.text(), st.lists(st.integers(0)).map(tuple), MESSAGES, JSON, EXTRA)
ROLLOUTS = st.builds(
    Rollout,
    PROMPTS,
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0),
    st.lists(sequences(), max_size=3).map(tuple),
    MESSAGES,
    st.text(),
    st.sampled_from(["done", "truncated", "failed"]),
    st.text(),
    st.sampled_from(["train", "baseline"]),
    EXTRA,
)
SCORED = st.builds(
    Scored,
    ROLLOUTS,
    st.dictionaries(st.text(), NUMBERS),
    st.none() | NUMBERS,
    st.none() | st.text(),
    st.none() | st.lists(NUMBERS).map(tuple),
)


def one(index: int, **changes: Any) -> Scored:
    sequence = Sequence((1, 2), (False, True), (0.0, -0.1 - 0.2), (0.0, math.pi), (0, index))
    prompt = Prompt(f"p/{index}", (1,), ({"role": "user", "content": "x"},), answer=("a", 1))
    rollout = Rollout(prompt, index, 0, (sequence,), prompt.messages, "y", **changes)
    return Scored(rollout, {"r": 1 / 3}, 1 / 3)


@settings(
    deadline=None, derandomize=True, database=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
@given(SCORED)
def test_scored_rollouts_survive_json_exactly(scored: Scored) -> None:
    text = json.dumps(to_dict(scored))
    back = from_dict(Scored, json.loads(text))
    assert back == scored
    assert json.dumps(to_dict(back)) == text
    assert repr(back) == repr(scored)  # also the types: a tuple stays a tuple, 1.0 stays a float


def test_what_has_no_json_survives_as_well() -> None:
    prompt = Prompt("p", (), (), answer=float("nan"), extra={"x": [float("inf"), -0.0, (1, ("2",))]})
    odd_keys: dict[Any, Any] = {1: 2, "__tuple__": [3], (4, 5): {"__items__": 6}, None: {"__tuple__": [7]}}
    prompt = replace(prompt, extra={**prompt.extra, "odd": odd_keys, "__items__": []})
    back = from_dict(Prompt, json.loads(json.dumps(to_dict(prompt))))
    assert repr(back) == repr(prompt)


@pytest.mark.parametrize(("value", "where"), [(object(), "info.x"), ([{"y": {3}}], r"info.x\[0\].y")])
def test_what_json_cannot_hold_is_refused_by_name(value: Any, where: str) -> None:
    with pytest.raises(NovaError, match=f"^{where}: a .* cannot be saved"):
        to_dict(one(0, info={"x": value}))


def test_first_in_first_out() -> None:
    buffer = RolloutBuffer(max_staleness=None)
    typed: Buffer = buffer
    typed.put([one(0), one(1)], version=3)
    typed.put([one(2)], version=4)
    assert len(buffer) == 3
    assert buffer.get(2, version=100) == [one(0), one(1)]
    assert buffer.get(5, version=100) == [one(2)]
    assert buffer.get(5, version=100) == [] and len(buffer) == buffer.dropped == 0


def test_stale_rollouts_are_dropped_and_counted() -> None:
    buffer = RolloutBuffer(max_staleness=2)
    for version in range(5):
        buffer.put([one(version)], version=version)
    assert [scored.rollout.group for scored in buffer.get(2, version=4)] == [2, 3]
    assert (buffer.dropped, len(buffer)) == (2, 1)
    assert buffer.get(1, version=7) == []
    assert buffer.dropped == 3
    on_policy = RolloutBuffer(max_staleness=0)
    on_policy.put([one(0)], version=1)
    assert on_policy.get(1, version=1) == [one(0)]
    with pytest.raises(ValueError):
        RolloutBuffer(max_staleness=-1)


def test_a_restored_buffer_goes_on() -> None:
    buffer, restored = RolloutBuffer(max_staleness=1), RolloutBuffer(max_staleness=1)
    buffer.put([one(9)], version=-2)
    buffer.put([one(0), one(1)], version=0)
    buffer.put([one(2), one(3)], version=1)
    assert buffer.get(1, version=0) == [one(0)]
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert restored.get(2, version=2) == buffer.get(2, version=2) == [one(2), one(3)]
    assert (restored.dropped, len(restored)) == (buffer.dropped, len(buffer)) == (2, 0)
