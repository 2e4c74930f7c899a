"""TensorBoard event files under `tb/`, without torch and without a thread.

Metrics of a warm-up are under `warmup/`, so that its steps do not mix with those of training. Each record is flushed
before `step` returns, so that a checkpoint can record the file's length and a resumed run can truncate it there.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from novarl.core.errors import visible
from novarl.observe.sinks.records import framed

PREFIXES = {"warmup": "warmup/"}
_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class TensorBoardSink:
    """Writes a new event file in `directory` for each instance; TensorBoard joins them to one curve."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        directory.mkdir(parents=True, exist_ok=True)
        self._event, self._summary = Event, Summary
        self._file = (directory / _fresh_name(directory)).open("xb")
        self._prefix = ""
        self._put(self._event(wall_time=time.time(), file_version="brain.Event:2"))

    def step(self, step: int, record: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=self._prefix + visible(name), simple_value=value) for name, value in record.items()
        ]
        self._put(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "phase":
            self._prefix = PREFIXES.get(fields["name"], "")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _put(self, event: Any) -> None:
        self._file.write(framed(event.SerializeToString()))
        self._file.flush()


def _fresh_name(directory: Path) -> str:
    """TensorBoard reads event files in name order, so a later file needs a later time in its name."""
    taken = [int(match[1]) for path in directory.iterdir() if (match := _NAME.match(path.name))]
    seconds = max([int(time.time()), *(stamp + 1 for stamp in taken)])
    return f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}"
