"""The process between a run and its child, which ends the child. It runs no code but this.

    run ── keeper ── child (a user's file, the sampler) ── processes that the child starts

The keeper ends the child and all of its descendants as soon as the run is gone (its end of the pipe closes, also after
`kill -9`), sends SIGTERM, or the child itself ends. This works whatever the child is doing. A thread of the child could
not do it: it would wait for the interpreter's lock, which a regular expression may hold for ever.

On Linux the keeper also adopts every process that loses its parent (PR_SET_CHILD_SUBREAPER), so that no session or
double fork escapes it, and the kernel ends the child if the keeper itself is killed (PR_SET_PDEATHSIG). That signal
follows the *thread* that started a process. The run's threads come and go, so the run itself does not rely on it.
On other systems only the child's own process group ends with it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

_PDEATHSIG, _SUBREAPER = 1, 36
"""PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of linux/prctl.h."""
_PATIENCE = 1.0
"""Seconds for killed processes to be gone; one that the user may not kill (another user's) is left after them."""


def keep() -> None:
    """Split this process in two: the keeper, which never returns, and the child, which goes on. Standard input must be
    the pipe from the run."""
    _prctl(_SUBREAPER, 1)
    waking, wake = os.pipe()
    for end in (waking, wake):
        os.set_blocking(end, False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake)
    keeper = os.getpid()
    child = os.fork()
    if child:
        _watch(child, waking)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.close(waking)
    os.close(wake)
    os.setsid()  # signals that the user's file sends to its process group do not reach the keeper
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:  # it was killed before the line above
        os._exit(1)


def _watch(child: int, waking: int) -> NoReturn:
    """Wait for the end of the run or of the child, or SIGTERM; then end all, with the child's exit status."""
    os.dup2(2, 1)  # the pipe of replies is the child's alone, and closes with it
    poll = select.poll()
    poll.register(0, 0)  # only that its other end is closed
    poll.register(waking, select.POLLIN)
    run = _run()
    poll.register(run, select.POLLIN if run else 0)
    status = None
    while status is None:
        woken = {number for number, _ in poll.poll()}
        if woken & {0, run} or signal.SIGTERM in os.read(waking, 1024):
            break
        status = _ended(child)
    _end_all(child)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:  # by the same signal, without a second core dump
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(0, code))


def _run() -> int:
    """A file that is readable once the run has ended, since a fork of the run may hold its end of the pipe open. 0, the
    pipe, where the system has no such file."""
    try:
        return os.pidfd_open(os.getppid())
    except (AttributeError, OSError):
        return 0


def _ended(child: int) -> int | None:
    """The status of the child if it has ended; orphans that have ended are reaped."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in (0, child):
            return status if pid else None


def _end_all(child: int) -> None:
    """Kill every descendant. Their orphans become children of this process, and their turn comes next."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        for kill, pid in [(os.killpg, child), *((os.kill, one) for one in _children())]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.001)


def _children() -> list[int]:
    try:
        return list(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    except OSError:  # not Linux, or a kernel that does not say: the child's process group has to do
        return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
