"""Detect the format of rows, validate each row, and convert rows to conversations.

| purpose | columns |
|---|---|
| SFT | `messages`, with an assistant turn · `prompt` and `completion` (or `response`): strings or lists of messages |
| SFT | `instruction` and `output` (Alpaca) · `question` and `response` (OpenOrca), if neither is present |
| SFT | `text`, trained on in full, if nothing else is present |
| RL | `messages`, not ending with an assistant turn · `prompt`: string or list of messages; with or without `answer` |

`conversations` (ShareGPT, whose messages have `from` and `value`) is read as `messages`, and `instruction` as the
prompt, if those columns are absent. Alpaca's `input` is appended to its instruction; `system_prompt` or `system` is the
system message if the conversation has none. Rows with images, videos or audio are refused, because training is on text.
Other column names are set with the `*_key` options. The format is detected from the first rows, and every row must
match it.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from novarl.core.errors import NovaError
from novarl.core.types import Message
from novarl.data.sources import RawRow
from novarl.data.textual import json_kind

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM = ("system_prompt", "system")
"""Columns that hold a row's system message."""
_SHAREGPT = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
"""Roles by the `from` values of ShareGPT messages."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
Purpose = Literal["sft", "rl"]
_SAMPLED = 100
_NOT_JSON = "is a string but not valid JSON"
_NOT_FOR_ROWS = frozenset(
    ("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "return_dict")
)


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that hold the parts of a row, as set by the user or detected."""

    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    answer: str | None = None
    text: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    label: str | None = None
    margin: str | None = None


