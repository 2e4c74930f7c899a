"""An error message with the file and line of the user's code that raised it."""

from __future__ import annotations

import re
import sysconfig

from novarl.core.version import PACKAGE

_FRAME = re.compile(r'^ *File "(.+)", line (\d+)', re.MULTILINE)
_NOT_THE_USERS = (
    str(PACKAGE),
    sysconfig.get_path("stdlib"),
    "site-packages",
    "<",
)


def blame(error: str) -> str:
    """The first line of `error` and, from the traceback after it, the innermost frame in the user's code.

    >>> blame("raised KeyError: 'x'\\nTraceback ...\\n  File \\"/home/me/mine.py\\", line 3, in score")
    "raised KeyError: 'x' (/home/me/mine.py, line 3)"
    """
    said = error.strip().partition("\n")[0]
    frames: list[tuple[str, str]] = _FRAME.findall(error)
    own = [frame for frame in frames if not any(part in frame[0] for part in _NOT_THE_USERS)]
    return f"{said} ({own[-1][0]}, line {own[-1][1]})" if own else said
