"""A tokenizer whose tokens are characters, with chat templates of the kinds that are met in the wild."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

SPECIALS = ("<|im_start|>", "<|im_end|>", "<eos>")
_SPLIT = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")
FIRST_SPECIAL = 0x110000  # beyond the last character


def chatml(messages: Sequence[Any], generation: bool) -> str:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if generation else "")


def forgetful(messages: Sequence[Any], generation: bool) -> str:
    """Like Qwen3's: a turn's thoughts are there while it is the last one, and gone afterwards."""
    last = len(messages) - 1
    kept = [
        m | {"content": re.sub(r"<think>.*?</think>", "", m["content"])} if i < last or generation else m
        for i, m in enumerate(messages)
    ]
    return chatml(kept, generation)


def presumptuous(messages: Sequence[Any], generation: bool) -> str:
    """Like DeepSeek-R1's: opens a thought for the assistant that the finished turn does not show."""
    shown = [m | {"content": m["content"].split("</think>")[-1].strip()} for m in messages]
    return chatml(shown, generation) + ("<think>\n" if generation else "")


def shouting(messages: Sequence[Any], generation: bool) -> str:
    """Writes a header that no finished turn has."""
    return chatml(messages, generation) + ("shout: " if generation else "")


def trimming(messages: Sequence[Any], generation: bool) -> str:
    """Like `endless`, but without the white space around contents."""
    return endless([m | {"content": m["content"].strip()} for m in messages], generation)


def text_end(messages: Sequence[Any], generation: bool) -> str:
    """Ends a turn in text that is no token."""
    text = "".join(f"### {m['role']}\n{m['content']}\n### End\n" for m in messages)
    return text + ("### assistant\n" if generation else "")


def calling(messages: Sequence[Any], generation: bool) -> str:
    """Like `endless`, with tool calls."""

    def content(m: Any) -> str:
        calls = (call["function"] for call in m.get("tool_calls", ()))
        return m["content"] + "".join(f"call {call['name']} {json.dumps(call['arguments'])}" for call in calls)

    return endless([m | {"content": content(m)} for m in messages], generation)


def endless(messages: Sequence[Any], generation: bool) -> str:
    """Writes no token at the end of a turn."""
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + ("assistant: " if generation else "")


def alternating(messages: Sequence[Any], generation: bool) -> str:
    """Like Gemma's: raises where roles do not alternate."""
    if any((m["role"] == "user") != (i % 2 == 0) for i, m in enumerate(messages)):
        raise ValueError("Conversation roles must alternate user/assistant/user/assistant/...")
    return chatml(messages, generation)


KINDS = (chatml, forgetful, presumptuous, shouting, trimming, text_end, calling, endless, alternating)


class CharTokenizer:
    eos_token_id = FIRST_SPECIAL + 2
    pad_token_id = FIRST_SPECIAL + 2  # as in GPT-2: masks must not depend on it

    def __init__(self, template: Callable[[Sequence[Any], bool], str] | None = chatml) -> None:
        self.template = template
        self.chat_template = template.__name__ if template else None

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        return [
            token
            for part in _SPLIT.split(text)
            for token in ([FIRST_SPECIAL + SPECIALS.index(part)] if part in SPECIALS else map(ord, part))
        ]

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        names = [""] * len(SPECIALS) if skip_special_tokens else SPECIALS
        return "".join(names[t - FIRST_SPECIAL] if t >= FIRST_SPECIAL else chr(t) for t in tokens)

    def apply_chat_template(
        self, conversation: Sequence[Any], /, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any:
        assert self.template is not None and not tokenize
        return self.template(conversation, add_generation_prompt)

    def save_pretrained(self, save_directory: str, /) -> None:
        raise NotImplementedError


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture
def with_template() -> Callable[[str | None], CharTokenizer]:
    kinds = {f.__name__: f for f in KINDS}
    return lambda name: CharTokenizer(kinds[name] if name else None)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows, one JSON value or raw line each, and gives the file."""

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in lines))
        return tmp_path / name

    return write


@pytest.fixture
def trained() -> Callable[[Any, Any, Any], list[str]]:
    """The stretches of text that a mask trains on."""

    def stretches(tokenizer: Any, tokens: Sequence[int], mask: Sequence[bool]) -> list[str]:
        runs: list[list[int]] = []
        for position, (token, chosen) in enumerate(zip(tokens, mask, strict=True)):
            if chosen and (position == 0 or not mask[position - 1]):
                runs.append([])
            if chosen:
                runs[-1].append(token)
        return [tokenizer.decode(run) for run in runs]

    return stretches
