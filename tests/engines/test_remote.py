"""A part in a process of its own: what it returns and raises comes back, and neither side outlives the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.engines.shared_weights import SharedWeights
from novarl.processes.remote import RemoteObject

both = pytest.mark.parametrize("fork", [True, False], ids=["fork", "fresh"])
"""Both kinds of child; nothing here computes, so that this process can be forked although it has threads."""


class Odd(Exception):
    """Cannot be made anew from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one + two)


class Part:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        if not folder:
            raise NovaError("there is no folder", where="folder", fix="name one")

    def about(self, value: Any) -> Any:
        return value, os.getpid(), os.environ.get("MINE"), os.getpgid(0)

    def fail(self, kind: str) -> None:
        if kind == "nova":
            raise NovaError("wrong", where="here", fix="so")
        if kind == "odd":
            raise Odd(1, 2)
        raise ZeroDivisionError(kind)

    def sleep(self) -> None:
        Path(self.folder, "asleep").touch()
        time.sleep(300)
        Path(self.folder, "awake").touch()

    def close(self) -> None:
        Path(self.folder, "closed").touch()


def remote(folder: object, fork: bool) -> RemoteObject:
    made = RemoteObject(what="the part", fix="start it again", environ={"MINE": "yes"}, fork=fork)
    made.make(Part, str(folder))
    return made


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not Path(f"/proc/{pid}").exists()


@both
def test_values_and_errors_come_back(tmp_path: Path, fork: bool) -> None:
    part = remote(tmp_path, fork)
    value, pid, mine, group = part.call("about", {"a": (1, 2.5)})
    assert value == {"a": (1, 2.5)} and pid != os.getpid() and mine == "yes"
    assert group != os.getpgid(0), "Ctrl-C would reach it"
    with pytest.raises(ZeroDivisionError, match="none") as caught:
        part.call("fail", "none")
    assert "raised in the part" in caught.value.__notes__[0] and "in fail" in caught.value.__notes__[0]
    with pytest.raises(NovaError) as user:
        part.call("fail", "nova")
    assert str(user.value) == "here: wrong (so)" and not hasattr(user.value, "__notes__")
    with pytest.raises(RuntimeError, match="Odd: 3"):
        part.call("fail", "odd")
    assert part.call("about", 1)[0] == 1, "an error is no end"
    part.close()
    assert (tmp_path / "closed").exists() and gone(pid)


@both
def test_an_error_of_the_beginning_comes_with_the_first_call(fork: bool) -> None:
    part = remote("", fork)
    with pytest.raises(NovaError, match="there is no folder"):
        part.call("about", 1)
    part.close()


@both
def test_a_killed_part_is_one_clear_error(tmp_path: Path, fork: bool) -> None:
    part = remote(tmp_path, fork)
    pid = part.call("about", 1)[1]
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(NovaError) as caught:
        part.call("sleep")
    assert str(caught.value) == "the part died unexpectedly: it was killed by SIGKILL (start it again)"
    part.close()


@both
def test_close_ends_a_call_that_is_under_way(tmp_path: Path, fork: bool) -> None:
    part = remote(tmp_path, fork)
    pid = part.call("about", 1)[1]
    errors: list[BaseException] = []

    def call() -> None:
        try:
            part.call("sleep")
        except NovaError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    while not (tmp_path / "asleep").exists():
        time.sleep(0.01)
    part.close()
    thread.join()
    assert len(errors) == 1 and gone(pid) and not (tmp_path / "awake").exists()


@both
def test_a_launcher_that_ignores_ends_of_children_is_no_fault(tmp_path: Path, fork: bool) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        part = remote(tmp_path, fork)
        pid = part.call("about", 1)[1]
        part.close()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert gone(pid)


def test_ctrl_c_waits_for_the_fork(tmp_path: Path) -> None:
    masks: list[set[int]] = []
    os.register_at_fork(before=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ())))  # type: ignore[arg-type]
    part = remote(tmp_path, fork=True)
    assert {signal.SIGINT, signal.SIGTERM} <= masks[0]
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())
    part.close()


