"""The child process itself: it does not block, leaves nothing behind, and starts at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from novarl.processes.child import Child, Died
from novarl.rewards.user_process import UserProcess
from novarl.rewards.verdict import Failure

CODE = """
    import os, subprocess, sys, time

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

    def hold(folder):
        # Never lets go of the interpreter's lock, after it has started children in all sorts of ways.
        import re
        code = "import os, sys, time; open(os.path.join(sys.argv[1], str(os.getpid())), 'w'); time.sleep(300)"
        child = [sys.executable, "-c", code, folder]
        subprocess.Popen(child)
        subprocess.Popen(child, start_new_session=True)
        if os.fork() == 0:  # a daemon, whose parent is gone
            os.setsid()
            if os.fork() == 0:
                os.execv(sys.executable, child)
            os._exit(0)
        while len(os.listdir(folder)) < 3: time.sleep(0.01)
        open(os.path.join(folder, str(os.getpid())), "w")
        re.match("(a+)+$", "a" * 64 + "b")

    def daemon(folder):
        subprocess.Popen(["sleep", "300"], start_new_session=True)
        return subprocess.Popen(["sleep", "300"], start_new_session=True).pid

    def forge(value):
        body = b'{"call": 0, "value": 1.0}'
        line = b"%s %d\\n%s" % (b"0" * 32, len(body), body) if value == "framed" else body + b"\\n"
        for number in os.listdir("/proc/self/fd"):
            if os.path.islink(f"/proc/self/fd/{number}") and "pipe" in os.readlink(f"/proc/self/fd/{number}"):
                try: os.write(int(number), line)
                except OSError: pass
        return 0.0

    def large(size):
        return "x" * size

    def fails(size):
        raise ValueError("y" * size)

    def greedy(size):
        return len(bytearray(size))

    def where(value):
        return [os.getcwd(), os.environ.get("JUDGE_KEY")]
"""


def gone(pid: int, seconds: float = 60.0) -> bool:
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

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert call(process, "echo", 1) == [1], "and the next one is served by a fresh worker, not after 60 s"
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
from novarl.rewards.user_process import UserProcess
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


PARENT_OF_MANY = """
import asyncio, sys
from pathlib import Path
from novarl.rewards.user_process import UserProcess
process = UserProcess(Path(sys.argv[1]), time_limit=300)
asyncio.run(process.call(process.function("hold"), [((sys.argv[2],), {})]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_what_holds_the_lock_and_its_children_end_with_the_run(write, tmp_path: Path, number: int) -> None:
    """No thread of the worker's gets a turn, and two of its children have left its session."""
    (folder := tmp_path / "pids").mkdir()
    parent = subprocess.Popen([sys.executable, "-c", PARENT_OF_MANY, str(write(CODE)), str(folder)])
    while len(pids := [int(path.name) for path in folder.iterdir()]) < 4:
        time.sleep(0.01)
    parent.send_signal(number)
    parent.wait()
    assert all([gone(pid) for pid in pids])


def test_a_worker_ends_with_its_keeper(write, tmp_path: Path) -> None:
    (folder := tmp_path / "pids").mkdir()
    parent = subprocess.Popen([sys.executable, "-c", PARENT_OF_MANY, str(write(CODE)), str(folder)])
    while len(list(folder.iterdir())) < 4:
        time.sleep(0.01)
    (keeper,) = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
    (worker,) = (int(path.name) for path in folder.iterdir() if parent_of(int(path.name)) == keeper and holds(path))
    os.kill(keeper, signal.SIGKILL)
    assert gone(worker)
    parent.kill()
    parent.wait()
    for path in folder.iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.name), signal.SIGKILL)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def holds(path: Path) -> bool:
    """Whether this process is the worker and not one of the children that it started."""
    return b"novarl.rewards.user_code" in Path(f"/proc/{path.name}/cmdline").read_bytes()


def test_a_session_that_a_reward_has_started_ends_with_a_clean_end_too(write) -> None:
    process = UserProcess(write(CODE), time_limit=60)
    (child,) = call(process, "daemon", None)
    process.close()
    assert gone(int(str(child)))


def test_a_reply_that_the_users_code_wrote_is_not_believed(write) -> None:
    process = UserProcess(write(CODE), time_limit=60)
    for kind, begins in (("plain", '{"call": 0'), ("framed", "00000000")):
        forged, honest = call(process, "forge", kind), call(process, "echo", 2)
        assert isinstance(forged[0], Failure) and honest == [2]
        assert forged[0].reason.startswith(f"wrote to the pipe that is reserved for replies: b'{begins}")
    process.close()


