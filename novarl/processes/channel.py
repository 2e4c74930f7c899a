"""Messages between a process and its child, and the child's end of the connection.

A message is one line, `NONCE BYTES\\n`, and a body of that many bytes. The child reads the nonce from the first line
of its input; a reply that does not begin with it was written by something else in the child, and is refused.

Requests arrive on standard input and replies go to standard output. Both are moved to other descriptors at the start:
what the child prints goes to standard error, and `input()` reads an empty file.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from novarl.processes.keeper import keep


@dataclass(frozen=True, slots=True)
class Codec:
    """How messages are written. `most_bytes` is the size of the largest reply; None: unlimited."""

    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes | bytearray], Any]
    most_bytes: int | None = None


JSON = Codec("JSON", lambda message: json.dumps(message, default=str).encode(), json.loads, most_bytes=64_000_000)
"""For a child that runs a user's file."""
PICKLE = Codec("a pickle", pickle.dumps, pickle.loads)
"""For a child that runs only this package's code: a pickle can run any code where it is read."""


class TooLarge(Exception):
    """A reply is larger than the codec allows."""


class Channel:
    """The child's end. Iterating gives the requests until the parent closes; `reply` may be called from any thread."""

    def __init__(self, codec: Codec = JSON) -> None:
        keep()
        requests, replies = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        self._codec = codec
        self._requests, self._replies = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
        self._nonce = self._requests.readline().strip()
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        while size := int(self._requests.readline().partition(b" ")[2] or 0):
            yield self._codec.decode(self._requests.read(size))

    def reply(self, message: Any) -> None:
        """Send one reply. TooLarge: nothing was sent."""
        body, most = self._codec.encode(message), self._codec.most_bytes
        if most is not None and len(body) > most:
            raise TooLarge(f"{len(body) / 1e6:.1f} MB; the limit for a reply is {most / 1e6:.0f} MB")
        with self._lock:
            self._replies.write(b"%s %d\n" % (self._nonce, len(body)))
            self._replies.write(body)
            self._replies.flush()
