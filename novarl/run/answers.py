"""A model's answers to prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.event_loop import EventLoop
from novarl.core.types import Completion, Engine, Message, Sampling
from novarl.data.render import render_prompt, turn_text
from novarl.models.load import Policy

Asked = str | Sequence[Mapping[str, Any]]
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "stop", "seed")


def answers(
    policy: Policy,
    engine: Engine,
    loop: EventLoop,
    prompts: Sequence[Asked],
    *,
    n: int = 1,
    apply_chat_template: bool = True,
    sampling: Mapping[str, Any],
) -> list[list[str]]:
    """`n` answers per prompt, as text. `sampling` takes the names in `SETTINGS`; without a temperature it is greedy."""
    if unknown := sorted(set(sampling) - set(SETTINGS)):
        raise NovaError(f"unknown setting {unknown[0]!r}", where="generate", fix=f"use one of {', '.join(SETTINGS)}")
    stop = sampling.get("stop", ())
    settings = {"temperature": 0.0, **sampling, "stop": (stop,) if isinstance(stop, str) else tuple(stop)}

    async def every() -> list[list[str]]:
        asked = [
            ask(policy, engine, messages_of(prompt), Sampling(**settings), number, n, apply_chat_template)
            for number, prompt in enumerate(prompts)
        ]
        return [[text for _, text in found] for found in await asyncio.gather(*asked)]

    return loop.run(every())


async def ask(
    policy: Policy,
    engine: Engine,
    messages: Sequence[Message],
    sampling: Sampling,
    number: int,
    n: int,
    apply_chat_template: bool,
) -> list[tuple[Completion, str]]:
    """`n` completions of prompt `number`, with their texts."""
    tokens = render_prompt(
        policy.tokenizer,
        messages,
        apply_chat_template=apply_chat_template,
        template_kwargs=policy.template_kwargs,
    )

    def said(found: Completion) -> str:
        ended = found.finish_reason == "stop" and found.tokens[-1] in policy.eos_ids
        return turn_text(policy.tokenizer, tokens, found.tokens, ended=ended, apply_chat_template=apply_chat_template)

    requests = [engine.sample(tokens, sampling, key=f"sample/{number}/{index}") for index in range(n)]
    return [(found, said(found)) for found in await asyncio.gather(*requests)]


def messages_of(prompt: Asked) -> tuple[Message, ...]:
    """A prompt as messages; a string becomes one user message."""
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    messages = [message for message in prompt if isinstance(message, Mapping)] if isinstance(prompt, Sequence) else None
    if messages is None or len(messages) < len(prompt):
        what = f"a prompt is a string or a list of messages, got {prompt!r:.60}"
        raise NovaError(what, where="generate", fix="for example generate(['2 + 2 ='])")
    return tuple(dict(message) for message in messages)
