"""Exit functions of tracker libraries. A library that hangs would hang in them too, and the process would not end.

`atexit` calls what a library registered, with no limit. Here, what is registered in a tracker's thread is held back
until the tracker has finished; that of a tracker that was left is never called.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

_held = threading.local()
_register = atexit.register


def _routed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """`atexit.register`, except in a thread of a tracker."""
    functions = getattr(_held, "functions", None)
    if functions is None:
        return _register(function, *args, **kwargs)
    functions.append(partial(function, *args, **kwargs))
    return function


@contextmanager
def held_back(functions: list[Callable[[], Any]]) -> Iterator[None]:
    """Collect in `functions` what this thread registers."""
    setattr(atexit, "register", _routed)  # noqa: B010 - its type is generic
    _held.functions = functions
    try:
        yield
    finally:
        del _held.functions


def register(functions: list[Callable[[], Any]]) -> None:
    """Register what was held back, in its order."""
    for function in functions:
        _register(function)
