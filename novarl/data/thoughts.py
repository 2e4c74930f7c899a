"""Templates whose prompt opens a thinking block that the finished conversation omits (DeepSeek-R1, QwQ).

The assistant prompt is then not a prefix of the finished conversation. After that prompt the policy generates the
thought, the closing tag and the answer.
"""

from __future__ import annotations

import re

from novarl.core.types import Message

_OPENED = re.compile(
    r"(?P<tag>[<\[](?P<name>\w*(?:think|thought|reason)\w*)[>\]])\s*(?P<close>[<\[]/(?P=name)[>\]]\s*)?\Z",
    re.IGNORECASE,
)
_FIELDS = ("reasoning_content", "reasoning", "thinking")


def after_opened_thought(header: str, whole: str, message: Message) -> str | None:
    """The text after `header` in the rendered turn `whole` of `message`; None if the header opens no thinking block
    that the turn lacks."""
    opened = _OPENED.search(header)
    before = header[: opened.start()].rstrip() if opened else ""
    if opened is None or not whole.startswith(before):
        return None
    tag, name = opened["tag"], opened["name"]
    closing = f"{tag[0]}/{name}{tag[-1]}"
    rest = whole[len(before) :].lstrip()
    if opened["close"]:  # an empty thought, as when thinking is disabled
        return re.sub(rf"\A{re.escape(tag)}\s*{re.escape(closing)}\s*", "", rest)
    if rest.startswith(tag):
        return rest.removeprefix(tag).lstrip("\n")
    if closing in rest:
        return rest
    content = str(message.get("content") or "")
    stated = next((str(message[name]) for name in _FIELDS if message.get(name)), "")
    if closing in content:
        thought, _, answer = content.partition(closing)
        gap = answer[: len(answer) - len(answer.lstrip())]
        if thought.lstrip().startswith(tag):  # already part of the header
            thought = thought.lstrip().removeprefix(tag).lstrip("\n")
        return thought + closing + gap + rest
    return f"{stated.strip()}\n{closing}\n\n{rest}"
