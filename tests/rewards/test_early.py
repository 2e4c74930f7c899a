"""Rewards begin while other rollouts are still sampled, several at a time where they wait, and say the same."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from novarl.core.types import Rollout, Scored
from novarl.rewards import process as module
from novarl.rewards.compose import RewardSet
from novarl.rewards.early import Early
from novarl.rewards.lane import Lane
from novarl.rewards.process import MOST_HANGS, UserProcess
from novarl.rewards.user_file import load
from novarl.rewards.verdict import Failure, Verdict

FILE = """
    import asyncio, os, pathlib, time

    def patient(messages, answer):
        time.sleep(0.05)
        return float(messages[-1]["content"])

    async def patient_async(messages, answer):
        await asyncio.sleep(0.05)
        return float(messages[-1]["content"])

    def odd(messages, answer):
        if messages[-1]["content"] == "3":
            raise ValueError("three")
        return float(messages[-1]["content"])

    def snore(messages, answer):
        time.sleep(300)

    def tire(messages, answer):
        time.sleep(0.05 if messages[-1]["content"] == "0" else 300)
        return 0.0

    def gated(messages, answer):
        here, row = pathlib.Path(__file__).parent, messages[-1]["content"]
        (here / f"begun-{row}").touch()
        while not (here / "gate").exists(): time.sleep(0.01)
        time.sleep(0.05)
        return {"row": int(row), "process": os.getpid()}

    def batch(completions, **columns):
        return [float(len(completions)) for _ in completions]

    def who(value):
        time.sleep(0.05)
        return os.getpid()

    def whirl(value):
        end = time.process_time() + 0.05
        while time.process_time() < end: pass
        return os.getpid()

    def quick(value):
        return os.getpid()

    def then_slow(value):
        time.sleep(0.05 if value > 2 else 0.0)
        return os.getpid()
"""
ROWS, SAMPLING = 24, 0.4


class Watched:
    """A reward of one rollout at a time that notes what it is called with; `hands` calls may run at once."""

    one_by_one = True

    def __init__(self, hands: int) -> None:
        self.calls: list[int] = []
        self.hands, self.busy, self.most = hands, 0, 0

    @property
    def room(self) -> int:
        return self.hands - self.busy

    async def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict]:
        self.calls.append(len(rollouts))
        self.busy += 1
        self.most = max(self.most, self.busy)
        for _ in range(3):  # as long as three rollouts take
            await asyncio.sleep(0)
        self.busy -= 1
        return [float(rollout.text) for rollout in rollouts]


def rows(say: Any, count: int = ROWS) -> list[Rollout]:
    return [replace(say(str(number)), group=number // 4, index=number % 4) for number in range(count)]


def sampled(rewards: RewardSet, rollouts: Sequence[Rollout], seconds: float = SAMPLING) -> tuple[list[Scored], int]:
    """The rollouts end one after another in so many seconds (0: in as many turns of the event loop as they are); what
    is scored, and for how many of them a reward was asked before the last had ended."""

    async def run() -> tuple[list[Scored], int]:
        begun = rewards.begin()
        for rollout in rollouts:
            await asyncio.sleep(seconds / len(rollouts))
            begun.add(rollout)
        kept = [len(column._ended) for column in begun.columns.values()]
        return await rewards.score(rollouts, begun), sum(len(rollouts) - count for count in kept)

    try:
        return asyncio.run(run())
    finally:
        rewards.close()


@pytest.mark.parametrize("hands", [1, 2])
def test_a_rollout_is_scored_while_others_are_sampled(hands: int, say) -> None:
    """Each once, by no more calls at once than there is room for; of those that failed none is asked for."""
    watched, rollouts = Watched(hands), rows(say)
    rollouts[5] = replace(rollouts[5], status="failed")
    scored, early = sampled(RewardSet({"mine": watched}), rollouts, seconds=0.0)
    assert sum(watched.calls) == ROWS - 1 and 4 < len(watched.calls) < ROWS and watched.most == hands
    assert early >= ROWS - 4, "only those that ended during the last call are left"
    assert [item.reward for item in scored] == [None if i == 5 else float(i) for i in range(ROWS)]
    assert [item.rollout for item in scored] == rollouts


def test_one_that_ends_in_the_moment_a_call_returns_is_not_forgotten(say) -> None:
    first, second = rows(say, 2)

    async def run() -> Sequence[Verdict]:
        gate = asyncio.get_running_loop().create_future()

        async def ask(rollouts: Sequence[Rollout]) -> list[Verdict]:
            if rollouts[0] is first:
                await gate
            return [float(rollout.text) for rollout in rollouts]

        early = Early(ask, lambda: 0)
        early.add(first)

        async def add() -> None:
            await gate
            early.add(second)

        await asyncio.sleep(0)
        adding = asyncio.create_task(add())  # it wakes right after the call has
        await asyncio.sleep(0)
        gate.set_result(None)
        await adding
        return await early.of([first, second])

    assert asyncio.run(run()) == [0.0, 1.0]


@pytest.mark.parametrize("name", ["patient", "patient_async", "odd", "batch"])
def test_it_says_what_it_says_afterwards(name: str, say, write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures too; and TRL's form still sees the whole batch."""
    path = write(FILE)
    monkeypatch.setattr(module, "DISTURBS", -1.0)  # none is too quick to be asked early
    reward = load(f"{path}:{name}", workers=None)
    asyncio.run(reward(rows(say, 1)))  # a function that has never answered is asked for nothing early
    assert reward.one_by_one == (name != "batch")
    early, begun = sampled(RewardSet({"mine": reward}), rows(say))
    late = RewardSet({"mine": load(f"{path}:{name}")})
    after = asyncio.run(late.score(rows(say)))
    late.close()
    assert [(item.reward, item.rewards) for item in early] == [(item.reward, item.rewards) for item in after]
    assert begun > 0 or name == "batch", "some are asked for before the last has ended"


