"""A function that never answers costs its limit once; one that is slow, or hangs now and then, fails nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from novarl.rewards import lane, process as module
from novarl.rewards.process import MOST_HANGS, UserProcess
from novarl.rewards.verdict import Failure

CODE = """
    import asyncio, os, time
    from pathlib import Path

    def spin(value):
        while True: pass

    def snore(value):
        time.sleep(300)

    async def spin_async(value):
        while True: pass

    def slow(value):
        time.sleep(0.5)
        return value

    async def slow_async(value):
        await asyncio.sleep(0.5)
        return value

    async def hold(value):
        sum(range(40_000_000))  # in C, without a break
        return value

    async def block(value):
        time.sleep(0.2)
        return value

    def compute(value):
        end = time.process_time() + 0.5
        while time.process_time() < end: pass
        return value

    def some(value):
        while value in ("hang", "hang too"): pass
        return value

    def then_stuck(value):
        while value: pass
        return value

    def slow_first(value):
        time.sleep(0.8 if value == 0 else 0.0)
        while value == "hang": pass
        return value

    def count(value):
        with open(value, "a") as file:
            file.write("x")
        time.sleep(0.4)
        return 1
"""
LATE = Failure("ran past its limit of 1 s and was stopped")


@pytest.fixture
def called(write: Any) -> Any:
    """Calls a function of the file with each value."""
    processes: list[UserProcess] = []

    def call(name: str, *values: Any, limit: float = 1.0) -> list[Any]:
        if not processes:
            processes.append(UserProcess(write(CODE), time_limit=limit))
        process = processes[0]
        return asyncio.run(process.call(process.function(name), [((value,), {}) for value in values]))

    yield call
    for process in processes:
        process.close()


@pytest.mark.parametrize("name", ["spin", "snore", "spin_async"])
def test_a_function_that_always_hangs_costs_its_limit_once(called, name: str) -> None:
    for _ in range(2):  # also the next batch, with a fresh worker
        results = called(name, *range(64))
        assert all(isinstance(result, Failure) and "ran past its limit of 1 s" in result.reason for result in results)
        late = [place for place, result in enumerate(results) if result == LATE]
        assert late in ([0], [0, 63]), "the first and the last at the same time, and the others are given up"
    assert "was given up" in results[30].reason


@pytest.mark.parametrize("name", ["slow", "slow_async", "compute"])
def test_a_slow_function_is_no_stuck_one(called, name: str) -> None:
    for _ in range(2):
        assert called(name, *range(4), limit=2.0) == [0, 1, 2, 3]


def test_one_call_that_hangs_costs_its_limit_and_no_other_call(called) -> None:
    for place in (0, 3, 7):
        values: list[Any] = list(range(8))
        values[place] = "hang"
        assert called("some", *values) == [LATE if value == "hang" else value for value in values]


def test_the_first_and_the_last_that_hang_are_taken_for_all(called) -> None:
    """What cannot be told apart within one limit from a function that is stuck for good."""
    results = called("some", "hang", 1, 2, "hang too")
    assert (results[0], results[3]) == (LATE, LATE)
    assert all("was given up" in result.reason for result in results[1:3])


def test_a_slow_first_call_does_not_condemn_a_last_one_that_hangs(called) -> None:
    results = called("slow_first", 0, 1, "hang", limit=2.0)
    assert results == [0, 1, Failure("ran past its limit of 2 s and was stopped")]


def test_a_function_that_gets_stuck_half_way_is_given_up_after_a_few(called) -> None:
    results = called("then_stuck", 0, *[1] * 40, limit=0.5)
    late = [place for place, result in enumerate(results) if result == Failure(LATE.reason.replace("1 s", "0.5 s"))]
    assert results[0] == 0 and len(late) == MOST_HANGS and late[0] == 1 and late[1] > 10 and late[2] > 20
    assert all("was given up" in result.reason for place, result in enumerate(results) if place not in (0, *late))


@pytest.mark.parametrize("workers", [1, 4, None])
def test_answers_to_one_prompt_that_hang_cost_no_other(write: Any, workers: int | None) -> None:
    process = UserProcess(write(CODE), time_limit=0.5, workers=workers)
    try:
        for values in (["hang"] * 4 + [4, 5, 6, 7], [0, 1] + ["hang"] * 4 + [6, 7, 8]):
            results = asyncio.run(process.call(process.function("some"), [((value,), {}) for value in values]))
            late = Failure(LATE.reason.replace("1 s", "0.5 s"))
            assert results == [late if value == "hang" else value for value in values]
    finally:
        process.close()


def test_an_async_function_that_answers_no_question_for_a_while(called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    monkeypatch.setattr(lane, "GRACE", 0.05)
    assert called("hold", *range(3), limit=20.0) == [0, 1, 2]


def test_async_calls_that_block_one_another_have_their_time_each(called) -> None:
    assert called("block", *range(10)) == list(range(10)), "2 s in all, twice what one may take"


def test_a_function_known_to_be_slow_is_not_tried_twice(called, tmp_path: Path) -> None:
    for _ in range(3):
        called("count", str(tmp_path / "a"), str(tmp_path / "b"), limit=20.0)
    assert (tmp_path / "a").read_text() == "xxx"
    assert (tmp_path / "b").read_text() in ("xxx", "xxxx"), "once more in the first batch at most"


def test_a_second_worker_that_does_not_start_fails_nobody(called, monkeypatch: pytest.MonkeyPatch) -> None:
    called("slow", 0, limit=2.0)
    monkeypatch.setattr(module, "PATIENCE", 0.1)

    def refuse(*_: Any, **__: Any) -> None:
        raise module.NovaError("no room for another")

    monkeypatch.setattr(module.Lane, "start", refuse)
    assert called("compute", 1, 2) == [1, 2]
