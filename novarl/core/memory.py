"""Telling that memory has run out, which every allocator says in words of its own."""

from __future__ import annotations

import errno

_SIGNS = (
    *("not enough memory", "can't allocate memory", "out of memory", "bad allocation", "bad_alloc"),
    *("could not create a primitive", "cannot allocate memory", "failed to map segment"),
)
"""What PyTorch says for the CPU's allocator, a GPU's, oneDNN, where its program has no room, and a mapped file; and
what the system says where a library is loaded."""


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory could not be had."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    spoken = isinstance(error, RuntimeError | ImportError | OSError)
    return isinstance(error, MemoryError) or (spoken and any(sign in str(error).lower() for sign in _SIGNS))


def first_line(error: BaseException) -> str:
    """What `error` says, in a line: of several the one that speaks of memory."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if any(sign in line.lower() for sign in _SIGNS)), lines[0])
