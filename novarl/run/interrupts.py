"""Ctrl-C and termination signals."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any


class Stopped(Exception):
    """The run was stopped by Ctrl-C, SIGTERM or SIGHUP, after finishing the update and saving."""


class Interrupts:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP (closed terminal) into a request to stop after the current update; the
    second one stops at once. An ignored SIGHUP (nohup) stays ignored. Only the main thread handles signals."""

    def __init__(self) -> None:
        self.wanted = False
        self.before: dict[int, Any] = {}
        self.entered = 0

    def __enter__(self) -> Interrupts:
        self.entered += 1
        if self.entered == 1 and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.entered -= 1
        while self.before and self.entered == 0:
            number, handler = self.before.popitem()
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        with suppress(OSError):  # the terminal may be gone
            print("\nStopping after this update, then saving. Press Ctrl-C again to stop immediately.", file=sys.stderr)