def test_a_value_that_is_too_large_fails_its_own_call(write) -> None:
    process = UserProcess(write(CODE), time_limit=60)
    small, large, after = call(process, "large", 3, 65_000_000, 4)
    assert (small, after) == ("xxx", "xxxx")
    assert isinstance(large, Failure) and large.reason == "returned a value of 65.0 MB; the limit for a reply is 64 MB"
    (failed,) = call(process, "fails", 65_000_000)
    process.close()
    assert isinstance(failed, Failure) and len(failed.reason) < 25_000 and len(failed.traceback) < 25_000
    assert failed.reason.startswith("raised ValueError: yyy")


def test_the_memory_of_a_process_can_be_limited(write) -> None:
    """A call beyond it fails alone; what the limit is, is said where the process dies of it."""
    process = UserProcess(write(CODE), time_limit=60, memory=400_000_000)
    fits, large, after = call(process, "greedy", 1000, 500_000_000, 2000)
    process.close()
    assert (fits, after) == (1000, 2000)
    assert isinstance(large, Failure) and large.reason == "raised MemoryError (its memory is limited to 400 MB)"
    dies = UserProcess(write("import os\ndef die(value): os.abort()"), time_limit=60, memory=400_000_000)
    (failed,) = call(dies, "die", 1)
    dies.close()
    assert isinstance(failed, Failure)
    assert failed.reason == "was killed by SIGABRT (its memory is limited to 400 MB)"


def test_a_reward_has_the_users_environment_and_folder(write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Judges need their keys."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "k")
    process = UserProcess(write(CODE), time_limit=60)
    assert call(process, "where", 1) == [[str(tmp_path), "k"]]
    process.close()


class Spoken:
    """A child whose replies the test writes: in the place of `main`, a program that hands over its output."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "speaks.py").write_text(SPEAKS)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("SPOKEN", str(folder / "replies"))
        os.mkfifo(folder / "replies")
        self.child = Child("speaks")
        self.end = os.open(folder / "replies", os.O_WRONLY)

    def receive(self, seconds: float) -> dict[str, object]:
        return self.child.receive(deadline=time.monotonic() + seconds)

    def write(self, text: bytes) -> None:
        """`%s` is the child's nonce."""
        view = memoryview(text)
        while view:
            view = view[os.write(self.end, view) :]


SPEAKS = """
import os, sys
nonce = sys.stdin.buffer.readline().strip()
with open(os.environ["SPOKEN"], "rb", 0) as replies:
    while piece := replies.read(1 << 16):
        sys.stdout.buffer.write(piece.replace(b"%s", nonce))
        sys.stdout.buffer.flush()
"""


@pytest.fixture
def spoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spoken]:
    made = Spoken(tmp_path, monkeypatch)
    yield made
    os.close(made.end)
    made.child.kill()


def test_the_limit_holds_while_a_reply_flows(spoken: Spoken) -> None:
    size, written, ended = 1000, [], threading.Event()

    def drip() -> None:
        spoken.write(b"%%s %d\n" % size)
        while len(written) < size and not ended.wait(0.005):
            written.append(os.write(spoken.end, b" "))

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        spoken.receive(0.3)
    ended.set()
    thread.join()
    assert 0 < len(written) < size, "it did not wait for the rest"


def test_a_reply_in_pieces_is_put_together(spoken: Spoken) -> None:
    """What has come before a time limit is not lost."""
    body = json.dumps({"value": "z" * 3_000_000}).encode()
    whole = b"%%s %d\n%b" % (len(body), body)
    for begin in range(0, 700, 7):
        spoken.write(whole[begin : begin + 7])
    with pytest.raises(TimeoutError):
        spoken.receive(0.2)
    thread = threading.Thread(target=spoken.write, args=(whole[700:],))
    thread.start()
    assert len(str(spoken.receive(60.0)["value"])) == 3_000_000
    thread.join()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"%s 99000000000\n", "sent a reply of 99000.0 MB; the limit for a reply is 64 MB"),
        (b"%s -5\n", "wrote to the pipe that is reserved for replies"),
        (b"%s 3\n{{{", "sent a reply that is not JSON: b'{{{'"),
        (b"%s 200001\n" + b"[" * 200_001, "sent a reply that is not JSON"),
        (b"0" * 100, "wrote to the pipe that is reserved for replies"),
    ],
)
def test_what_is_no_reply_is_named(spoken: Spoken, line: bytes, said: str) -> None:
    thread = threading.Thread(target=spoken.write, args=(line,))
    thread.start()
    with pytest.raises(Died, match=re.escape(said)):
        spoken.receive(60.0)
    thread.join()


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