def test_a_rollout_does_not_wait_for_another_where_a_worker_is_idle(say, write) -> None:
    """Each of the first four waits, in a process of its own, until the test has seen that all four were begun."""
    path = write(FILE)
    reward = load(f"{path}:gated", time_limit=120.0, workers=4)
    (path.parent / "gate").touch()
    for _ in range(2):  # a function that is not known yet is asked by two
        asyncio.run(reward(rows(say, 4)))
    end = time.monotonic() + 60
    while reward.room < 4 and time.monotonic() < end:
        time.sleep(0.01)  # they start in the background
    assert reward.room == 4
    (path.parent / "gate").unlink()
    for mark in path.parent.glob("begun-*"):
        mark.unlink()

    async def run() -> list[Scored]:
        rewards = RewardSet({"mine": reward})
        begun, rollouts = rewards.begin(), rows(say, 6)
        for number, rollout in enumerate(rollouts):
            begun.add(rollout)
            while number < 4 and len(list(path.parent.glob("begun-*"))) <= number:
                await asyncio.sleep(0.01)
        assert reward.room == 0
        (path.parent / "gate").touch()
        return await rewards.score(rollouts, begun)

    scored = asyncio.run(run())
    assert [item.rewards["mine/row"] for item in scored] == list(range(6))
    assert len({item.rewards["mine/process"] for item in scored[:4]}) == 4
    reward.close()


def test_a_function_that_never_answered_is_not_asked_early(say, write) -> None:
    reward = load(f"{write(FILE)}:patient")
    assert not reward.one_by_one
    asyncio.run(reward(rows(say, 1)))
    assert reward.one_by_one
    reward.close()


def test_a_reward_that_hangs_costs_its_limit_once(say, write) -> None:
    reward = load(f"{write(FILE)}:snore", time_limit=1.0, workers=None)
    scored, _ = sampled(RewardSet({"mine": reward}), rows(say))
    assert all(item.reward is None and "ran past its limit" in str(item.error) for item in scored)
    assert [place for place, item in enumerate(scored) if "was given up" not in str(item.error)] == [0, ROWS - 1]


def test_one_that_hangs_after_it_has_answered_costs_its_limit_twice(say, write) -> None:
    reward = load(f"{write(FILE)}:tire", time_limit=1.0, workers=4)
    asyncio.run(reward(rows(say, 1)))
    scored, _ = sampled(RewardSet({"mine": reward}), rows(say), seconds=0.0)
    assert [item.reward for item in scored] == [0.0] + [None] * (ROWS - 1)
    given_up = sum("was given up" in str(item.error) for item in scored)
    assert given_up >= ROWS - 1 - 4 * (1 + MOST_HANGS), "each of four waits for one early, and then for three"


def pids(process: UserProcess, name: str, count: int) -> list[Any]:
    results = asyncio.run(process.call(process.function(name), [((number,), {}) for number in range(count)]))
    assert not any(isinstance(result, Failure) for result in results)
    return results


