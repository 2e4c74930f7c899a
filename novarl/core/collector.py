"""Python's garbage collector, which rests while a command starts.

Imports make some hundred thousand objects that stay for good. Looking through them again and again takes half a second
of a start that imports transformers, and later a tenth of a second of whichever step it falls into.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OFTEN = 20_000
"""New objects after which the collector looks for cycles among them. Python's 700 are made many times in a step; what
is large, tensors, goes with its last reference."""


@contextmanager
def resting() -> Iterator[None]:
    """No collection within, or until `started` is called there."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def started() -> None:
    """What exists by now stays, and is not looked at again; from here on collections go on. Nothing where none rest."""
    if not gc.isenabled():
        gc.freeze()
        gc.set_threshold(OFTEN)
        gc.enable()
