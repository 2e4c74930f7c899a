"""A tokenizer whose tokens are bytes: nothing to train, nothing to download, and every text round-trips.

Ids 0 to 255 are the bytes of UTF-8, then come a few special tokens. A conversation is written as short as a byte-level
model needs it: one token says who speaks, then the text, then `<eos>`:

    <|user|>sort: dcab<eos><|assistant|>abcd<eos>

Tools are declared in a system turn, as JSON; a call stands behind the text of its turn:

    <|assistant|><tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><eos><|tool|>3<eos>

The saved files load with Hugging Face's `AutoTokenizer` to the same ids, texts and template; this module itself needs
no transformers.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from novarl.core.errors import NovaError
from novarl.processes.renderer import render

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from novarl.core.types import Message

SPECIALS = ("<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

ROLES = ("system", "user", "assistant", "tool")

CHAT_TEMPLATE = """\
{%- if tools -%}
    {{- '<|system|>tools: ' ~ (tools | tojson) ~ '<eos>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('unknown role ' ~ message['role']) -}}
    {%- endif -%}
    {{- '<|' ~ message['role'] ~ '|>' ~ message['content'] -}}
    {%- for called in message['tool_calls'] or [] -%}
        {%- set call = called['function'] or called -%}
        {%- set arguments = call['arguments'] or {} -%}
        {{- '<tool_call>{"name": ' ~ (call['name'] | tojson) ~ ', "arguments": ' -}}
        {{- arguments if arguments is string else (arguments | tojson) -}}
        {{- '}</tool_call>' -}}
    {%- endfor -%}
    {{- '<eos>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}"""

_SPLIT = re.compile("(" + "|".join(re.escape(token) for token in SPECIALS) + ")")


class ByteTokenizer:
    """Bytes and specials; the part of Hugging Face's tokenizer interface that the library uses, with its meanings."""

    eos_token, pad_token = "<eos>", "<pad>"
    pad_token_id = 256
    eos_token_id = 257

    def __init__(self, chat_template: str | None = CHAT_TEMPLATE) -> None:
        self.chat_template = chat_template

    def __len__(self) -> int:
        return 256 + len(SPECIALS)

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        """The bytes of `text`; a special token's name in it becomes that token. Nothing is added at either end.

        Raises NovaError where `text` cannot be written in UTF-8 (a lone surrogate).
        """
        ids: list[int] = []
        for part in _SPLIT.split(text):
            if part in SPECIALS:
                ids.append(256 + SPECIALS.index(part))
                continue
            try:
                ids.extend(part.encode("utf-8"))
            except UnicodeEncodeError as error:
                character = part[error.start]
                raise NovaError(f"the text holds {character!r}, which is no character of Unicode") from error
        return ids

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        """The text of `tokens`: bytes that are no UTF-8 become U+FFFD, ids without a token are left out."""
        data = bytearray()
        for token in tokens:
            if token < 256:
                data.append(token)
            elif token < len(self) and not skip_special_tokens:
                data.extend(SPECIALS[token - 256].encode())
        return data.decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        /,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        **template_kwargs: Any,
    ) -> Any:
        """The conversation as text, or with `tokenize` as {"input_ids", "attention_mask"}, as Hugging Face's does.

        `template_kwargs` is what else the template may read, such as `tools`.
        """
        template = chat_template or self.chat_template
        assert template is not None
        given = {"eos_token": self.eos_token, "pad_token": self.pad_token, "tools": None, **template_kwargs}
        plain = not template_kwargs.get("tools") and not any(message.get("tool_calls") for message in conversation)
        if template == CHAT_TEMPLATE and plain:
            text = _written(messages=conversation, add_generation_prompt=add_generation_prompt)
        elif template == CHAT_TEMPLATE:
            text = _compiled()(messages=list(conversation), add_generation_prompt=add_generation_prompt, **given)
        else:
            asked = {"chat_template": template, "add_generation_prompt": add_generation_prompt}
            text = render({"conversations": [list(conversation)], **asked, **given})
        if not tokenize:
            return text
        ids = self.encode(text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def save_pretrained(self, save_directory: str | Path, /) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, for us and for Hugging Face."""
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, make in _FILES.items():
            text = json.dumps(make(), indent=2, sort_keys=True, ensure_ascii=False)
            (directory / name).write_text(text + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    @staticmethod
    def read(directory: str | Path) -> ByteTokenizer | None:
        """The tokenizer that `save_pretrained` wrote to `directory`, with its template; None: the files are others."""
        directory = Path(directory)
        try:
            saved = [json.loads((directory / name).read_text("utf-8")) for name in _FILES]
            template = (directory / "chat_template.jinja").read_text("utf-8")
        except (OSError, ValueError):
            return None
        return ByteTokenizer(template) if saved == [make() for make in _FILES.values()] else None


def _written(*, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    """What `CHAT_TEMPLATE` says of a conversation without tools.

    It imports no jinja2 and renders no thousands of prompts in its sandbox.
    """
    turns = []
    for message in messages:
        role = message.get("role", "")
        if role not in ROLES:
            from jinja2 import TemplateError

            raise TemplateError(f"unknown role {role}")
        turns.append(f"<|{role}|>{message.get('content', '')}<eos>")
    return "".join(turns) + ("<|assistant|>" if add_generation_prompt else "")


@functools.cache
def _compiled() -> Callable[..., str]:
    """`CHAT_TEMPLATE`, compiled as Hugging Face compiles it, without the process that others are rendered in."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:  # Jinja's own escapes HTML and sorts
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(CHAT_TEMPLATE).render


@functools.cache
def _byte_characters() -> tuple[str, ...]:
    """GPT-2's printable stand-in for each byte: itself where printable, otherwise the next character from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256))


def _tokenizer_json() -> dict[str, Any]:
    """A byte-level BPE without a single merge: each byte stays a token, and its id is the byte."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256 + i, "content": token, **flags} for i, token in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, Any]:
    """What `AutoTokenizer` needs beside the tokens: the generic class, the special tokens' parts, no clean-up."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "additional_special_tokens": list(SPECIALS[2:]),
        "clean_up_tokenization_spaces": False,
    }


_FILES = {"tokenizer.json": _tokenizer_json, "tokenizer_config.json": _tokenizer_config}
