"""Recognise out-of-memory errors, which every allocator words differently."""

from __future__ import annotations

import errno

_SIGNS = (
    *("not enough memory", "can't allocate memory", "out of memory", "bad allocation", "bad_alloc"),
    *("could not create a primitive", "cannot allocate memory", "failed to map segment"),
)
"""Messages of PyTorch (CPU, GPU, oneDNN, mapped files) and of the system when loading a library."""


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` is an out-of-memory error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    spoken = isinstance(error, RuntimeError | ImportError | OSError)
    return isinstance(error, MemoryError) or (spoken and any(sign in str(error).lower() for sign in _SIGNS))


def first_line(error: BaseException) -> str:
    """One line of the message of `error`, preferably the one about memory."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if any(sign in line.lower() for sign in _SIGNS)), lines[0])
