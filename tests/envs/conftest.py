"""A scripted engine and a tokenizer of characters, so that every token of an episode can be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from novarl.core.types import Completion, Prompt, Sampling
from novarl.data.render import render_prompt

END = 0


class Letters:
    """One token a character, `;` is the token that ends a turn. A conversation reads `u:hi;a:hello;u:more;a:`.

    With `forgetful`, what stands in brackets is dropped from every turn but the last, as some templates drop thoughts.
    """

    eos_token_id = END
    pad_token_id = END
    chat_template: str | None = "letters"

    def __init__(self, *, forgetful: bool = False) -> None:
        self.forgetful = forgetful

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        return [END if character == ";" else ord(character) for character in text]

    def decode(self, tokens: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        kept = [token for token in tokens if not (skip_special_tokens and token == END)]
        return "".join(";" if token == END else chr(token).lower() for token in kept)

    def apply_chat_template(
        self, conversation: Sequence[Mapping[str, Any]], /, *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        text = ""
        for message in conversation:
            content = message["content"]
            if self.forgetful and message["role"] == "assistant" and message is not conversation[-1] and "]" in content:
                content = content.rpartition("]")[2]
            text += f"{message['role'][0]}:{content};"
        return text + ("a:" if add_generation_prompt else "")

    def save_pretrained(self, save_directory: str, /) -> None:
        raise NotImplementedError


@dataclass
class Scripted:
    """An engine that says its lines in order. A line is a text; without the final `;` it was cut by its length."""

    tokenizer: Letters
    lines: list[str]
    asked: list[tuple[str, str, Sampling]] = field(default_factory=list)

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        number = len(self.asked)
        self.asked.append((key, self.tokenizer.decode(tokens), sampling))
        answer = tuple(self.tokenizer.encode(self.lines[number]))
        logp = tuple(-(number + 1) - position / 100 for position in range(len(answer)))
        reason = "stop" if answer[-1] == END else "length"
        return Completion(answer, logp, (-0.5,) * len(answer), (7 + number,) * len(answer), reason)

    def publish(self, weights: object, version: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.fixture
def tokenizer() -> Letters:
    return Letters()


@pytest.fixture
def forgetful() -> Letters:
    return Letters(forgetful=True)


@pytest.fixture
def scripted() -> Callable[..., Scripted]:
    return lambda tokenizer, *lines: Scripted(tokenizer, list(lines))


@pytest.fixture
def ask() -> Callable[..., Prompt]:
    """A rendered prompt of one user message."""

    def make(tokenizer: Letters, text: str = "hi") -> Prompt:
        messages = ({"role": "user", "content": text},)
        return Prompt("rows.jsonl:3", render_prompt(tokenizer, messages), messages, answer="hello")

    return make
