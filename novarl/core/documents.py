"""Read small JSON files, with a one-sentence error if they are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError


def read_object(path: Path, *, fix: str = "restore it from a copy") -> dict[str, Any]:
    """The JSON object in the file `path`. Raises NovaError if it is unreadable or not valid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NovaError(f"cannot be read: {error.strerror}", where=str(path), fix=fix) from None
    except RecursionError:
        raise NovaError("is damaged: it is nested too deeply", where=str(path), fix=fix) from None
    except UnicodeDecodeError:
        raise NovaError("is damaged: not UTF-8 text", where=str(path), fix=fix) from None
    except ValueError as error:  # not JSON, or a number with thousands of digits
        raise NovaError(f"is damaged: not JSON ({error})", where=str(path), fix=fix) from None
    if not isinstance(value, dict):
        raise NovaError("is damaged: not a JSON object", where=str(path), fix=fix)
    return value