@dataclass(frozen=True, slots=True)
class Example:
    """One valid row. The first `context` messages are the prompt and are not trained on (in RL: all of them)."""

    id: str
    messages: tuple[Message, ...]
    context: int
    answer: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used. `str(bad)` is "rows.jsonl:12 messages[0].role: unknown role 'usr'"."""

    where: str
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where} {self.field}".strip() + f": {self.reason}"


class Refused(NovaError):
    """Raised if a row cannot be used; the loader turns it into a BadRow."""

    def __init__(self, field: str, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(reason, where=field or None)


def detect(rows: Sequence[RawRow], purpose: Purpose, *, keys: Columns, where: str) -> Columns:
    """The columns to read, from the user's `keys` and the columns that at least half of the first readable rows fill.
    NovaError: no format or several fit, the keys contradict each other, or no row has a named column."""
    if keys.messages is not None and (keys.prompt is not None or keys.completion is not None):
        fix = "keep messages_key, or prompt_key (and completion_key)"
        raise NovaError("messages_key and prompt_key cannot both be set", where=where, fix=fix)
    if keys.text is not None and (keys.messages or keys.prompt or keys.completion):
        what = "text_key is for texts without a prompt and cannot be combined with keys for a conversation"
        raise NovaError(what, where=where, fix="set either text_key or the others")
    present, names = columns_seen(rows, keys, where=where)
    if purpose == "rl":
        present = prompts_only(present, rows)
    found = _sft_columns(present, keys) if purpose == "sft" else _rl_columns(present, keys)
    keys_to_set = "messages_key, or prompt_key and completion_key, or text_key"
    fix = f"set {keys_to_set if purpose == 'sft' else 'messages_key or prompt_key, and answer_key for answers'}"
    return only_format(found, names, where=where, fix=(advice(present, purpose) if not found else None) or fix)


def only_format(found: Sequence[Columns], names: str, *, where: str, fix: str) -> Columns:
    """The format of the rows. Raises NovaError if there is none or more than one."""
    if len(found) != 1:
        what = "no known format" if not found else "more than one format"
        raise NovaError(f"{what} matches the columns: {names}", where=where, fix=fix)
    return found[0]


def columns_seen(rows: Sequence[RawRow], keys: Columns, *, where: str) -> tuple[list[str], str]:
    """The columns that at least half of the first rows fill, and all names for error messages. NovaError: no row can be
    read, or one of `keys` names no column."""
    good = [row.value for row in rows if row.value is not None]
    if not good:
        first = next((f": {row.place}: {row.error}" for row in rows), "")
        raise NovaError(f"no row could be read{first}", where=where, fix="check that these are the right data")
    for part, name in asdict(keys).items():
        if name is not None and not any(name in row or at_path(row, name) is not None for row in good):
            columns = sorted({column for row in good for column in row})
            near = difflib.get_close_matches(name, columns, n=1, cutoff=0.5)
            fix = f"did you mean {near[0]!r}?" if near else f"columns: {', '.join(columns[:20]) or 'none'}"
            raise NovaError(f"{part}_key={name}, but no row has that column", where=where, fix=fix)
    sample = good[:_SAMPLED]
    counts = Counter(name for row in sample for name, value in row.items() if value is not None)
    return [name for name, count in counts.items() if 2 * count >= len(sample)], ", ".join(
        sorted(counts)[:20]
    ) or "none"


def _sft_columns(present: Sequence[str], keys: Columns) -> list[Columns]:
    if keys.text is not None:
        return [Columns(text=keys.text)]
    if keys.messages is not None:
        return [Columns(messages=keys.messages)]
    completion = keys.completion or next((name for name in ("completion", "response") if name in present), None)
    prompt = keys.prompt or ("prompt" if "prompt" in present else None)
    pairs = [Columns(prompt=prompt, completion=completion)] if prompt and completion else []
    if keys.prompt is not None or keys.completion is not None:
        return pairs
    found = pairs + ([Columns(messages="messages")] if "messages" in present else [])
    if not found and "conversations" in present:
        found = [Columns(messages="conversations")]
    usual = (("instruction", "output"), ("instruction", "response"), ("question", "response"))
    if not found:
        found = [Columns(prompt=asked, completion=said) for asked, said in usual if {asked, said} <= set(present)]
    # A plain text has no roles, so it is used only if no other format matches.
    return found or ([Columns(text="text")] if "text" in present else [])


def _rl_columns(present: Sequence[str], keys: Columns) -> list[Columns]:
    answer = keys.answer or ("answer" if "answer" in present else None)
    if keys.messages is not None:
        return [Columns(messages=keys.messages, answer=answer)]
    if keys.prompt is not None:
        return [Columns(prompt=keys.prompt, answer=answer)]
    found = [Columns(prompt="prompt", answer=answer)] if "prompt" in present else []
    found += [Columns(messages="messages", answer=answer)] if "messages" in present else []
    if not found and "conversations" in present:
        found = [Columns(messages="conversations", answer=answer)]
    return found or ([Columns(prompt="instruction", answer=answer)] if "instruction" in present else [])


def prompts_only(present: Sequence[str], rows: Sequence[RawRow]) -> list[str]:
    """The columns that may hold a prompt: without `messages` that already contain the answer next to a `prompt` (as in
    UltraFeedback's binarized rows)."""
    if not {"prompt", "messages"} <= set(present):
        return list(present)
    told = [row.value["messages"] for row in rows[:_SAMPLED] if row.value is not None and row.value.get("messages")]
    lasts = [messages[-1] for messages in told if isinstance(messages, list | tuple)]
    answered = lasts and all(isinstance(last, Mapping) and last.get("role") == "assistant" for last in lasts)
    return [name for name in present if name != "messages" or not answered]


def advice(present: Sequence[str], purpose: Literal["sft", "rl", "pairs"]) -> str | None:
    """Advice for rows of a known format that this command does not train on."""
    names = set(present)
    if "input_ids" in names:
        return "rows of token ids are not supported: provide the text"
    if {"completions", "labels"} <= names:
        return "step-level labels are not supported: join the steps into one completion with one label"
    if {"instruction", "completions"} <= names:
        return "these look like raw UltraFeedback rows: use the binarized version, with prompt, chosen and rejected"
    if {"chosen", "rejected"} <= names and purpose != "pairs":
        return "for rows with chosen and rejected use novarl dpo or novarl rm"
    if names & {"prompt", "instruction"} and purpose == "sft":
        return "for prompts without a completion use novarl rl, or set completion_key"
    if "text" in names and purpose == "rl":
        return "for texts without a prompt use novarl sft, or set prompt_key=text"
    if purpose == "pairs" and names & {"messages", "completion"} and not names & {"chosen", "rejected", "label"}:
        return "for rows with a single answer use novarl sft, or set chosen_key and rejected_key"
    return None


def sft_example(row: RawRow, columns: Columns) -> Example:
    """A conversation to train on: the assistant turns of `messages` or `completion`, or a `text` as one turn."""
    value = row_value(row)
    if columns.text is not None:
        return Example(row.where, text_turn(value, columns.text), 0)
    if columns.messages is not None:
        messages, context = with_system(value, messages_of(cell(value, columns.messages), columns.messages)), 0
        name = columns.messages
    else:
        assert columns.prompt is not None and columns.completion is not None
        prompt = prompt_turns(value, columns.prompt)
        if prompt[-1]["role"] == "assistant":
            raise Refused(columns.prompt, "the prompt ends with an assistant turn")
        messages, context = prompt + turns_of(value, columns.completion, "assistant"), len(prompt)
        name = columns.completion
    if messages[0]["role"] == "assistant":
        raise Refused(columns.messages or columns.prompt or "", "the conversation begins with an assistant turn")
    if not any(message["role"] == "assistant" and is_trained(message) for message in messages[context:]):
        raise Refused(name, "has no assistant turn to train on")
    return Example(row.where, messages, context)


def rl_example(row: RawRow, columns: Columns) -> Example:
    """A prompt, its reference answer, and the other columns, which rewards take by name; so an answer column with
    another name than `answer` stays among them."""
    value = row_value(row)
    name = columns.messages or columns.prompt
    assert name is not None
    if columns.messages is not None:
        messages = with_system(value, messages_of(cell(value, name), name))
    else:
        messages = prompt_turns(value, name)
    if messages[-1]["role"] == "assistant":
        raise Refused(
            f"{name}[{len(messages) - 1}].role", "ends with an assistant turn: remove the last turn, or use novarl sft"
        )
    answer = None if columns.answer is None else cell(value, columns.answer)
    used = {name, "answer"} if columns.answer == "answer" else {name}
    extra = {column: item for column, item in value.items() if column not in used}
    return Example(row.where, messages, len(messages), answer, extra)


def shared_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of items at the start that two sequences have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def is_trained(message: Message) -> bool:
    """Whether an assistant turn is trained on; `weight: 0` or `train: false` excludes it."""
    return message.get("weight", 1) != 0 and message.get("train", 1) != 0


def template_kwargs_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """A row's arguments for the chat template: the columns `chat_template_kwargs` and `tools`, or JSON of them."""
    given = _column(value, "chat_template_kwargs", {})
    if not isinstance(given, Mapping):
        raise Refused("chat_template_kwargs", f"must be an object, not {json_kind(given)}")
    if taken := [name for name in given if name in _NOT_FOR_ROWS]:
        raise Refused(f"chat_template_kwargs.{taken[0]}", "cannot be set by a row")
    kwargs = dict(given)
    tools = _column(value, "tools", [])
    if not isinstance(tools, list | tuple):
        raise Refused("tools", f"must be a list of tool schemas, not {json_kind(tools)}")
    if tools:
        schemas = [_parsed(tool, "tools", _NOT_JSON) for tool in tools]
        for index, schema in enumerate(schemas):
            if not isinstance(schema, Mapping):
                raise Refused(f"tools[{index}]", f"must be a tool schema (an object), not {json_kind(schema)}")
        kwargs["tools"] = schemas
    return kwargs


def _column(value: Mapping[str, Any], name: str, absent: Any) -> Any:
    item = value.get(name)
    return absent if item is None else _parsed(item, name, _NOT_JSON)


def _parsed(item: Any, name: str, otherwise: str) -> Any:
    """The value of an item that may be written as JSON in a string."""
    try:
        return json.loads(item) if isinstance(item, str) else item
    except (ValueError, RecursionError) as error:
        raise Refused(name, otherwise) from error


def row_value(row: RawRow) -> Mapping[str, Any]:
    if row.value is None:
        raise Refused("", row.error or "could not be read")
    for name in _MEDIA:
        if row.value.get(name):
            raise Refused(name, "is not text, and only text is supported: remove such rows or the column")
    return row.value


def cell(value: Mapping[str, Any], name: str) -> Any:
    item = at_path(value, name)
    if item is None:
        raise Refused(name, "is missing" if name not in value else "is null")
    return item


def at_path(value: Mapping[str, Any], path: str) -> Any:
    """The item at a dotted path such as `extra_info.answer`, or None. A column with that exact name takes precedence.

    >>> at_path({"extra_info": {"answer": "4"}}, "extra_info.answer"), at_path({"a.b": 1}, "a.b"), at_path({}, "a.b")
    ('4', 1, None)
    """
    if path in value:
        return value[path]
    head, _, rest = path.partition(".")
    inner = value.get(head)
    return at_path(inner, rest) if rest and isinstance(inner, Mapping) else None


def prompt_turns(value: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """A row's prompt: the system message, if any, then the instruction with Alpaca's `input` appended."""
    turns = turns_of(value, name, "user")
    more = value.get("input")
    if name == "instruction" and isinstance(value[name], str) and isinstance(more, str) and more.strip():
        turns = ({**turns[0], "content": f"{turns[0]['content']}\n\n{more}"},)
    return with_system(value, turns)


def with_system(value: Mapping[str, Any], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Prepend the system message of the row's system column, if the conversation does not begin with one."""
    text = next((text for name in SYSTEM if isinstance(text := value.get(name), str) and text.strip()), None)
    if text is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return ({"role": "system", "content": text}, *messages)


def turns_of(value: Mapping[str, Any], name: str, role: str) -> tuple[Message, ...]:
    """A string as one turn of `role`, or a list of messages."""
    item = cell(value, name)
    if isinstance(item, str):
        return ({"role": role, "content": _content(item, name)},)
    if isinstance(item, Mapping) and ("role" in item or "from" in item):
        return messages_of([item], name)
    if isinstance(item, list | tuple):
        return messages_of(item, name)
    raise Refused(name, f"must be a string or a list of messages, not {json_kind(item)}")


def text_turn(value: Mapping[str, Any], name: str) -> tuple[Message, ...]:
    """A text without a prompt as one assistant turn."""
    text = cell(value, name)
    if not isinstance(text, str):
        raise Refused(name, f"must be a string, not {json_kind(text)}")
    return turns_of(value, name, "assistant")


def messages_of(value: Any, name: str) -> tuple[Message, ...]:
    # In CSV, a list can only be written as JSON.
    value = _parsed(value, name, "must be a list of messages, or such a list as JSON, not plain text")
    if not isinstance(value, list | tuple):
        raise Refused(name, f"must be a list of messages, not {json_kind(value)}")
    if not value:
        raise Refused(name, "is an empty list")
    return tuple(_message(item, f"{name}[{index}]") for index, item in enumerate(value))


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, Mapping):
        raise Refused(name, f"must be an object with role and content, not {json_kind(value)}")
    if "role" not in value and "from" in value:
        value = _of_sharegpt(value, name)
    role = value.get("role")
    if not isinstance(role, str):
        raise Refused(f"{name}.role", "is missing" if role is None else f"must be a string, not {json_kind(role)}")
    if role not in ROLES:
        shown = role if len(role) <= 40 else f"{role[:37]}..."
        raise Refused(f"{name}.role", f"unknown role {shown!r}, not one of {', '.join(ROLES)}")
    for key in ("weight", "train"):
        if value.get(key) is not None and value[key] not in (0, 1):
            raise Refused(
                f"{name}.{key}", f"must be 0 or 1, not {value[key]!r}" if key == "weight" else "must be true or false"
            )
    # In Parquet and Arrow every message has the union of all keys: null means absent.
    message = {key: item for key, item in value.items() if item is not None}
    if role == "assistant" and message.get("tool_calls") and not message.get("content"):
        return message | {"content": ""}
    return message | {"content": _content(message.get("content"), f"{name}.content")}


def _of_sharegpt(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Convert a ShareGPT message (`from`, `value`) to `role` and `content`."""
    speaker = value["from"]
    role = _SHAREGPT.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise Refused(f"{name}.from", f"unknown role {str(speaker)[:40]!r}, not one of {', '.join(_SHAREGPT)}")
    rest = {key: item for key, item in value.items() if key not in ("from", "value")}
    return {"role": role, "content": value.get("value"), **rest}


def _content(value: Any, name: str) -> str:
    if isinstance(value, list | tuple):
        value = _joined(value, name)
    if not isinstance(value, str):
        raise Refused(name, "is missing" if value is None else f"must be a string, not {json_kind(value)}")
    if not value.strip():
        raise Refused(name, "is empty")
    return value


def _joined(parts: Sequence[Any], name: str) -> str:
    """The text of a content given as parts, each `{"type": "text", "text": ...}`."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            raise Refused(name, "must be a string, not a list")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Refused(f"{name}[{index}]", f"has type {str(kind)[:40]!r}, but only text is supported")
        texts.append(part["text"])
    return "".join(texts)
