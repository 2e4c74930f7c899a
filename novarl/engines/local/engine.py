"""The in-process engine: continuous batching on the learner's own weights.

Callers await `sample`; one asyncio task, the driver, steps all rows together while there are requests, admits waiting
ones as rows end, and lets the event loop turn between steps, so that rewards and new requests run meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.core.memory import first_line, out_of_memory
from novarl.core.types import Completion, Sampling, Tokenizer
from novarl.engines.local.batch import Batch
from novarl.engines.local.requests import Queue, Request, checked_limit
from novarl.engines.local.runner import ModelRunner, Prefill

KEPT_SLOTS = 4096
"""Prefills are kept for whoever begins alike while they take no more than this many slots of key/value cache."""


class LocalEngine:
    """Samples completions from a model in this process; implements `novarl.core.types.Engine`.

    A request's result depends on the weights, its tokens, its sampling and its key alone: whatever runs beside it,
    tokens and log-probabilities are the same. On a CPU they are the same bits, where MKL_CBWR was set as
    `core.processor` says before torch loaded (`runner` says how; a mixture of experts is the exception).

    An engine may serve several event loops, one after the other (`asyncio.run` makes a new one each time). A completion
    ends at any of `eos_ids` or of its own stop tokens and strings, at its max_tokens, or where `context` (the longest
    sequence, prompt included) is full.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        *,
        eos_ids: Sequence[int],
        context: int,
        max_batch: int = 256,
        pad_id: int = 0,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.version, self.shares_weights = 0, True
        self._runner = ModelRunner(model, compute_dtype=compute_dtype, pad_id=pad_id)
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._eos_ids, self._context, self._max_batch = tuple(eos_ids), context, max_batch
        self._queue = Queue()
        self._outstanding: set[Request] = set()
        self._driver: asyncio.Task[None] | None = None
        self._recent: dict[tuple[int, ...], Prefill] = {}
        self._some_cancelled = False
        self._closed = False

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        """Sample one completion of the prompt `tokens`. `key` names the request's random stream under sampling.seed.

        Raises NovaError if the prompt is empty, foreign to the model or as long as the context, or a sampling value
        out of range. If sampling itself fails, every request in flight raises that exception.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        prompt = tuple(tokens)
        limit = checked_limit(prompt, sampling, context=self._context, vocabulary=self._runner.vocabulary)
        loop = asyncio.get_running_loop()
        self._leave_other_loop(loop)
        request = Request(prompt, sampling, key, limit, loop.create_future())
        self._outstanding.add(request)
        self._queue.put(request)
        if self._driver is None or self._driver.done():  # one that was cancelled before its first step never took leave
            self._driver = loop.create_task(self._drive(), name="novarl-local-engine")
            # The requests have the driver's exception; asyncio need not report it once more.
            self._driver.add_done_callback(lambda driver: driver.cancelled() or driver.exception())
        try:
            return await request.future
        except asyncio.CancelledError:
            self._some_cancelled = True
            raise
        finally:
            self._outstanding.discard(request)

    def publish(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Sample from new weights from the next token on; `version` is recorded with each token.

        None: the engine shares the learner's modules, and they have changed. Otherwise named tensors are copied in,
        all or none: NovaError if a name is unknown or missing, or a shape differs. Requests in flight go on with the
        keys and values they have.
        """
        if weights is not None:
            _copy_weights(self._runner.model, dict(weights))
        self.version = version
        self._runner.refresh()
        self._recent.clear()

    def close(self) -> None:
        """Cancel what is being sampled (those who wait get CancelledError) and refuse further requests."""
        self._closed = True
        driver, self._driver = self._driver, None
        if driver is not None and not driver.get_loop().is_closed():
            driver.cancel()
            self._end_requests(asyncio.CancelledError())

    async def _drive(self) -> None:
        """Step until nobody waits. Nothing of a stretch outlives it: idle, an engine holds no cache and no weights."""
        try:
            self._runner.refresh()
            batch = Batch(self._runner, self._decode, max_batch=self._max_batch, eos_ids=self._eos_ids)
            while True:
                arrivals = self._arrivals(batch.free)
                if not arrivals and not len(batch):
                    break
                for request, completion in batch.step(arrivals, self.version):
                    if not request.future.done():
                        request.future.set_result(completion)
                await asyncio.sleep(0)
                if self._some_cancelled:
                    self._some_cancelled = False
                    batch.drop_cancelled()
        except BaseException as error:
            self._end_requests(_no_memory(error) if out_of_memory(error) else error)
            raise
        finally:
            # In the same breath as the last look at the queue: no request can fall between.
            self._driver = None
            self._recent.clear()
            self._runner.refresh()

    def _arrivals(self, free: int) -> list[tuple[list[Request], Prefill]]:
        """Take up to `free` waiting requests, with one prefill for each prompt.

        The latest prefills are kept: where the batch is full, the rest of a group arrives later, and a conversation
        that goes on, or another continuation of the same beginning, repeats what has been run. (What rows decoded is
        not kept for that: run as a prompt it has other last bits, and would depend on what was still there.)
        """
        groups = []
        while requests := self._queue.take(free):
            groups.append(requests)
            free -= len(requests)
        if not groups:
            return []
        asked = dict.fromkeys(requests[0].prompt for requests in groups)
        new = self._runner.prefill([prompt for prompt in asked if prompt not in self._recent], self._recent.values())
        prefills = self._recent | {prefill.prompt: prefill for prefill in new}
        # Those just asked for come last, and the oldest go first; the very last stays in any case.
        self._recent = {prompt: prefill for prompt, prefill in prefills.items() if prompt not in asked}
        self._recent |= {prompt: prefills[prompt] for prompt in asked}
        while len(self._recent) > 1 and _slots(self._recent.values()) > KEPT_SLOTS:
            del self._recent[next(iter(self._recent))]
        return [(requests, prefills[requests[0].prompt]) for requests in groups]

    def _end_requests(self, error: BaseException) -> None:
        """Nobody waits for ever: hand `error` to every request, or cancel it where the driver was cancelled."""
        self._queue.clear()
        for request in self._outstanding:
            if not request.future.done():
                if isinstance(error, Exception):
                    request.future.set_exception(error)
                else:
                    request.future.cancel()

    def _leave_other_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Forget a driver whose event loop has ended without cancelling it; refuse two loops at a time."""
        if self._driver is None or self._driver.get_loop() is loop:
            return
        if self._driver.get_loop().is_running():
            raise RuntimeError("the engine is sampling in another event loop; use one loop at a time")
        self._queue.clear()
        self._outstanding.clear()
        self._driver.get_coro().close()
        self._driver = None  # where it had not begun, closing it ran nothing of it


def _no_memory(error: BaseException) -> NovaError:
    fix = "lower rollout.max_batch or rollout.max_tokens; a run goes on from its last save with resume=auto"
    return NovaError(f"memory ran out ({first_line(error)})", where="sampling", fix=fix)


def _slots(prefills: Iterable[Prefill]) -> int:
    """The memory that prefills hold, in slots of one row; those that were run together share a cache."""
    caches = {id(prefill.cache): prefill.cache for prefill in prefills}
    return sum(cache.rows * cache.capacity for cache in caches.values())


def sample_all(engine: LocalEngine, requests: Iterable[tuple[Sequence[int], Sampling, str]]) -> list[Completion]:
    """Sample many requests (tokens, sampling, key) from code that is not asynchronous; results in their order."""

    async def gather() -> list[Completion]:
        return await asyncio.gather(*(engine.sample(tokens, sampling, key=key) for tokens, sampling, key in requests))

    return asyncio.run(gather())


def _copy_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy named tensors over the model's parameters (and buffers, where given), after checking all of them."""
    own = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    unknown = sorted(weights.keys() - own.keys())
    given = {id(own[name]) for name in weights.keys() & own.keys()}
    missing = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in given)
    if unknown or missing:
        names = ", ".join((unknown or missing)[:3])
        raise NovaError(
            f"published weights {'hold unknown' if unknown else 'lack'} {names}",
            fix="publish all of this model's weights",
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise NovaError(f"published weight has shape {list(tensor.shape)}, not {list(own[name].shape)}", where=name)
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
