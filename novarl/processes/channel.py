"""The worker's end of `core.pipe`: JSON requests in, JSON replies out, and nothing else taken for either.

Requests are lines on standard input, replies go to what was standard output. Both are moved aside first, so that a
print, of whatever runs in the worker, goes to standard error, and `input()` finds the end of file. The first line of
all is a secret; every reply begins with it and its own length, `SECRET BYTES\\n`. `core.keeper` ends the worker with
the run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from novarl.processes.keeper import keep

Message = dict[str, Any]

MOST_BYTES = 64_000_000
"""The largest reply."""


class TooLarge(Exception):
    """A reply of more than MOST_BYTES."""


class Channel:
    """Requests to iterate over, up to the end of the run; `reply` may be called from any thread."""

    def __init__(self) -> None:
        keep()
        requests, replies = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self._requests, self._replies = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
        self._secret = self._requests.readline().strip()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Message]:
        return map(json.loads, self._requests)

    def reply(self, message: Message) -> None:
        """Send one reply. TooLarge: nothing was sent."""
        body = json.dumps(message).encode()
        if len(body) > MOST_BYTES:
            raise TooLarge(f"{len(body) / 1e6:.1f} MB, and a reply may have {MOST_BYTES / 1e6:.0f} MB")
        with self._lock:
            self._replies.write(b"%s %d\n" % (self._secret, len(body)))
            self._replies.write(body)
            self._replies.flush()
