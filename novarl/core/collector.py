"""Pause Python's garbage collector during start-up.

Imports create some hundred thousand permanent objects. Scanning them repeatedly takes half a second of a start that
imports transformers, and later a tenth of a second in some steps.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OFTEN = 20_000
"""Number of new objects that triggers a collection. Python's default of 700 is reached many times in a step, and large
objects (tensors) are freed by reference counting."""


@contextmanager
def resting() -> Iterator[None]:
    """A context without collections, until `started` is called."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def started() -> None:
    """Exclude all existing objects from collection and enable collections again. Does nothing outside `resting`."""
    if not gc.isenabled():
        gc.freeze()
        gc.set_threshold(OFTEN)
        gc.enable()
