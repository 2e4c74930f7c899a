"""A function that never answers costs a few limits; one that is slow, or hangs now and then, fails nobody else."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from novarl.core.types import Prompt, Rollout
from novarl.rewards.loaded_file import LoadedFile
from novarl.rewards.user_file import from_function
from novarl.rewards.user_process import MOST_HANGS, UserProcess
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
"""
LATE = Failure("timed out after 1 s and was stopped")


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
def test_a_function_that_always_hangs_is_given_up_after_a_few_limits(called, name: str) -> None:
    for _ in range(2):  # also the next batch, with a fresh worker
        results = called(name, *range(64), limit=0.5)
        late = [place for place, result in enumerate(results) if result == Failure(LATE.reason.replace("1 s", "0.5 s"))]
        assert len(late) == MOST_HANGS
        assert all(
            result == Failure("was skipped: calls before it timed out after 0.5 s")
            for place, result in enumerate(results)
            if place not in late
        )


@pytest.mark.parametrize("workers", [2, None])
def test_a_pool_whose_calls_all_hang_is_given_up_as_soon(
    write: Any, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that hang at the same time count once, so it costs as many limits as one worker, and not one less."""
    asked: list[list[int]] = []  # when each call began and ended, by the number of such moments before
    moments, ask = itertools.count(), LoadedFile.ask

    def noted(self: LoadedFile, *rest: Any) -> list[Any]:
        asked.append(span := [next(moments)])
        try:
            return ask(self, *rest)
        finally:
            span.append(next(moments))

    monkeypatch.setattr(LoadedFile, "ask", noted)
    process = UserProcess(write(CODE), time_limit=1.0, workers=workers)
    try:
        results = asyncio.run(process.call(process.function("snore"), [((value,), {}) for value in range(200)]))
    finally:
        process.close()
    late = [result for result in results if result == LATE]
    assert MOST_HANGS <= len(late) <= 1 + (MOST_HANGS + 1) * 8
    assert all("was skipped" in result.reason for result in results if result != LATE)
    one_after_another, free = 0, -1
    for begin, end in sorted(asked, key=lambda span: span[1]):
        if begin > free:
            one_after_another, free = one_after_another + 1, end
    assert one_after_another >= MOST_HANGS


def test_calls_that_are_asked_for_one_by_one_are_given_up_too(write: Any) -> None:
    process = UserProcess(write(CODE), time_limit=0.5)

    async def each() -> list[Any]:
        function = process.function("snore")
        found = await asyncio.gather(*(process.call(function, [((value,), {})]) for value in range(40)))
        return [result for (result,) in found]

    try:
        for _ in range(2):  # a new step is tried again
            reasons = [result.reason for result in asyncio.run(each())]
            assert sum("timed out after 0.5 s and was stopped" in reason for reason in reasons) == MOST_HANGS
            assert sum("was skipped" in reason for reason in reasons) == 40 - MOST_HANGS
    finally:
        process.close()


@pytest.mark.parametrize("name", ["slow", "slow_async", "compute"])
def test_a_slow_function_is_no_stuck_one(called, name: str) -> None:
    for _ in range(2):
        assert called(name, *range(4), limit=20.0) == [0, 1, 2, 3]


def test_one_call_that_hangs_costs_its_limit_and_no_other_call(called) -> None:
    for place in (0, 3, 7):
        values: list[Any] = list(range(8))
        values[place] = "hang"
        assert called("some", *values) == [LATE if value == "hang" else value for value in values]


def test_a_function_that_gets_stuck_half_way_is_given_up_after_a_few(called) -> None:
    results = called("then_stuck", 0, *[1] * 40, limit=0.5)
    late = [place for place, result in enumerate(results) if result == Failure(LATE.reason.replace("1 s", "0.5 s"))]
    assert results[0] == 0 and len(late) == MOST_HANGS and late[0] == 1 and late[1] > 10 and late[2] > 20
    assert all("was skipped" in result.reason for place, result in enumerate(results) if place not in (0, *late))


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


def test_async_calls_that_compute_for_long_are_not_stuck(called) -> None:
    assert called("hold", *range(3), limit=20.0) == [0, 1, 2]


def test_async_calls_that_block_one_another_have_their_time_each(called) -> None:
    assert called("block", *range(10)) == list(range(10)), "2 s in all, twice what one may take"


def in_process(hangs: Callable[[int], bool], count: int) -> list[Any]:
    """The verdicts of a function that is an object, on answers 0, 1, 2, ..."""
    ended = threading.Event()

    def reward(completion: str) -> float:
        if hangs(int(completion)):
            ended.wait(60)
        return float(completion)

    rollouts = [Rollout(Prompt("row", (1,), ()), 0, place, (), (), str(place)) for place in range(count)]
    try:
        return asyncio.run(from_function(reward, time_limit=0.2)(rollouts))
    finally:
        ended.set()


def test_a_function_of_this_process_that_always_hangs_is_given_up_too() -> None:
    reasons = [verdict.reason for verdict in in_process(lambda _: True, 30)]
    assert sum(reason.startswith("timed out after 0.2 s, and cannot be stopped") for reason in reasons) == MOST_HANGS
    assert sum(reason.startswith("was skipped") for reason in reasons) == 30 - MOST_HANGS


def test_answers_to_one_prompt_that_hang_in_this_process_cost_no_other() -> None:
    found = in_process(lambda place: 2 <= place < 8, 16)
    assert [verdict for place, verdict in enumerate(found) if not 2 <= place < 8] == [0, 1, *range(8, 16)]
    assert all("timed out" in verdict.reason for verdict in found[2:8])
