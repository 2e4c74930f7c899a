"""Tools by RL2's `interact(messages) -> list[message]`, from the user's file.

    def interact(messages):            # the conversation so far, the policy's last answer at its end
        queries = parse(messages[-1]["content"])
        return [{"role": "tool", "content": search(query)} for query in queries]      # []: no tool is called

An environment that scores returns a mapping instead, of which every part may be left out; `reward=environment` is the
sum over the turns. With a second parameter, `answer`, it is given the row's reference answer.

    def interact(messages, answer):
        right = messages[-1]["content"].strip() == answer
        return {"reward": float(right), "done": right, "messages": [{"role": "user", "content": "Try again."}]}

The function runs in a process of its own with a time limit per call, like a reward (`rewards.user_process`); it may be
async. One that raises, hangs or returns anything but messages fails its own episode.

Calls of several episodes that arrive while the process is busy are handed over together: async tools then run at the
same time, and a function that always hangs costs a few time limits, not one for each episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from novarl.core.errors import NovaError
from novarl.core.types import EnvStep, Message, Prompt
from novarl.envs.single_turn import SingleTurn
from novarl.rewards.loaded_file import Call, Function
from novarl.rewards.user_file import TIME_LIMIT
from novarl.rewards.user_process import UserProcess
from novarl.rewards.verdict import Failure, check

ROLES = ("system", "user", "assistant", "tool")


class ToolFailed(Exception):
    """`interact` gave no messages for a conversation."""


class Interact:
    """One episode with the user's `interact` as the partner; it is over when `interact` has nothing more to say."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._answer: Any = None

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        self._answer = prompt.answer
        return prompt.messages

    async def step(self, messages: Sequence[Message]) -> EnvStep:
        said = await self._tools.ask(messages, self._answer)
        if isinstance(said, Failure):
            raise ToolFailed(f"interact {said}")
        if not isinstance(said, Mapping):
            new = _messages(said)
            return EnvStep(messages=new, done=not new)
        if unknown := set(said) - {"messages", "reward", "done"}:
            raise ToolFailed(f"interact returned the key {min(unknown)!r}; allowed are messages, reward and done")
        new = _messages(said.get("messages", []))
        return EnvStep(messages=new, reward=_reward(said.get("reward")), done=bool(said.get("done", not new)))


class Tools:
    """Makes episodes, which share the process that `interact` runs in, until it is closed."""

    def __init__(self, process: UserProcess, function: Function) -> None:
        self._process, self._function = process, function
        self._takes_answer = any(name == "answer" for name, _, _ in function.parameters[1:])
        self._waiting: list[tuple[Call, asyncio.Future[Any]]] = []
        self._serving: asyncio.Task[None] | None = None

    def __call__(self) -> Interact:
        return Interact(self)

    async def ask(self, messages: Sequence[Message], answer: Any = None) -> Any:
        """What `interact` returns, or a `Failure`."""
        said: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((((list(messages),), {"answer": answer} if self._takes_answer else {}), said))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        return await said

    def close(self) -> None:
        """End the process."""
        self._process.close()

    async def _serve(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            asked = [future for _, future in batch]
            try:
                answers = await self._process.call(self._function, [call for call, _ in batch])
            except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
                answers = [error] * len(asked)
            for future, answer in zip(asked, answers, strict=True):
                if future.done():  # its episode was given up meanwhile
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


def load_interact(
    path: str, *, time_limit: float = TIME_LIMIT, memory: int | None = None, needed: bool = True
) -> Tools | type[SingleTurn]:
    """A maker of episodes from the file at `path`, its process started. `time_limit`: seconds for one call; `memory`:
    bytes that the process may have; not `needed`: a file without `interact` has a single turn. NovaError, with file and
    line: the file is missing, does not import, or has no `interact(messages)`."""
    process = UserProcess(Path(path), time_limit=time_limit, memory=memory)
    if not needed and "interact" not in process.functions:
        process.close()
        return SingleTurn
    try:
        function = process.function("interact")
        asked = [name for name, kind, default in function.parameters if not default and not kind.startswith("VAR_")]
        if not function.parameters or asked[1:] not in ([], ["answer"]):
            raise NovaError(
                "interact must take the messages and, optionally, the reference answer",
                where=function.where,
                fix="define interact(messages) or interact(messages, answer)",
            )
    except NovaError:
        process.close()
        raise
    return Tools(process, function)


def _reward(value: Any) -> float | None:
    found = None if value is None else check(value)
    if found is None or isinstance(found, float):
        return found
    raise ToolFailed(f"interact returned the reward {value!r:.80}, not a finite number")


def _messages(answer: Any) -> tuple[Message, ...]:
    if not isinstance(answer, list):
        raise ToolFailed(
            f"interact returned {answer!r:.80}, not a list of messages (empty if no tool is called) or a mapping"
        )
    for message in answer:
        right = (
            isinstance(message, Mapping) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        )
        if not right:
            raise ToolFailed(
                f"interact returned {message!r:.80}, not a message with content and a role ({', '.join(ROLES)})"
            )
    return tuple(answer)
