"""Rewards begin while other rollouts are still sampled, several at a time where they wait, and say the same."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from novarl.core.types import Rollout, Scored
from novarl.rewards.compose import RewardSet
from novarl.rewards.user_file import load
from novarl.rewards.user_process import MOST_HANGS, UserProcess
from novarl.rewards.verdict import Failure, Verdict

FILE = """
    import asyncio, os, pathlib, time

    def prompt(messages, answer):
        return float(messages[-1]["content"])

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

    def quick(value):
        return os.getpid()
"""
ROWS, SAMPLING = 24, 0.4


class Watched:
    """A reward of one rollout at a time that notes what it is called with."""

    one_by_one = True

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    async def __call__(self, rollouts: Sequence[Rollout]) -> Sequence[Verdict]:
        self.calls.append([rollout.text for rollout in rollouts])
        await asyncio.sleep(0)
        return [float(rollout.text) for rollout in rollouts]


def rows(say: Any, count: int = ROWS) -> list[Rollout]:
    return [replace(say(str(number)), group=number // 4, index=number % 4) for number in range(count)]


def sampled(rewards: RewardSet, rollouts: Sequence[Rollout], seconds: float = SAMPLING) -> list[Scored]:
    """What is scored of rollouts that end one after another in so many seconds."""

    async def run() -> list[Scored]:
        begun = rewards.begin()
        for rollout in rollouts:
            await asyncio.sleep(seconds / len(rollouts))
            begun.add(rollout)
        return await rewards.score(rollouts, begun)

    try:
        return asyncio.run(run())
    finally:
        rewards.close()


def test_a_rollout_is_scored_as_soon_as_it_has_ended(say) -> None:
    """Each once, in the order in which they end; those that failed are not."""
    watched, rollouts = Watched(), rows(say)
    rollouts[5] = replace(rollouts[5], status="failed")
    rewards = RewardSet({"mine": watched})

    async def run() -> list[Scored]:
        begun = rewards.begin()
        for number, rollout in enumerate(rollouts):
            begun.add(rollout)
            await asyncio.sleep(0)
            assert len(watched.calls) == number + (number < 5), "it waits for no other"
        return await rewards.score(rollouts, begun)

    scored = asyncio.run(run())
    assert watched.calls == [[str(number)] for number in range(ROWS) if number != 5]
    assert [item.reward for item in scored] == [None if i == 5 else float(i) for i in range(ROWS)]
    assert [item.rollout for item in scored] == rollouts


@pytest.mark.parametrize("name", ["patient", "patient_async", "odd", "batch"])
def test_it_says_what_it_says_afterwards(name: str, say, write) -> None:
    """Failures too; and TRL's form still sees the whole batch."""
    path = write(FILE)
    reward = load(f"{path}:{name}", workers=2)
    assert reward.one_by_one == (name != "batch")
    early = sampled(RewardSet({"mine": reward}), rows(say))
    late = RewardSet({"mine": load(f"{path}:{name}")})
    after = asyncio.run(late.score(rows(say)))
    late.close()
    assert [(item.reward, item.rewards) for item in early] == [(item.reward, item.rewards) for item in after]


def test_a_rollout_does_not_wait_for_another_where_a_worker_is_idle(say, write) -> None:
    """Each of the first four waits, in a process of its own, until the test has seen that all four were begun."""
    path = write(FILE)
    reward = load(f"{path}:gated", time_limit=120.0, workers=4)
    (path.parent / "gate").touch()
    asyncio.run(reward(rows(say, 2)))  # it is known to be slow
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
        assert len(list(path.parent.glob("begun-*"))) == 4
        (path.parent / "gate").touch()
        return await rewards.score(rollouts, begun)

    scored = asyncio.run(run())
    assert [item.rewards["mine/row"] for item in scored] == list(range(6))
    assert len({item.rewards["mine/process"] for item in scored[:4]}) == 4
    reward.close()


def test_only_a_slow_function_is_asked_early(say, write) -> None:
    """A quick one would only disturb the sampling. Where the number of workers is given, always: the clock must not
    decide in which order one that remembers its calls is asked."""
    path = write(FILE)
    for name, workers, first, then in [
        ("patient", None, False, True),
        ("prompt", None, False, False),
        ("prompt", 1, True, True),
    ]:
        rewards = RewardSet({"mine": (reward := load(f"{path}:{name}", workers=workers))})
        assert list(rewards.begin().columns) == ["mine"] * first, "nothing is known of it yet"
        asyncio.run(reward(rows(say, 2)))
        assert list(rewards.begin().columns) == ["mine"] * then
        rewards.close()


def test_a_reward_that_hangs_costs_a_few_limits(say, write) -> None:
    for name in ("snore", "tire"):  # at once, or after it has answered one
        reward = load(f"{write(FILE)}:{name}", time_limit=1.0, workers=4)
        asyncio.run(reward(rows(say, 1)))
        scored = sampled(RewardSet({"mine": reward}), rows(say, 100), seconds=0.0)
        reasons = [str(item.error) for item in scored if item.reward is None]
        assert len(reasons) == 100 - (name == "tire")
        skipped = sum("was skipped" in reason for reason in reasons)
        assert skipped + sum("timed out after 1 s and was stopped" in reason for reason in reasons) == len(reasons)
        assert skipped >= 100 - 4 * (MOST_HANGS + 1), "four at the same time, and that as often as they may"


