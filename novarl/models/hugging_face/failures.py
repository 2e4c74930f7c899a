"""Errors of transformers in one line, and its console output turned off."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pickle import UnpicklingError

from novarl.core.errors import NovaError
from novarl.models.files import WHOLE

NAMES = "use a built-in name (tiny, small), a model directory, or a Hub id that can be reached"

UNREADABLE = "no causal language model could be loaded"

MEND = f"fix config.json, or {WHOLE}"


@contextlib.contextmanager
def explained(name: str, what: str, *, fix: str | None = None) -> Iterator[None]:
    """Turn any exception of transformers for a missing or broken model into a one-line NovaError."""
    try:
        with quiet():
            yield
    except NovaError:
        raise
    except Exception as error:
        if asks_for_code(error):
            what = "the model contains custom Python code, which is not run by default"
            fix = f"review the code, and if you trust it, set trust_remote_code={name}"
            raise NovaError(what, where=name, fix=fix) from error
        raise NovaError(f"{what}: {reason_of(error)}", where=name, fix=fix) from error


def asks_for_code(error: Exception) -> bool:
    return "trust_remote_code" in str(error)


def reason_of(error: BaseException) -> str:
    """The core message of `error`, on one line."""
    from huggingface_hub.errors import StrictDataclassError

    while isinstance(error, StrictDataclassError) and error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    if isinstance(error, UnpicklingError) or "weights_only" in text:  # torch's message says how to run it
        return "a pickle file contains something other than tensors or is damaged, so it is not read"
    if isinstance(error, KeyError):
        text = str(error.args[0])
        text = text if " " in text else f"{text!r} is missing"
    first, *others = (text or type(error).__name__).splitlines()
    if first.endswith(":") and others:
        first = f"{first} {others[0].strip()}"
    return first.partition(" Errors: ")[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars, tables and retry messages of transformers and the Hub client. Errors are raised."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    shown, verbosities = logging.is_progress_bar_enabled(), (logging.get_verbosity(), hub_logging.get_verbosity())
    logging.disable_progress_bar()
    for library in (logging, hub_logging):
        library.set_verbosity_error()
    try:
        yield
    finally:
        for library, verbosity in zip((logging, hub_logging), verbosities, strict=True):
            library.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
