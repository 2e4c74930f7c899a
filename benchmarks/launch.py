"""A command in a process of its own, watched from outside: when each line of its diary came, and its memory meanwhile.

Every side of a benchmark is measured by this one clock and this one scale. Times are good to POLL seconds or, where
that is longer, to PART of the time between two lines: looking is work too, on a core that the side has not then.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLL = 0.01
PART = 0.01
SHARE = 0.01
"""Of a core, at most, goes into looking how much memory is held: dozens of processes take milliseconds to ask."""
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(slots=True)
class Timeline:
    """`lines` are (time, line) as they were found; `memory` is (time, resident MB of the process and its children)."""

    started: float
    lines: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    output: str = ""


def launch(
    command: Sequence[str],
    diaries: Sequence[Path],
    out: Path,
    *,
    env: Mapping[str, str],
    prefix: str = "",
    until: Callable[[Mapping[str, Any]], bool] | None = None,
) -> Timeline:
    """Run to the end, or to Ctrl-C after the first line for which `until` holds. `prefix` stands before the command, as
    in `taskset -c 0,1`; the clock starts after it."""
    out.mkdir(parents=True, exist_ok=True)
    pid_file = out / "pid"
    pid_file.unlink(missing_ok=True)  # of an earlier run there
    script = f"echo $$ > {shlex.quote(str(pid_file))}; exec {shlex.join(command)}"
    readers = [_Reader(path) for path in diaries]
    with (out / "output.txt").open("w") as output:
        words = [*shlex.split(prefix), "sh", "-c", script]
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env})
        while process.poll() is None and not (pid_file.exists() and pid_file.stat().st_size):
            time.sleep(POLL / 10)
        found = Timeline(time.time())
        pid, stopped, look, last = int(pid_file.read_text()), False, 0.0, found.started
        while (ended := process.poll()) is None:
            time.sleep(max(POLL, PART * (time.time() - last)))
            now = time.time()
            if now >= look:
                found.memory.append((now, _resident(pid)))
                look = now + (time.time() - now) / SHARE
            fresh = [(now, line) for reader in readers for line in reader.fresh()]
            found.lines += fresh
            last = now if fresh else last
            if until is not None and not stopped and any(until(line) for _, line in fresh):
                os.kill(pid, signal.SIGINT)
                stopped = True
    found.lines += [(time.time(), line) for reader in readers for line in reader.fresh()]
    found.output = (out / "output.txt").read_text()
    if ended and not stopped:
        raise SystemExit(f"{shlex.join(command)} ended with {ended}\n{found.output[-4000:]}")
    return found


class _Reader:
    """The whole lines of a growing JSONL file, each once."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0

    def fresh(self) -> list[dict[str, Any]]:
        try:
            if self.path.stat().st_size == self.position:
                return []
        except FileNotFoundError:
            return []
        with self.path.open("rb") as file:
            file.seek(self.position)
            whole, _, _ = file.read().rpartition(b"\n")
        if not whole:
            return []
        self.position += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]


def _resident(pid: int) -> float:
    """Megabytes of a process and all its children; 0 for one that has just ended."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB
        children = [
            child for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return own + sum(_resident(int(child)) for child in children)
