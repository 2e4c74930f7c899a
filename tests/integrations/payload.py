"""An object whose unpickling runs code."""

from __future__ import annotations

from typing import Any


def run() -> str:
    Payload.ran.append(True)
    return "code of the file has run"


class Payload:
    ran: list[bool] = []  # noqa: RUF012 - shared on purpose

    def __reduce__(self) -> tuple[Any, ...]:
        return run, ()
