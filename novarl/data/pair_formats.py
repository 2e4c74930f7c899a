"""Detect the format of preference rows, validate them, and convert them to pairs or labeled examples.

| rows | columns |
|---|---|
| pairs with a separate prompt | `prompt` (text or messages) or `messages`, and `chosen`, `rejected`: text or messages |
| the same | `instruction` (with `input`) or `question` or `conversations` in place of the prompt |
| pairs with the prompt in both sides | `chosen`, `rejected`: messages, text, or a transcript in one string |
| labeled answers | `prompt`, `completion` (or `response`), `label`: true or false |
| labeled texts | `text`, `label`: true or false, 1 or 0, positive or negative |

A transcript is "\\n\\nHuman: ... \\n\\nAssistant: ..."; everything before its last answer is the prompt. Pairs may have
a `margin`, a number of at least 0. Other column names are set with the `*_key` options. The format is detected from the
first rows, and every row must match it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.types import Message
from novarl.data.formats import (
    Columns,
    Refused,
    advice,
    cell,
    columns_seen,
    messages_of,
    only_format,
    prompt_turns,
    prompts_only,
    row_value,
    shared_length,
    text_turn,
    turns_of,
    with_system,
)
from novarl.data.sources import RawRow
from novarl.data.textual import json_kind

LABELS = {
    **dict.fromkeys(("true", "1", "1.0", "yes", "positive", "pos", "good"), 1.0),
    **dict.fromkeys(("false", "0", "0.0", "no", "negative", "neg", "bad"), 0.0),
}
"""Accepted labels; upper or lower case."""
_SPEAKER = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class PairExample:
    """One valid pair: both sides as conversations whose first `context` messages are the shared prompt."""

    id: str
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    context: int
    margin: float | None


@dataclass(frozen=True, slots=True)
class LabelledExample:
    """One valid labeled row: a conversation whose first `context` messages are the prompt, or a plain text."""

    id: str
    messages: tuple[Message, ...]
    context: int
    label: float
    plain: bool


def detect_pairs(rows: Sequence[RawRow], *, keys: Columns, where: str, labels: bool) -> Columns:
    """The columns to read, from the user's `keys` and the first rows; with `labels` also those of labeled rows.
    NovaError: no format or several fit, keys contradict each other, or a named column is missing."""
    if keys.messages is not None and keys.prompt is not None:
        raise NovaError("messages_key and prompt_key cannot both be set", where=where, fix="keep one of them")
    present, names = columns_seen(rows, keys, where=where)
    present = prompts_only(present, rows)

    def named(part: str, *usual: str) -> str | None:
        asked: str | None = getattr(keys, part)
        return asked or next((name for name in usual if name in present), None)

    found: list[Columns] = []
    chosen, rejected = named("chosen", "chosen"), named("rejected", "rejected")
    if chosen and rejected:
        found += _prompts(chosen, rejected, keys, present)
    label = named("label", "label")
    if labels and label and keys.chosen is None and keys.rejected is None:
        text = named("text", "text")
        prompt, completion = named("prompt", "prompt"), named("completion", "completion", "response")
        if text and keys.prompt is None and keys.completion is None:
            found.append(Columns(text=text, label=label))
        if prompt and completion and keys.text is None:
            found.append(Columns(prompt=prompt, completion=completion, label=label))
        if keys.label is not None:
            found = [columns for columns in found if columns.label]
    fix = "set chosen_key and rejected_key, and prompt_key or messages_key if the prompt is a separate column"
    more = "; or label_key and text_key, or prompt_key and completion_key" if labels else ""
    hint = "" if labels or not label else "; rows with a label need loss kto, bce, implicit_ce or implicit_kto"
    known = advice(present, "pairs") if not found else None
    return only_format(found, names, where=where, fix=known or fix + more + hint)


def _prompts(chosen: str, rejected: str, keys: Columns, present: Sequence[str]) -> list[Columns]:
    """Candidates for a pair of columns: one per possible prompt column, or one without."""
    sides = Columns(chosen=chosen, rejected=rejected, margin="margin" if "margin" in present else None)
    if keys.prompt is not None or keys.messages is not None:
        return [replace(sides, prompt=keys.prompt, messages=keys.messages)]
    apart = [replace(sides, **{name: name}) for name in ("prompt", "messages") if name in present]
    if not apart and "conversations" in present:
        apart = [replace(sides, messages="conversations")]
    for name in ("instruction", "question"):
        if not apart and name in present:
            apart = [replace(sides, prompt=name)]
    return apart or [sides]


def pair_example(row: RawRow, columns: Columns) -> PairExample:
    """The shared prompt and the two answers. Raises Refused if the sides share no prompt, are equal or empty."""
    value = row_value(row)
    assert columns.chosen is not None and columns.rejected is not None
    sides = columns.chosen, columns.rejected
    if columns.prompt is not None or columns.messages is not None:
        chosen, rejected, context = _prompt_apart(value, sides, columns)
    else:
        first, second = cell(value, columns.chosen), cell(value, columns.rejected)
        if isinstance(first, str) != isinstance(second, str):
            raise Refused(columns.rejected, f"is {json_kind(second)}, but {columns.chosen} is {json_kind(first)}")
        if not isinstance(first, str):
            chosen, rejected = messages_of(first, columns.chosen), messages_of(second, columns.rejected)
            context = _parting(chosen, rejected, columns.rejected)
        elif first.strip() == second.strip():
            raise Refused(columns.rejected, f"is equal to {columns.chosen}")
        elif _SPEAKER.match(first) and _SPEAKER.match(second):
            chosen, rejected = _transcript(first, columns.chosen), _transcript(second, columns.rejected)
            context = len(chosen) - 1
            if chosen[:-1] != rejected[:-1]:
                raise Refused(columns.rejected, f"has a different prompt than {columns.chosen}")
        else:
            chosen, rejected = _texts(first, second, columns.rejected)
            context = 1
    if _bare(chosen) == _bare(rejected):
        raise Refused(columns.rejected, f"is equal to {columns.chosen}")
    for name, side in zip(sides, (chosen, rejected), strict=True):
        _check_answer(side, context, name)
    return PairExample(row.where, chosen, rejected, context, _margin(value, columns.margin))


def labelled_example(row: RawRow, columns: Columns) -> LabelledExample:
    """A prompt with an answer, or a text, and its label."""
    value = row_value(row)
    assert columns.label is not None
    if columns.text is not None:
        messages, context = text_turn(value, columns.text), 0
    else:
        assert columns.prompt is not None and columns.completion is not None
        prompt = prompt_turns(value, columns.prompt)
        messages, context = prompt + turns_of(value, columns.completion, "assistant"), len(prompt)
        _check_answer(messages, context, columns.completion)
    return LabelledExample(row.where, messages, context, _label(value, columns.label), columns.text is not None)


def _prompt_apart(
    value: Mapping[str, Any], names: tuple[str, str], columns: Columns
) -> tuple[tuple[Message, ...], tuple[Message, ...], int]:
    """Both sides with the prompt from its own column. A prompt repeated at the beginning of both sides is removed."""
    if columns.messages is not None:
        prompt = with_system(value, messages_of(cell(value, columns.messages), columns.messages))
    else:
        assert columns.prompt is not None
        prompt = prompt_turns(value, columns.prompt)
    chosen, rejected = (turns_of(value, name, "assistant") for name in names)
    count = len(prompt)
    if chosen[:count] == prompt == rejected[:count]:
        return chosen, rejected, count
    return prompt + chosen, prompt + rejected, count


def _parting(chosen: Sequence[Message], rejected: Sequence[Message], name: str) -> int:
    """The number of messages that two conversations share before their answers."""
    shared = shared_length(chosen, rejected)
    if shared == min(len(chosen), len(rejected)):  # one continues the other: split at the last answer that both have
        shared -= 1
    if shared == 0:
        raise Refused(name, "shares no prompt with the chosen side: the first messages differ")
    return shared


def _transcript(text: str, name: str) -> tuple[Message, ...]:
    """ "\\n\\nHuman: ... \\n\\nAssistant: ..." as messages. Raises Refused for an empty turn."""
    _, *parts = _SPEAKER.split(text)
    turns = [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]
    for index, turn in enumerate(turns):
        if not turn["content"]:
            which = "the answer" if index == len(turns) - 1 else f"turn {index + 1}"
            raise Refused(name, f"{which} is empty")
    return tuple(turns)


def _texts(chosen: str, rejected: str, name: str) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Split two texts into a prompt and two answers. The prompt is their longest common prefix of whole words."""
    shared = chosen[: shared_length(chosen, rejected)]
    gap = max((match.start() for match in re.finditer(r"(?<=\S)\s", shared)), default=0)
    if gap == 0:
        raise Refused(name, "shares no prompt with the chosen side: they begin with different words")
    prompt = {"role": "user", "content": shared[:gap]}
    first, second = ((prompt, {"role": "assistant", "content": side[gap:]}) for side in (chosen, rejected))
    return first, second


