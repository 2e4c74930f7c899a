"""What is refused before it is queued, and the order of the queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from novarl.core.errors import NovaError
from novarl.core.types import Sampling
from novarl.engines.local.requests import Queue, Request, checked_limit


def test_the_limit_is_max_tokens_or_what_the_context_leaves() -> None:
    assert checked_limit([1, 2], Sampling(max_tokens=5), context=10, vocabulary=4) == 5
    assert checked_limit([1, 2], Sampling(max_tokens=50), context=10, vocabulary=4) == 8


@pytest.mark.parametrize(
    ("prompt", "changes", "words"),
    [
        ([1] * 10, {}, ["10 tokens", "context of 10", "at most 9"]),
        ([1] * 12, {}, ["12 tokens", "context of 10"]),
        ([], {}, ["the prompt is empty"]),
        ([1, 4], {}, ["1 to 4", "0 to 3"]),
        ([-1], {}, ["-1"]),
        ([1], {"temperature": -0.5}, ["sampling.temperature", "-0.5"]),
        ([1], {"temperature": 1e-45}, ["sampling.temperature", "0 or at least 0.0001"]),
        ([1], {"temperature": float("nan")}, ["sampling.temperature", "nan"]),
        ([1], {"top_p": 0.0}, ["sampling.top_p"]),
        ([1], {"top_p": 1.5}, ["sampling.top_p"]),
        ([1], {"min_p": 1.5}, ["sampling.min_p"]),
        ([1], {"top_k": -1}, ["sampling.top_k"]),
        ([1], {"max_tokens": 0}, ["sampling.max_tokens"]),
        ([1], {"stop": ("",)}, ["sampling.stop"]),
        ([1, 2], {"answered": 3}, ["sampling.answered", "from 0 to 2"]),
        ([1, 2], {"answered": -1}, ["sampling.answered"]),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(prompt: list[int], changes: dict, words: list[str]) -> None:
    with pytest.raises(NovaError) as caught:
        checked_limit(prompt, replace(Sampling(), **changes), context=10, vocabulary=4)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_queue_hands_out_groups_of_equal_prompts_oldest_first() -> None:
    async def check() -> None:
        future = asyncio.get_running_loop().create_future
        queue = Queue()
        one, two, three = (1,), (2,), (3,)
        requests = [Request(p, Sampling(), str(i), 1, future()) for i, p in enumerate([one, two, one, three, one, two])]
        for request in requests:
            queue.put(request)
        requests[2].future.cancel()
        requests[3].future.cancel()

        def keys(most: int) -> list[str]:
            return [request.key for request in queue.take(most)]

        assert [keys(1), keys(8), keys(0), keys(1), keys(9), keys(9)] == [["0"], ["4"], [], ["1"], ["5"], []]

    asyncio.run(check())
