"""Distinguish environment errors (disk, input files, system limits) from bugs."""

from __future__ import annotations

import errno
import json
import tomllib
import traceback

from novarl.core.checkpoint import disk_error
from novarl.core.errors import NovaError
from novarl.core.memory import first_line, out_of_memory

_ON = "then resume from the last checkpoint with resume=auto"
_FIXES = {
    errno.ENOSPC: f"free some space, {_ON}",
    errno.EDQUOT: f"free some space, {_ON}",
    errno.EMFILE: f"raise the limit of open files (ulimit -n), {_ON}",
    errno.ENFILE: f"close other programs, {_ON}",
    errno.EIO: f"check the disk, {_ON}",
    errno.EROFS: f"make the disk writable, {_ON}",
    errno.ENAMETOOLONG: "choose a shorter name",
}
_PARSERS = ("json", "tomllib", "yaml")
"""Parsers in which deeply nested text exhausts Python's stack."""


def environment_fault(error: Exception) -> NovaError | None:
    """The NovaError for an error caused by the environment; None for bugs."""
    if out_of_memory(error):  # if the work could not be split automatically
        fix = "use a smaller model or lora.rank, or lower micro.max_tokens; resume=auto continues from a checkpoint"
        return NovaError(f"the run stopped: out of memory ({first_line(error)})", fix=f"{fix}, if any")
    if (refused := disk_error(error)) is not None:
        why = refused.strerror or first_line(refused) or type(refused).__name__
        where = str(refused.filename) if refused.filename else "disk" if refused.errno == errno.ENOSPC else None
        fix = _FIXES.get(refused.errno or 0, f"fix this, {_ON}")
        return NovaError(f"the run stopped: {why}", where=where, fix=fix)
    if isinstance(error, UnicodeError):
        fix = "check for names or texts with lone surrogates, or files that are not UTF-8"
        return NovaError(f"the run stopped: text that is not valid Unicode ({error})", fix=fix)
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return NovaError(
            "the run stopped: a file name with a null character", fix="check the names in the configuration"
        )
    if isinstance(error, json.JSONDecodeError | tomllib.TOMLDecodeError):
        return NovaError(f"the run stopped: an input file is damaged ({error})", fix="restore it from a copy")
    if isinstance(error, RecursionError) and _while_parsing(error):
        return NovaError("the run stopped: an input file is nested too deeply", fix="restore it from a copy")
    return None


def _while_parsing(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(f"/{name}/" in frame.filename.replace("\\", "/") for frame in frames[-50:] for name in _PARSERS)