PARENT = """
import sys
from tests.engines.test_remote import remote
part = remote(sys.argv[1], fork=sys.argv[2] == "True")
print(part.call("about", 1)[1], flush=True)
part.call("sleep")
"""


@both
def test_a_killed_parent_takes_its_part_with_it(tmp_path: Path, fork: bool) -> None:
    with (tmp_path / "err").open("w") as err:
        parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(tmp_path), str(fork)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    while not (tmp_path / "asleep").exists():
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert Path(f"/proc/{pid}").exists(), "Ctrl-C is the parent's to obey"
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pid)
    assert (tmp_path / "err").read_text() == ""


IMPORTED = """
import os, sys
import novarl.compose.rl
from novarl.processes.remote import RemoteObject
from tests.engines.test_remote import Part
part = RemoteObject(what="the part", fix="start it again")
part.make(Part, sys.argv[1])
_, pid, _, _ = part.call("about", 1)
command = lambda pid: open(f"/proc/{pid}/cmdline").read()
print(command(pid) == command(os.getpid()), os.getcwd() == os.readlink(f"/proc/{pid}/cwd"))
print(os.readlink(f"/proc/{pid}/fd/0"), flush=True)
import torch
torch.ones(1000, 1000) @ torch.ones(1000, 1000)
other = RemoteObject(what="the part", fix="start it again")
other.make(Part, sys.argv[1])
_, pid, _, _ = other.call("about", 1)
print(command(pid) == command(os.getpid()))
part.close(), other.close()
"""


def test_imports_start_no_thread_and_computing_does(tmp_path: Path) -> None:
    """What a run imports leaves it one thread, so that its sampling process is a fork of it; later ones are not."""
    variables = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", IMPORTED, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "True True\n/dev/null\nFalse\n", "")


def test_weights_are_seen_by_both_and_leave_no_file() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3, bias=False)).double()
    model.append(nn.Linear(3, 5))
    model[2].weight = model[0].weight  # type: ignore[assignment]  # tied: once in the block
    mine = SharedWeights.of(model)
    theirs = SharedWeights.open(mine.path, mine.size, mine.layout)
    mine.forget()
    assert not Path(mine.path).exists(), "the writer's file is closed, and no other name was ever there"
    mine.write(model)
    seen = dict(theirs.named_tensors())
    assert seen.keys() == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(seen[name], parameter) for name, parameter in model.named_parameters())
    with torch.no_grad():
        model[0].bias.add_(1.0)  # type: ignore[operator, union-attr]
    assert not torch.equal(seen["0.bias"], model[0].bias)  # type: ignore[arg-type]
    mine.write(model)
    assert torch.equal(seen["0.bias"], model[0].bias)  # type: ignore[arg-type]


def test_the_weights_have_no_file_name_at_any_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So a process that is killed, whenever that is, leaves no weights in memory."""
    seen = []

    def look(name: str, module: object) -> None:
        real = getattr(module, name)

        def looking(*args: object, **options: object) -> object:
            seen.append((name, list(tmp_path.iterdir())))
            return real(*args, **options)

        monkeypatch.setattr(module, name, looking)

    monkeypatch.setattr("novarl.engines.shared_weights._IN_MEMORY", tmp_path)
    look("posix_fallocate", os)
    look("from_file", torch)
    weights = SharedWeights.of(torch.nn.Linear(2, 2))
    assert seen == [("posix_fallocate", []), ("from_file", [])] and list(tmp_path.iterdir()) == []
    assert os.fstat(weights.file or -1).st_size == weights.size
    weights.forget()


def test_where_no_address_is_left_for_the_weights_nothing_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(path: str, **_: object) -> None:
        raise RuntimeError(f"unable to mmap 64 bytes from file <{path}>: Cannot allocate memory (12)")

    monkeypatch.setattr("novarl.engines.shared_weights._IN_MEMORY", tmp_path)
    monkeypatch.setattr(torch, "from_file", full)
    with pytest.raises(RuntimeError, match="Cannot allocate"):
        SharedWeights.of(torch.nn.Linear(2, 2))
    assert list(tmp_path.iterdir()) == []