@pytest.fixture
def by_need(write) -> Any:
    """As many workers as there is use for, which are waited for although a busy machine takes long to start them."""
    process = UserProcess(write(FILE), time_limit=10.0, workers=None)
    process._crew._start = 0.0
    yield process
    process.close()


def test_workers_are_as_many_as_a_function_has_use_for(by_need: UserProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(set(pids(by_need, "quick", 40))) == 1
    assert len(set(pids(by_need, "who", 12))) == 10 and len(set(pids(by_need, "who", 12))) == 12
    assert len(set(pids(by_need, "whirl", 12))) <= max(1, (os.cpu_count() or 1) // 2)
    assert len(set(pids(by_need, "then_slow", 3))) == 1
    assert len(set(pids(by_need, "then_slow", 8))) == 1 and len(set(pids(by_need, "then_slow", 8))) == 8
    monkeypatch.setattr(module, "MEMORY", 1)
    assert len(set(pids(by_need, "who", 12))) == 1


def in_the_end(process: UserProcess, name: str, count: int) -> int:
    """How many workers share `count` calls once those that they may have are there."""
    seen, end = 0, time.monotonic() + 60
    while seen < count and time.monotonic() < end:
        seen = len(set(pids(process, name, count)))
    return seen


def test_calls_that_are_quicker_than_a_start_do_not_wait_for_it(write) -> None:
    """The file takes half a second to import, and more for whoever is not the first, until the gate is open."""
    path = write("""
        import os, pathlib, time

        here = pathlib.Path(__file__).parent
        others = (here / "first").exists()
        (here / "first").touch()
        time.sleep(0.5)
        while others and not (here / "gate").exists(): time.sleep(0.01)

        def who(value):
            time.sleep(0.03)
            return os.getpid()
    """)
    process = UserProcess(path, time_limit=10.0, workers=None)
    try:
        (first,) = pids(process, "who", 1)
        assert pids(process, "who", 8) == [first] * 8, "seven wait for the gate"
        (path.parent / "gate").touch()
        assert in_the_end(process, "who", 8) == 8
        assert len(process._crew._workers) == 9, "one more was started than were lacking"
    finally:
        process.close()


def test_closing_does_not_wait_for_workers_that_still_start(write) -> None:
    path = write("""
        import os, pathlib, time

        mark = pathlib.Path(__file__).parent / "first"
        while mark.exists(): time.sleep(0.1)  # for ever
        mark.touch()
        time.sleep(0.5)

        def who(value):
            time.sleep(0.03)
            return os.getpid()
    """)
    process = UserProcess(path, time_limit=10.0, workers=None)
    pids(process, "who", 1)
    pids(process, "who", 8)
    process.close()
    _, *others = process._crew._workers
    assert others and not any(worker.lane.started for worker in others), "none has got through its import"


ONE_ALONE = """
    import os, pathlib, time

    os.open(pathlib.Path(__file__).parent / "taken", os.O_CREAT | os.O_EXCL)

    def who(value):
        time.sleep(0.5)
        return os.getpid()
"""
"""A file that only one process can import, as one that listens on a port."""


@pytest.mark.parametrize("workers", [None, 4])
def test_where_a_second_worker_cannot_start_the_first_does_it_all(workers: int | None, write) -> None:
    process = UserProcess(write(ONE_ALONE), time_limit=10.0, workers=workers)
    try:
        assert len({*pids(process, "who", 4), *pids(process, "who", 4)}) == 1
    finally:
        process.close()


def test_where_the_system_has_no_process_left_one_worker_does_it_all(
    by_need: UserProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids(by_need, "who", 1)
    monkeypatch.setattr("subprocess.Popen", none_left)
    assert len(set(pids(by_need, "who", 4))) == 1


def none_left(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_a_function_that_died_is_not_taken_for_a_quick_one(write) -> None:
    path = write("""
        import os, time

        def who(value):
            time.sleep(0.05)
            if value == 0: os._exit(3)
            return os.getpid()
    """)
    process = UserProcess(path, time_limit=10.0, workers=None)
    try:
        function = process.function("who")
        (died,) = asyncio.run(process.call(function, [((0,), {})]))
        assert isinstance(died, Failure) and not process.has_answered(function)
        pids_of(process, [1, 2, 3])
        (died,) = asyncio.run(process.call(function, [((0,), {})]))
        assert process._usual["who"] > 0.04
    finally:
        process.close()


def pids_of(process: UserProcess, values: Sequence[int]) -> list[Any]:
    return asyncio.run(process.call(process.function("who"), [((value,), {}) for value in values]))


def test_rows_that_end_while_all_are_busy_are_asked_together(say, write) -> None:
    """Quick calls do not queue one by one behind a worker that may hang."""
    reward = load(f"{write(FILE)}:patient", workers=None)
    try:
        asyncio.run(reward(rows(say, 1)))
        reward._process._crew._start = 5.0
        assert reward.room == 1

        async def busy() -> list[int]:
            call = asyncio.create_task(reward(rows(say, 1)))
            await asyncio.sleep(0.01)
            quick, reward._process._crew._start = reward.room, 0.0
            slow = reward.room
            await call
            return [quick, slow]

        quick, slow = asyncio.run(busy())
        assert quick == 0 and slow > 10, "a new worker only where a call takes longer than its start"
    finally:
        reward.close()


def test_a_worker_that_died_between_two_batches_is_replaced_and_none_blamed(write) -> None:
    process = UserProcess(write(FILE), time_limit=10.0, workers=1)
    try:
        before = set(pids(process, "quick", 3))
        os.kill(*before, signal.SIGKILL)
        while process._crew.first.lane._pipe.process.poll() is None:  # type: ignore[union-attr]
            time.sleep(0.01)
        after = set(pids(process, "quick", 3))
        assert len(before) == len(after) == 1 and before != after
        os.kill(*after, signal.SIGKILL)
        while process._crew.first.lane._pipe.process.poll() is None:  # type: ignore[union-attr]
            time.sleep(0.01)
        write("raise ValueError('edited meanwhile')")
        found = asyncio.run(process.call(process.functions["quick"], [((number,), {}) for number in range(3)]))
        assert all(isinstance(one, Failure) and "edited meanwhile" in one.reason for one in found), (
            "and not our own fault"
        )
    finally:
        process.close()


def test_one_worker_that_counts_its_calls_counts_each(write) -> None:
    """Although the last is tried elsewhere while the first is silent for long."""
    path = write("""
        import time

        count = 0

        def counted(value):
            global count
            count += 1
            time.sleep(1.0 if value == 0 else 0.0)
            return count
    """)
    process = UserProcess(path, time_limit=10.0, workers=1)
    try:
        assert pids(process, "counted", 3) == [1, 2, 3]
    finally:
        process.close()


def test_an_async_file_may_lie_beside_one_that_is_named_as_a_part_of_python(write) -> None:
    write("raise RuntimeError('this is mine')", name="selectors.py")
    path = write("async def same(value): return value")
    process = UserProcess(path, time_limit=10.0)
    try:
        assert pids(process, "same", 2) == [0, 1]
    finally:
        process.close()


def test_what_costs_sampling_more_than_it_saves_is_asked_at_the_end(say, write) -> None:
    """Of 64 workers a call of 50 ms saves less than a millisecond, and a quick one saves nothing. One worker's calls
    may depend on those before them: there the clock decides nothing."""
    path = write(FILE)
    # (the seconds that a call takes, how many workers are asked for): whether it is asked early
    known = {(0.05, None): False, (0.3, None): True, (0.0001, None): False, (0.0001, 1): True}
    for (usual, workers), early in known.items():
        rewards = RewardSet({"mine": (reward := load(f"{path}:patient", workers=workers))})
        asyncio.run(reward(rows(say, 2)))
        reward._process._usual["patient"] = usual
        assert list(rewards.begin().columns) == ["mine"] * early
        rewards.close()


def test_a_waiting_function_is_not_taken_for_computing_because_one_call_of_it_was(
    by_need: UserProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine time that others took counts as a call's own now and then. Once a function is known, one call
    of each batch is weighed: twelve processes that are looked at at once wait for each other."""
    honest, asked = Lane.load, []

    def noisy(lane: Lane) -> tuple[int, float] | None:
        asked.append(lane)
        load = honest(lane)
        return load and (load[0], load[1] + 0.05 * (len(asked) % 2 == 0))

    monkeypatch.setattr(Lane, "load", noisy)
    with monkeypatch.context() as patch:
        patch.setattr(module, "LATELY", 12)  # however far apart twelve processes start
        assert len(set(pids(by_need, "who", 12))) == 10
    assert len(asked) == 12
    assert len(set(pids(by_need, "who", 12))) == 12 and len(asked) == 13


def test_results_are_in_the_order_of_calls_whoever_gave_them(write) -> None:
    process = UserProcess(write("def same(value):\n    return value"), time_limit=10.0, workers=3)
    try:
        assert pids(process, "same", 8) == list(range(8))
    finally:
        process.close()
