"""A byte-level tokenizer without training or download; every text round-trips.

Ids 0 to 255 are UTF-8 bytes, followed by a few special tokens. The chat format is one token for the role, the text,
then `<eos>`:

    <|user|>sort: dcab<eos><|assistant|>abcd<eos>

Tools are declared in a system turn, as JSON; a call follows the text of its turn:

    <|assistant|><tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><eos><|tool|>3<eos>

The saved files load with `AutoTokenizer` and give the same ids, texts and template. Transformers is not needed here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from novarl.core.errors import NovaError
from novarl.core.types import Message
from novarl.processes.renderer import render

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
    """Implements the part of the Hugging Face tokenizer interface that the library uses."""

    eos_token, pad_token = "<eos>", "<pad>"
    pad_token_id = 256
    eos_token_id = 257

    def __init__(self, chat_template: str | None = CHAT_TEMPLATE) -> None:
        self.chat_template = chat_template

    def __len__(self) -> int:
        return 256 + len(SPECIALS)

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        """The bytes of `text`, and special tokens for their names. NovaError for a lone surrogate, which is not
        UTF-8."""
        ids: list[int] = []
        for part in _SPLIT.split(text):
            if part in SPECIALS:
                ids.append(256 + SPECIALS.index(part))
                continue
            try:
                ids.extend(part.encode("utf-8"))
            except UnicodeEncodeError as error:
                character = part[error.start]
                raise NovaError(f"the text contains {character!r}, which is not a valid Unicode character") from error
        return ids

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        """The text of `tokens`: invalid UTF-8 becomes U+FFFD, unknown ids are skipped."""
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
        """The conversation as text, or with `tokenize` as {"input_ids", "attention_mask"}; `template_kwargs`: variables
        such as `tools`."""
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
        """Write `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, readable by transformers."""
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        for name, make in _FILES.items():
            text = json.dumps(make(), indent=2, sort_keys=True, ensure_ascii=False)
            (directory / name).write_text(text + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8")

    @staticmethod
    def read(directory: str | Path) -> ByteTokenizer | None:
        """The tokenizer saved in `directory` by `save_pretrained`, with its template; None for other files."""
        directory = Path(directory)
        try:
            saved = [json.loads((directory / name).read_text("utf-8")) for name in _FILES]
            template = (directory / "chat_template.jinja").read_text("utf-8")
        except (OSError, ValueError):
            return None
        return ByteTokenizer(template) if saved == [make() for make in _FILES.values()] else None


def _written(*, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    """`CHAT_TEMPLATE` rendered for a conversation without tools, without jinja2 and its slow sandbox."""
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
    """`CHAT_TEMPLATE` compiled as in transformers, without the separate process used for other templates."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:  # Jinja's own version escapes HTML and sorts keys
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(CHAT_TEMPLATE).render


@functools.cache
def _byte_characters() -> tuple[str, ...]:
    """GPT-2's character for each byte: itself if printable, otherwise the next one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256))


def _tokenizer_json() -> dict[str, Any]:
    """A byte-level BPE without merges: each byte is a token, and its id is the byte."""
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
    """What else `AutoTokenizer` needs: the generic class, the roles of special tokens, no clean-up."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "additional_special_tokens": list(SPECIALS[2:]),
        "clean_up_tokenization_spaces": False,
    }


_FILES = {"tokenizer.json": _tokenizer_json, "tokenizer_config.json": _tokenizer_config}
