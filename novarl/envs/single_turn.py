"""One question, one answer: the trivial conversation."""

from __future__ import annotations

from collections.abc import Sequence

from novarl.core.types import EnvStep, Message, Prompt


class SingleTurn:
    """An environment that asks the row's question and is content with whatever comes; rewards judge it afterwards."""

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        return prompt.messages

    async def step(self, messages: Sequence[Message]) -> EnvStep:
        return EnvStep()
