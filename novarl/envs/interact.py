"""Tools by RL2's `interact(messages) -> list[message]`, from the user's file.

    def interact(messages):            # the conversation so far, the policy's last answer at its end
        queries = parse(messages[-1]["content"])
        return [{"role": "tool", "content": search(query)} for query in queries]      # []: no tool is called

The function runs in a process of its own with a time limit per call, like a reward (`rewards.process`); it may be
async. One that raises, hangs or returns anything but messages fails its own episode.

What several episodes ask while the process is busy is handed over together: async tools then wait side by side, and a
function that always hangs costs a few limits and not one for each episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.types import EnvStep, Message, Prompt
from novarl.rewards.lane import Function
from novarl.rewards.process import UserProcess
from novarl.rewards.user_file import TIME_LIMIT
from novarl.rewards.verdict import Failure

ROLES = ("system", "user", "assistant", "tool")


class ToolFailed(Exception):
    """`interact` gave no messages for a conversation."""


class Interact:
    """One episode with the user's `interact` as the partner; it is over when `interact` has nothing more to say."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        return prompt.messages

    async def step(self, messages: Sequence[Message]) -> EnvStep:
        answer = await self._tools.ask(messages)
        if isinstance(answer, Failure):
            raise ToolFailed(f"interact {answer}")
        new = _messages(answer)
        return EnvStep(messages=new, done=not new)


class Tools:
    """Makes episodes, which share the process that `interact` runs in, until it is closed."""

    def __init__(self, process: UserProcess, function: Function) -> None:
        self._process, self._function = process, function
        self._waiting: list[tuple[Sequence[Message], asyncio.Future[Any]]] = []
        self._serving: asyncio.Task[None] | None = None

    def __call__(self) -> Interact:
        return Interact(self)

    async def ask(self, messages: Sequence[Message]) -> Any:
        """What `interact` returns, or a `Failure`."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((messages, answer))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await answer

    def close(self) -> None:
        """End the process."""
        self._process.close()

    async def _serve(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            asked = [future for _, future in batch]
            try:
                answers = await self._process.call(self._function, [((list(messages),), {}) for messages, _ in batch])
            except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
                answers = [error] * len(asked)
            for future, answer in zip(asked, answers, strict=True):
                if future.done():  # its episode was given up meanwhile
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


def load_interact(path: str, *, time_limit: float = TIME_LIMIT) -> Tools:
    """A maker of episodes from the file at `path`, its process started. `time_limit`: seconds for one call.

    Errors: NovaError, with file and line, where the file is missing, does not import, or has no `interact(messages)`.
    """
    process = UserProcess(Path(path), time_limit=time_limit)
    try:
        function = process.function("interact")
        needed = [name for name, kind, default in function.parameters if not default and not kind.startswith("VAR_")]
        if len(needed) > 1 or not function.parameters:
            raise NovaError(
                "interact takes one argument, the messages", where=function.where, fix="write interact(messages)"
            )
    except NovaError:
        process.close()
        raise
    return Tools(process, function)


def _messages(answer: Any) -> tuple[Message, ...]:
    if not isinstance(answer, list):
        raise ToolFailed(f"interact returned {answer!r:.80}, not a list of messages ([] where it calls nothing)")
    for message in answer:
        right = (
            isinstance(message, Mapping) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        )
        if not right:
            raise ToolFailed(
                f"interact returned {message!r:.80}, not a message with a role of {', '.join(ROLES)} and content"
            )
    return tuple(answer)
