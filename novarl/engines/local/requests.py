"""Requests for completions, and their queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from novarl.algos.support import LARGEST_VOCABULARY
from novarl.core.errors import NovaError
from novarl.core.types import COLDEST, Completion, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One completion to sample: a validated prompt, sampling parameters, the key of its random stream, and the future
    for the result. `limit` is the maximum number of tokens: max_tokens, or what the context leaves."""

    prompt: tuple[int, ...]
    sampling: Sampling
    key: str
    limit: int
    future: asyncio.Future[Completion]


def checked_limit(prompt: Sequence[int], sampling: Sampling, *, context: int, vocabulary: int) -> int:
    """The maximum number of tokens a request may sample. Raises NovaError if the request is invalid."""
    if not prompt:
        raise NovaError("the prompt is empty", fix="pass at least one token, for example the bos token")
    if len(prompt) >= context:
        raise NovaError(
            f"the prompt has {len(prompt)} tokens, which fills the model's context of {context}",
            fix=f"shorten the prompt to at most {context - 1} tokens",
        )
    least, most = min(prompt), max(prompt)
    if least < 0 or most >= vocabulary:
        raise NovaError(
            f"the prompt has token ids from {least} to {most}, but the model has ids from 0 to {vocabulary - 1}",
            fix="use the model's own tokenizer",
        )
    ranges = {
        "temperature": (sampling.temperature == 0 or sampling.temperature >= COLDEST, f"0 or at least {COLDEST:g}"),
        "top_k": (sampling.top_k >= 0, "at least 0 (0: off)"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1 (1: off)"),
        "min_p": (0 <= sampling.min_p <= 1, "from 0 to 1 (0: off)"),
        "max_tokens": (sampling.max_tokens >= 1, "at least 1"),
        "stop": (all(sampling.stop), "non-empty strings"),
        "answered": (0 <= sampling.answered <= len(prompt), f"from 0 to {len(prompt)}, the length of the prompt"),
    }
    for name, (good, wanted) in ranges.items():
        if not good:
            raise NovaError(f"{name} is {getattr(sampling, name)!r}", where=f"sampling.{name}", fix=f"use {wanted}")
    if sampling.records and vocabulary > LARGEST_VOCABULARY:
        raise NovaError(
            f"truncated sampling supports at most {LARGEST_VOCABULARY} token ids, but the model has {vocabulary}",
            fix="use rollout.top_k=0, rollout.top_p=1 and rollout.min_p=0",
        )
    return min(sampling.max_tokens, context - len(prompt))


class Queue:
    """Waiting requests, oldest prompt first; equal prompts are grouped to share one prefill."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], deque[Request]] = {}

    def __len__(self) -> int:
        return sum(len(group) for group in self._groups.values())

    def put(self, request: Request) -> None:
        self._groups.setdefault(request.prompt, deque()).append(request)

    def take(self, most: int) -> list[Request]:
        """Up to `most` requests with equal prompts, in order; cancelled ones are dropped."""
        while self._groups and most > 0:
            prompt, group = next(iter(self._groups.items()))
            taken: list[Request] = []
            while group and len(taken) < most:
                request = group.popleft()
                if not request.future.done():
                    taken.append(request)
            if not group:
                del self._groups[prompt]
            if taken:
                return taken
        return []

    def clear(self) -> list[Request]:
        """Empty the queue and return its contents."""
        requests = [request for group in self._groups.values() for request in group]
        self._groups.clear()
        return requests
