"""The worker process itself: it does not block, leaves nothing behind, and starts at once."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from novarl.rewards.pipe import Pipe
from novarl.rewards.process import UserProcess
from novarl.rewards.verdict import Failure

CODE = """
    import os, subprocess, time

    def hang(value):
        while True: pass

    def spawn_and_hang(path):
        child = subprocess.Popen(["sleep", "300"])
        with open(path, "w") as file:
            file.write(str(child.pid))
        time.sleep(300)

    def spawn(value):
        return subprocess.Popen(["sleep", "300"]).pid

    def echo(value):
        return value

    def pid():
        return os.getpid()
"""


def gone(pid: int, seconds: float = 3.0) -> bool:
    """Whether the process ends (or is a zombie that only awaits its parent) within the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def call(process: UserProcess, name: str, *values: object) -> list[object]:
    calls = [((value,), {}) for value in values] if values else [((), {})]
    return asyncio.run(process.call(process.function(name), calls))


def test_the_event_loop_goes_on_while_a_reward_hangs(write) -> None:
    process = UserProcess(write(CODE), time_limit=0.6)

    async def beside() -> int:
        beats = 0
        task = asyncio.ensure_future(process.call(process.function("hang"), [((1,), {})]))
        while not task.done():
            await asyncio.sleep(0.01)
            beats += 1
        assert isinstance((await task)[0], Failure)
        return beats

    assert asyncio.run(beside()) > 20
    process.close()


def test_a_call_that_nobody_awaits_any_more_is_ended(write) -> None:
    process = UserProcess(write(CODE), time_limit=60)
    (worker,) = call(process, "pid")

    async def give_up() -> None:
        async with asyncio.timeout(0.2):
            await process.call(process.function("hang"), [((1,), {})] * 50)

    start = time.perf_counter()
    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert call(process, "echo", 1) == [1], "and the next one is served by a fresh worker"
    assert time.perf_counter() - start < 3.0
    assert gone(int(str(worker)))
    process.close()


def test_the_children_of_a_reward_end_with_it(write, tmp_path: Path) -> None:
    process = UserProcess(write(CODE), time_limit=1.0)
    (result,) = call(process, "spawn_and_hang", str(tmp_path / "pid"))
    assert isinstance(result, Failure)
    assert gone(int((tmp_path / "pid").read_text()))
    process.close()


def test_what_a_reward_has_started_ends_with_the_worker(write) -> None:
    process = UserProcess(write(CODE), time_limit=20)
    (child,) = call(process, "spawn", None)
    assert Path(f"/proc/{child}").exists()
    process.close()
    assert gone(int(str(child)))


def test_large_values_pass_both_ways(write) -> None:
    process = UserProcess(write(CODE), time_limit=20)
    values = ["x" * 3_000_000, {"a": [1, 2.5, None, True]}, "\u00e9\n\u2028"]
    assert call(process, "echo", *values) == values
    process.close()


def test_it_serves_one_event_loop_after_another_from_one_process(write) -> None:
    process = UserProcess(write(CODE), time_limit=20)
    assert call(process, "pid") == call(process, "pid")
    process.close()


def test_close_and_garbage_collection_end_the_worker(write) -> None:
    path = write(CODE)
    for end in ("close", "forget"):
        process = UserProcess(path, time_limit=20)
        (pid,) = call(process, "pid")
        if end == "close":
            process.close()
        del process
        gc.collect()
        assert gone(int(str(pid)))
        until = time.monotonic() + 20  # it is reaped by a thread, which may be late on a busy machine
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.02)
        with pytest.raises(ProcessLookupError):  # reaped: not even a zombie is left
            os.kill(int(str(pid)), 0)


PARENT = """
import asyncio, sys, time
from pathlib import Path
from novarl.rewards.process import UserProcess
process = UserProcess(Path(sys.argv[1]), time_limit=300)
print(asyncio.run(process.call(process.function("pid"), [((), {{}})]))[0], flush=True)
{then}
"""
HANG = 'asyncio.run(process.call(process.function("hang"), [((1,), {})]))'


@pytest.mark.parametrize(("then", "number"), [("pass", None), (HANG, signal.SIGKILL), (HANG, signal.SIGTERM)])
def test_no_worker_outlives_its_parent(write, then: str, number: int | None) -> None:
    """It ends when the parent leaves, also when that is killed while a reward is spinning."""
    command = [sys.executable, "-c", PARENT.format(then=then), str(write(CODE))]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    if number is not None:
        time.sleep(0.3)
        parent.send_signal(number)
    parent.wait(10)
    parent.stdout.close()
    assert gone(worker)


def test_rewards_and_their_worker_never_load_torch(write) -> None:
    path = write("import sys\ndef reward_fn(messages, answer): return 'torch' in sys.modules\n")
    code = (
        "import asyncio, sys; from novarl.rewards import registry; from novarl.rewards.user_file import load\n"
        "from novarl.tasks import registry as tasks; tasks.find_task('sort')\n"
        "from novarl.core.types import Prompt, Rollout\n"
        f"reward = load({str(path)!r})\n"
        "rollout = Rollout(Prompt('a', (), ()), 0, 0, (), (), '')\n"
        "print('torch' in sys.modules, asyncio.run(reward([rollout])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False [False]"


def test_a_workers_memory_is_its_own(tmp_path: Path) -> None:
    """What files back, such as libraries, is there once for all workers."""
    (tmp_path / "file.py").write_text("def nothing(): pass")
    pipe, never = Pipe(), threading.Event()
    try:
        deadline = time.monotonic() + 30
        pipe.send({"op": "load", "path": str(tmp_path / "file.py")}, deadline=deadline, cancelled=never)
        assert "nothing" in pipe.receive(deadline=deadline, cancelled=never)["functions"]
        lines = Path(f"/proc/{pipe.process.pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        own, whole = (1024 * int(status[name].split()[0]) for name in ("RssAnon", "VmRSS"))
        used = pipe.used()
        assert used is not None and abs(used[0] - own) < 2**20 < whole - own
    finally:
        pipe.kill()
