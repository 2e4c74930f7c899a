"""Chat templates rendered within bounds of time, memory, recursion and output: in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from novarl.core.errors import NovaError
from novarl.processes.child import Child, Died

TIME_LIMIT = 10.0
"""Seconds for one conversation, which takes about a ten-thousandth of one."""
START_LIMIT = 120.0
"""Seconds in which the process must be there."""
MEMORY = 2**30
"""Bytes that the process may have."""
MOST_CHARACTERS, SPREAD = 1_000_000, 20
"""A template may write so many characters, and so many more for each that it was given."""

_HARD = {"MemoryError": "exceeds the memory limit of 1 GiB", "RecursionError": "recurses too deeply"}
_FIX = "use another template: chat_template=FILE"
_lock = threading.RLock()
_children: dict[int, Child] = {}
"""The process, by the process that it belongs to: a fork starts its own."""


class TemplateFailed(Exception):
    """A template raised: it does not take this conversation, or is no template. `type: message`, as it was raised."""


def render(arguments: dict[str, Any]) -> str:
    """transformers' `render_jinja_template(**arguments)` of one conversation. TemplateFailed: it raised. NovaError: it
    went beyond a bound."""
    most = MOST_CHARACTERS + SPREAD * len(json.dumps(arguments, default=str))
    with _lock:
        child = _children.get(os.getpid())
        if child is None or child.ended:
            child = _start()
        deadline = time.monotonic() + TIME_LIMIT
        try:
            child.send({"arguments": arguments, "most": most}, deadline=deadline)
            reply = child.receive(deadline=deadline)
        except BaseException as error:  # also Ctrl-C in the middle of an answer
            _children.pop(os.getpid()).kill()
            if isinstance(error, TimeoutError):
                what = f"took longer than {TIME_LIMIT:g} s for one conversation and was stopped"
                raise _beyond(what) from None
            if isinstance(error, Died):
                raise _beyond(f"ended its process, which {error}") from None
            raise
    if "length" in reply:
        raise _beyond(f"writes {reply['length']:,} characters for one conversation")
    if "error" not in reply:
        return str(reply["text"])
    kind, message = reply["error"]
    if kind in _HARD:
        raise _beyond(_HARD[kind])
    if kind in ("OverflowError", "TooLarge"):  # of the sandbox's ranges; of a text beyond what can be sent
        raise _beyond(f"exceeds a limit: {message}")
    raise TemplateFailed(f"{kind}: {message}")


@contextlib.contextmanager
def confined() -> Iterator[None]:
    """Meanwhile what transformers' tokenizers render is rendered here."""
    module: Any = sys.modules.get("transformers.tokenization_utils_base")
    if module is None:
        yield
        return
    with _lock:
        own, module.render_jinja_template = module.render_jinja_template, _render_all
        try:
            yield
        finally:
            module.render_jinja_template = own


def _render_all(*, conversations: Sequence[Any], **arguments: Any) -> tuple[list[str], list[Any]]:
    """In the place of transformers' `render_jinja_template`."""
    return [render({"conversations": [one], **arguments}) for one in conversations], []


def _start() -> Child:
    try:
        child = Child("novarl.models.rendering")
    except OSError as error:
        what = f"cannot start the process for chat templates: {error.strerror or error}"
        raise NovaError(what, fix="close other programs") from error
    deadline = time.monotonic() + START_LIMIT
    try:
        child.send({"memory": MEMORY}, deadline=deadline)
        child.receive(deadline=deadline)
    except BaseException as error:
        child.kill()
        if not isinstance(error, TimeoutError | Died):
            raise
        why = error if isinstance(error, Died) else f"did not start within {START_LIMIT:g} s"
        what = f"the process for chat templates {why}"
        raise NovaError(what, fix="reinstall novarl with transformers") from error
    _children[os.getpid()] = child
    return child


def _beyond(what: str) -> NovaError:
    return NovaError(f"the chat template {what}", where="model", fix=_FIX)