def _bare(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages stripped of surrounding white space, which is not a meaningful preference."""
    return [{**message, "content": message["content"].strip()} for message in messages]


def _check_answer(messages: Sequence[Message], context: int, name: str) -> None:
    """Raise Refused for a side whose prompt or answer is invalid."""
    prompt, answer = messages[:context], messages[context:]
    if messages[0]["role"] == "assistant":
        raise Refused(name, "the conversation begins with an assistant turn")
    if prompt[-1]["role"] == "assistant":
        raise Refused(name, "the prompt ends with an assistant turn")
    if not answer or answer[0]["role"] != "assistant":
        raise Refused(name, "has no assistant turn after the prompt")
    if answer[-1]["role"] != "assistant":
        raise Refused(name, "does not end with an assistant turn")
    if any(not turn["content"].strip() and not turn.get("tool_calls") for turn in answer):
        raise Refused(name, "the answer is empty")


def _margin(value: Mapping[str, Any], name: str | None) -> float | None:
    if name is None or value.get(name) is None:
        return None
    given = value[name]
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise Refused(name, f"must be a number of at least 0, not {_short(given)}")
    return number


def _label(value: Mapping[str, Any], name: str) -> float:
    given = cell(value, name)
    known = LABELS.get(str(given).strip().lower()) if isinstance(given, bool | int | float | str) else None
    if known is None:
        raise Refused(name, f"must be true or false, 1 or 0, positive or negative, not {_short(given)}")
    return known


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
