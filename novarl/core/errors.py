"""The one error that users see."""

from __future__ import annotations


class NovaError(Exception):
    """A mistake that the user can mend: what happened, where, and how to mend it.

    The command line prints it as one line and exits with code 2; any other exception is ours (code 1).

    >>> str(NovaError("unknown role 'usr'", where="chat.jsonl:3 messages[0].role", fix="use 'user'"))
    "chat.jsonl:3 messages[0].role: unknown role 'usr' (use 'user')"
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what)

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        fix = f" ({self.fix})" if self.fix else ""
        return " ".join(f"{where}{self.what}{fix}".split())
