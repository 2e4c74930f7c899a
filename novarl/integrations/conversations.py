"""Prompts and completions of other libraries, which are texts or lists of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def spoken(prompt: Any, completion: Any) -> dict[str, Any]:
    """The fields `prompt`, `text` and, of a conversation, `messages` of an answer (docs/run_directory.md)."""
    asked, said = messages(prompt), messages(completion)
    if said is None and asked is None:
        return {"prompt": _text(prompt), "text": _text(completion)}
    said = [{"role": "assistant", "content": _text(completion)}] if said is None else said
    asked = [{"role": "user", "content": _text(prompt)}] if asked is None else asked
    users = [message["content"] for message in asked if message["role"] == "user"]
    answers = [message["content"] for message in said if message["role"] == "assistant"]
    return {
        "prompt": users[0] if users else "\n".join(message["content"] for message in asked),
        "text": "\n".join(answers),
        "messages": [*asked, *said],
    }


def messages(value: Any) -> list[dict[str, Any]] | None:
    """`value` as messages with text contents, or None if it is no conversation. Other fields, such as `tool_calls`,
    are kept; images become the text [image]."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(one, Mapping) and "role" in one for one in value):
        return None
    given = ({name: part for name, part in one.items() if part is not None} for one in value)
    return [one | {"role": str(one["role"]), "content": _text(one.get("content"))} for one in given]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return "".join(_part(part) for part in value)
    return "" if value is None else str(value)


def _part(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    return str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]"
