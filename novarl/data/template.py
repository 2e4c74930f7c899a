"""Render chat templates, and find what a template writes around an assistant turn."""

from __future__ import annotations

import datetime
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from novarl.core.errors import NovaError
from novarl.core.types import Message, Tokenizer
from novarl.data.continuation import decode, encode
from novarl.data.formats import Refused
from novarl.processes.renderer import TemplateFailed, confined

_DIRECTIVES = tuple(f"%{flag}{letter}" for flag in ("", "-") for letter in "aAbBcdDeFHIjmMpSTuUVwWxXyYzZ")
REJECTED = "the chat template rejects the row"
_PROBE = "probe"
_QUESTION: Message = {"role": "user", "content": "question"}
_ANSWER: Message = {"role": "assistant", "content": _PROBE}
_CALL = {"type": "function", "id": "probe0001", "function": {"name": _PROBE, "arguments": {}}}
_BRACKETED = re.compile(r"[<\[].+[>\]]")


@dataclass(frozen=True, slots=True)
class TurnShape:
    """What a chat template writes around the content of the last assistant turn: `opening` is white space before it,
    `written` everything after it, and `closing` the part that the policy generates, up to the token `end` (None: the
    turn ends in text)."""

    opening: str = ""
    written: str = ""
    closing: str = ""
    end: int | None = None


def write(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    generation: bool,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The rendered conversation, with `generation` up to the next assistant turn. NovaError: there is no template, or
    it exceeds a limit (`processes.renderer`). Refused: it rejects the messages."""
    if not tokenizer.chat_template:
        raise NovaError("the tokenizer has no chat template", where="model", fix="set apply_chat_template=false")
    try:
        with confined():
            text: Any = tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation, **(template_kwargs or {})
            )
    except NovaError:
        raise
    except TemplateFailed as error:
        raise Refused("", f"{REJECTED}: {error}") from error
    except Exception as error:  # templates raise to reject conversations (roles that must alternate)
        raise Refused("", f"{REJECTED}: {type(error).__name__}: {error}") from error
    return str(text)


def stop_tokens(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """The tokens that end an assistant turn: eos, and those that the chat template puts after an answer or a call."""
    found = [tokenizer.eos_token_id]
    if tokenizer.chat_template:
        for turn in (_ANSWER, {"role": "assistant", "content": "", "tool_calls": [_CALL, _CALL]}):
            if (end := _shape(tokenizer, turn, template_kwargs).end) is not None:
                found.append(end)
    return tuple(dict.fromkeys(found))


def writes_date(template: str) -> bool:
    """Whether a chat template reads the current date."""
    return "strftime_now" in template


def dated(template: str, day: datetime.date) -> str:
    """`template` with a `strftime_now` that always returns `day` (0:00)."""
    moment = datetime.datetime.combine(day, datetime.time())
    filters = "".join(f"|replace({name!r}, {moment.strftime(name)!r})" for name in _DIRECTIVES)
    return f"{{%- macro strftime_now(format) -%}}{{{{- format{filters} -}}}}{{%- endmacro -%}}{template}"


def turn_shape(tokenizer: Tokenizer) -> TurnShape:
    """The shape of an answer in the tokenizer's chat template, found with a probe."""
    return _usual(cast("Hashable", tokenizer), str(tokenizer.chat_template))[0]


def turn_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """`stop_tokens` of the tokenizer's chat template, cached."""
    return _usual(cast("Hashable", tokenizer), str(tokenizer.chat_template))[1]


@lru_cache(maxsize=8)
def _usual(tokenizer: Any, template: str) -> tuple[TurnShape, tuple[int, ...]]:
    return _shape(tokenizer, _ANSWER, None), stop_tokens(tokenizer)


def _shape(tokenizer: Tokenizer, turn: Message, template_kwargs: Mapping[str, Any] | None) -> TurnShape:
    """The shape around the probe in `turn`; empty if the template rejects it."""
    try:
        header = write(tokenizer, [_QUESTION], generation=True, template_kwargs=template_kwargs)
        whole = write(tokenizer, [_QUESTION, turn], generation=False, template_kwargs=template_kwargs)
        tokens = encode(tokenizer, whole.rstrip())
    except Refused:
        return TurnShape()
    if turn.get("tool_calls"):
        end = tokens[-1] if tokens and _is_marker(tokenizer, tokens[-1]) else None
        if end is not None and tokens.count(end) - encode(tokenizer, header).count(end) > 1:
            end = None  # it ends each call, not the turn
        return TurnShape(end=end)
    before, found, written = whole.rpartition(_PROBE)
    if not found:
        return TurnShape()
    end = next((token for token in encode(tokenizer, written) if _is_marker(tokenizer, token)), None)
    closing = written.rstrip()
    if end is not None:
        text, marker, _ = written.partition(decode(tokenizer, [end]))
        closing = text + marker
    between = before[len(header) :] if before.startswith(header) else ""
    return TurnShape(between if between.isspace() else "", written, closing, end)


def _is_marker(tokenizer: Any, token: int) -> bool:
    """Whether a token is a marker and not a piece of text."""
    if token == getattr(tokenizer, "unk_token_id", None):
        return False
    text = decode(tokenizer, [token]).strip()
    special = text != "" and not tokenizer.decode([token], skip_special_tokens=True)
    added = token in getattr(tokenizer, "added_tokens_decoder", ())
    return special or added or _BRACKETED.fullmatch(text) is not None
