"""The in-process engine: continuous batching on the learner's own weights.

Callers await `sample`; one asyncio task, the driver, steps all rows together while there are requests, admits waiting
ones as rows finish, and yields to the event loop between steps, so that rewards and new requests can run.
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
"""Prefills are kept for reuse up to this many slots of KV cache."""


class LocalEngine:
    """Samples completions from a model in this process; implements `novarl.core.types.Engine`.

    A request's result depends only on the weights, its tokens, its sampling parameters and its key, not on concurrent
    requests. On a CPU it is bit-identical if MKL_CBWR was set according to `core.processor` before torch was loaded
    (see `runner`). An engine may serve several event loops, one after the other. A completion ends at any of `eos_ids`,
    at its own stop tokens and strings, at its max_tokens, or when `context` (the maximum sequence length) is full.
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

        Raises NovaError if the prompt is empty, has unknown token ids or fills the context, or if a sampling value is
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
        if self._driver is None or self._driver.done():  # a driver cancelled before its first step did not clean up
            self._driver = loop.create_task(self._drive(), name="novarl-local-engine")
            # The requests already have the driver's exception; asyncio need not report it again.
            self._driver.add_done_callback(lambda driver: driver.cancelled() or driver.exception())
        try:
            return await request.future
        except asyncio.CancelledError:
            self._some_cancelled = True
            raise
        finally:
            self._outstanding.discard(request)

    def publish(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """Use new weights from the next token on; `version` is recorded with each token.

        None: the engine shares the learner's modules, which have changed. Otherwise all named tensors are copied, or
        none: NovaError if a name is unknown or missing, or a shape differs.
        """
        if weights is not None:
            _copy_weights(self._runner.model, dict(weights))
        self.version = version
        self._runner.refresh()
        self._recent.clear()

    def close(self) -> None:
        """Cancel all requests (callers get CancelledError) and refuse further ones."""
        self._closed = True
        driver, self._driver = self._driver, None
        if driver is not None and not driver.get_loop().is_closed():
            driver.cancel()
            self._end_requests(asyncio.CancelledError())

    async def _drive(self) -> None:
        """Step until there are no requests. An idle engine holds no cache and no copies of weights."""
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
            # No await since the last look at the queue, so no request can be missed.
            self._driver = None
            self._recent.clear()
            self._runner.refresh()

    def _arrivals(self, free: int) -> list[tuple[list[Request], Prefill]]:
        """Take up to `free` waiting requests, with one prefill per prompt.

        The latest prefills are kept for reuse: if the batch is full, the rest of a group arrives later, and later turns
        of a conversation begin with the same tokens. (Decoded tokens are not reused: prefilled, they have other last
        bits, so results would depend on what was cached.)
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
        # The most recently used come last, and the oldest are dropped first; the last one always stays.
        self._recent = {prompt: prefill for prompt, prefill in prefills.items() if prompt not in asked}
        self._recent |= {prompt: prefills[prompt] for prompt in asked}
        while len(self._recent) > 1 and _slots(self._recent.values()) > KEPT_SLOTS:
            del self._recent[next(iter(self._recent))]
        return [(requests, prefills[requests[0].prompt]) for requests in groups]

    def _end_requests(self, error: BaseException) -> None:
        """Pass `error` to every request, or cancel them if the driver was cancelled."""
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
        self._driver = None  # if it had not started, closing it ran no code


def _no_memory(error: BaseException) -> NovaError:
    fix = "lower rollout.max_batch or rollout.max_tokens; resume=auto continues the run from its last checkpoint"
    return NovaError(f"out of memory ({first_line(error)})", where="sampling", fix=fix)


def _slots(prefills: Iterable[Prefill]) -> int:
    """The memory of prefills in slots of one row; those run together share a cache."""
    caches = {id(prefill.cache): prefill.cache for prefill in prefills}
    return sum(cache.rows * cache.capacity for cache in caches.values())


def sample_all(engine: LocalEngine, requests: Iterable[tuple[Sequence[int], Sampling, str]]) -> list[Completion]:
    """Sample many requests (tokens, sampling, key) from synchronous code; results are in order."""

    async def gather() -> list[Completion]:
        return await asyncio.gather(*(engine.sample(tokens, sampling, key=key) for tokens, sampling, key in requests))

    return asyncio.run(gather())


def _copy_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy named tensors to the model's parameters (and given buffers), after checking all of them."""
    own = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    unknown = sorted(weights.keys() - own.keys())
    given = {id(own[name]) for name in weights.keys() & own.keys()}
    missing = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in given)
    if unknown or missing:
        names = ", ".join((unknown or missing)[:3])
        raise NovaError(
            f"published weights {'contain unknown' if unknown else 'lack'} {names}",
            fix="publish all of this model's weights",
        )
    for name, tensor in weights.items():
        if tensor.shape != own[name].shape:
            raise NovaError(f"published weight has shape {list(tensor.shape)}, not {list(own[name].shape)}", where=name)
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
