"""Find keys of rows and messages that nothing reads, so that none is dropped silently."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from novarl.core.types import Message, Tokenizer
from novarl.data.formats import SYSTEM, Refused
from novarl.data.template import write

_READ = frozenset(("role", "content", "weight", "train"))
"""Keys of a message that are read directly."""
_FOR_TEMPLATE = ("tools", "chat_template_kwargs")


_TRIED = 100
_NOTHING: tuple[Any, ...] = (None, "", [], {})


@dataclass(slots=True)
class Unused:
    """Collects the columns and message keys of a run's rows that nothing reads. A chat template reads an argument if
    its source contains the name, and a message key if removing it changes one of the first `_TRIED` rows with it."""

    columns: set[str] = field(default_factory=set)
    keys: set[str] = field(default_factory=set)
    kwargs: set[str] = field(default_factory=set)
    templated: bool = True
    _used: set[str] = field(default_factory=set)
    _tried: Counter[str] = field(default_factory=Counter)
    _words: frozenset[str] | None = None

    def row(
        self,
        value: Mapping[str, Any],
        read: Iterable[str | None],
        messages: Iterable[Message],
        *,
        tokenizer: Tokenizer,
        templated: bool,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Add one row: `read` are the columns that were read, `kwargs` the template's keyword arguments."""
        if self._words is None:
            self.templated = templated
            self._words = frozenset(re.findall(r"\w+", str(tokenizer.chat_template)) if templated else ())
        heads = {name if name in value else name.partition(".")[0] for name in read if name}
        used = heads | {*SYSTEM, *(("input",) if "instruction" in heads else ())}
        used |= set(_FOR_TEMPLATE) if templated else set()
        self.columns |= {name for name, item in value.items() if name not in used and item not in _NOTHING}
        messages = list(messages)
        for key in {key for message in messages for key in message} - _READ - self._used:
            self._tried[key] += 1
            if self._tried[key] > _TRIED:
                continue
            if templated and key in self._words and _written(tokenizer, messages, key, kwargs):
                self._used.add(key)
                self.keys.discard(key)
            else:
                self.keys.add(key)
        self.kwargs |= kwargs.keys() - self._words - {"tools"}

    def notes(self, reads: Collection[str] | None = ()) -> list[str]:
        """Notes for the start of a run. `reads`: the columns that rewards read (None: all)."""
        found = []
        columns = sorted(self.columns if reads is not None else self.columns & set(_FOR_TEMPLATE))
        columns = [name for name in columns if name not in (reads or ())]
        if columns:
            why = ""
            if not self.templated and (lost := [name for name in columns if name in _FOR_TEMPLATE]):
                why = f" ({' and '.join(lost)}: for the chat template, which apply_chat_template=false disables)"
            found.append(f"unused data columns: {', '.join(columns)}{why}")
        if self.keys:
            who = "message keys that the chat template does not use" if self.templated else "unused message keys"
            found.append(f"{who}: {', '.join(sorted(self.keys))}")
        if self.kwargs:
            names = ", ".join(sorted(self.kwargs))
            found.append(f"keyword arguments that the chat template does not use: {names}")
        return found


def _written(tokenizer: Tokenizer, messages: list[Message], key: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether removing this key changes how the chat template renders these messages."""
    bare = [{name: item for name, item in message.items() if name != key} for message in messages]
    try:
        given, without = (write(tokenizer, some, generation=False, template_kwargs=kwargs) for some in (messages, bare))
    except Refused:  # the template requires the key, or rejects the comparison
        return True
    return given != without