def pids(process: UserProcess, name: str, count: int) -> list[Any]:
    results = asyncio.run(process.call(process.function(name), [((number,), {}) for number in range(count)]))
    assert not any(isinstance(result, Failure) for result in results)
    return results


@pytest.fixture
def pool(write) -> Iterator[UserProcess]:
    process = UserProcess(write(FILE), time_limit=60.0, workers=4)
    yield process
    process.close()


def in_the_end(process: UserProcess, name: str, count: int, workers: int) -> bool:
    """Whether so many workers share `count` calls once those that start are there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if len(set(pids(process, name, count))) == workers:
            return True
    return False


def test_a_slow_function_is_spread_over_the_pool_and_a_quick_one_is_not(pool: UserProcess) -> None:
    assert len(set(pids(pool, "quick", 40))) == 1
    assert in_the_end(pool, "who", 12, workers=4)
    assert len(set(pids(pool, "quick", 40))) == 1


def test_one_call_at_a_time_has_one_worker(pool: UserProcess) -> None:
    """As of a function that takes a batch."""
    assert len({pid for _ in range(5) for pid in pids(pool, "who", 1)}) == 1


def test_without_a_number_the_pool_has_a_worker_for_each_core_up_to_eight(
    write, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores, workers in ((3, 3), (64, 8)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        process = UserProcess(write(FILE), time_limit=60.0, workers=None)
        try:
            assert in_the_end(process, "who", 40, workers)
            assert len(set(pids(process, "who", 40))) <= workers
        finally:
            process.close()


def test_calls_do_not_wait_for_workers_that_start(write) -> None:
    """Whoever is not the first is held up in its import until the gate is open."""
    path = write("""
        import os, pathlib, time

        here = pathlib.Path(__file__).parent
        others = (here / "first").exists()
        (here / "first").touch()
        while others and not (here / "gate").exists(): time.sleep(0.01)

        def who(value):
            time.sleep(0.03)
            return os.getpid()
    """)
    process = UserProcess(path, time_limit=10.0, workers=8)
    try:
        first, _ = pids(process, "who", 2)
        assert pids(process, "who", 8) == [first] * 8, "seven wait for the gate"
        (path.parent / "gate").touch()
        assert in_the_end(process, "who", 24, workers=8)
    finally:
        process.close()


def test_closing_does_not_wait_for_workers_that_still_start(write) -> None:
    path = write("""
        import os, pathlib, time

        here = pathlib.Path(__file__).parent
        (here / f"start-{os.getpid()}").touch()
        while len(list(here.glob("start-*"))) > 1: time.sleep(0.1)  # for ever

        def who(value):
            time.sleep(0.05)
            return os.getpid()
    """)
    process = UserProcess(path, time_limit=10.0, workers=3)
    while len(starts := list(path.parent.glob("start-*"))) < 3:
        pids(process, "who", 8)
    process.close()
    assert not any(Path(f"/proc/{start.name.removeprefix('start-')}").exists() for start in starts)


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
    pool: UserProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids(pool, "who", 1)
    monkeypatch.setattr("subprocess.Popen", none_left)
    assert len(set(pids(pool, "who", 12))) == 1


def none_left(*_: object, **__: object) -> None:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def killed(pid: int) -> None:
    """Kill a worker, and wait until it and its keeper are gone."""
    keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOWAIT)


def test_a_worker_that_died_between_two_batches_is_replaced_and_none_blamed(write) -> None:
    process = UserProcess(write(FILE), time_limit=10.0, workers=1)
    try:
        before = set(pids(process, "quick", 3))
        killed(*before)
        after = set(pids(process, "quick", 3))
        assert len(before) == len(after) == 1 and before != after
        killed(*after)
        write("raise ValueError('edited meanwhile')")
        found = asyncio.run(process.call(process.functions["quick"], [((number,), {}) for number in range(3)]))
        assert all(isinstance(one, Failure) and "edited meanwhile" in one.reason for one in found), (
            "and not our own fault"
        )
    finally:
        process.close()


def test_one_worker_that_counts_its_calls_counts_each(write) -> None:
    """In the order in which they were asked for, one by one or together."""
    path = write("""
        import time

        count = 0

        def counted(value):
            global count
            count += 1
            time.sleep(0.2 if value == 0 else 0.0)
            return count
    """)
    process = UserProcess(path, time_limit=10.0, workers=1)

    async def each() -> list[Any]:
        return await asyncio.gather(*(process.call(process.function("counted"), [((n,), {})]) for n in range(3)))

    try:
        assert pids(process, "counted", 3) == [1, 2, 3]
        assert asyncio.run(each()) == [[4], [5], [6]]
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


def test_arguments_that_cannot_be_sent_fail_their_own_call(write) -> None:
    process = UserProcess(write("def same(value): return 1"), time_limit=10.0)
    try:
        calls: list[Any] = [((value,), {}) for value in (1, {(1, 2): "a tuple as a key"}, 3)]
        first, failed, last = asyncio.run(process.call(process.function("same"), calls))
        assert (first, last) == (1, 1) and isinstance(failed, Failure)
        assert failed.reason.startswith("was not called: its arguments are not JSON: keys must be")
    finally:
        process.close()


def test_results_are_in_the_order_of_calls_whoever_gave_them(write) -> None:
    process = UserProcess(
        write("import time\ndef same(v):\n    time.sleep(0.02)\n    return v"), time_limit=10.0, workers=3
    )
    try:
        for _ in range(3):
            assert pids(process, "same", 30) == list(range(30))
    finally:
        process.close()
