"""Samples of one prompt are computed once until they part: fewer rows, and each sample what it is alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from novarl.core.types import Completion, Sampling
from novarl.engines.local import batch
from novarl.engines.local.batch import Batch
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.engines.local.kv_cache import KVCache
from novarl.models.load import Policy

from .conftest import echo

Wanted = list[tuple[list[int], Sampling, str]]


def requests(samples: int = 8) -> Wanted:
    """Of five prompts, one of them long; completions of unlike lengths, greedy ones among them."""
    rng = random.Random(0)
    wanted: Wanted = []
    for prompt in (echo(length, rng=rng) for length in (5, 17, 40, 64, 170)):
        for sample in range(samples):
            sampling = Sampling(
                max_tokens=rng.randint(20, 60), seed=sample, temperature=(0.0, 1.0, 1.5, 2.0)[sample % 4]
            )
            wanted.append((prompt, sampling, f"{len(prompt)}/{sample}"))
    return wanted


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(requests, rows that are computed for them) of every step."""
    counts: list[tuple[int, int]] = []
    honest = Batch._decode_branches

    def decode(self: Batch) -> object:
        counts.append((len(self), len(self._branches)))
        return honest(self)

    monkeypatch.setattr(Batch, "_decode_branches", decode)
    yield counts


def engine(policy: Policy, max_batch: int = 64) -> LocalEngine:
    return LocalEngine(policy.model, policy.tokenizer, eos_ids=[0], context=512, max_batch=max_batch)


def alone(policy: Policy) -> list[Completion]:
    return [sample_all(engine(policy), [request])[0] for request in requests()]


@pytest.mark.parametrize(("max_batch", "share"), [(64, 0.8), (11, 0.95)])
def test_what_samples_begin_with_is_computed_once(
    policy: Policy, reproducible: None, counted: list[tuple[int, int]], max_batch: int, share: float
) -> None:
    together = sample_all(engine(policy, max_batch), requests())
    of_all, rows = (sum(column) for column in zip(*counted, strict=True))
    assert rows < share * of_all, "hardly anything was shared; where few fit, samples come one after another"
    assert max(rows for _, rows in counted[1:]) > 5, "some part"
    counted.clear()
    assert together == alone(policy)
    assert len({completion.tokens for completion in together}) > 20
    assert all(requests == rows == 1 for requests, rows in counted)


def forks_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "move", lambda *_: None)


def copies_one_slot_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVCache.move
    monkeypatch.setattr(KVCache, "move", lambda self, to, origin, length: honest(self, to, origin, length - 1))


def goes_with_its_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that part, each goes to the branch of another."""
    honest = np.unique

    def unique(*args: object, **kwargs: object) -> object:
        if not kwargs:
            return honest(*args)  # type: ignore[call-overload]
        found, first, branch = honest(*args, **kwargs)  # type: ignore[call-overload]
        return found, first, branch[::-1] if len(found) < len(branch) else branch

    monkeypatch.setattr(batch.np, "unique", unique)


@pytest.mark.parametrize("fault", [forks_without_a_copy, copies_one_slot_too_few, goes_with_its_neighbour])
def test_faults_are_caught(
    policy: Policy, reproducible: None, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    right = alone(policy)
    fault(monkeypatch)
    assert sample_all(engine(policy), requests()) != right


def test_who_is_cancelled_leaves_the_branch_to_the_others(policy: Policy, reproducible: None) -> None:
    wanted = requests()

    async def some() -> list[Completion | BaseException]:
        sampler = engine(policy)
        tasks = [asyncio.ensure_future(sampler.sample(tokens, how, key=key)) for tokens, how, key in wanted]
        for _ in range(20):
            await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(some())
    assert all(isinstance(completion, asyncio.CancelledError) for completion in found[::3])
    for index, right in enumerate(alone(policy)):
        assert index % 3 == 0 or found[index] == right


def test_rows_that_fill_the_cache_move_and_fork(policy: Policy, reproducible: None) -> None:
    """The token just chosen has no slot yet: of 512 slots all may be full when a row moves."""
    prompt = echo(13, rng=random.Random(0))
    wanted = [(prompt, Sampling(max_tokens=most, seed=most), str(most)) for most in (500, 520, 520)]
    sampler = LocalEngine(policy.model, policy.tokenizer, eos_ids=[0], context=1024)
    together = sample_all(sampler, wanted)
    assert [len(completion.tokens) for completion in together] == [500, 520, 520]
    for request, completion in zip(wanted, together, strict=True):
        assert sample_all(sampler, [request]) == [completion]


def test_others_arrive_while_branches_live(policy: Policy, reproducible: None) -> None:
    """Room is made for them, and what the branches hold stays."""
    wanted = requests()

    async def staged() -> list[Completion]:
        sampler = engine(policy)
        tasks = []
        for tokens, how, key in wanted:
            tasks.append(asyncio.ensure_future(sampler.sample(tokens, how, key=key)))
            if len(tasks) % 5 == 3:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    assert asyncio.run(staged()) == alone(policy)
