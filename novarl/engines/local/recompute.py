"""Sampling without a cache, for user-defined modules: every step recomputes all sequences from the first token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from novarl.core.seeds import derive
from novarl.core.types import Completion, Sampling, Tokenizer
from novarl.engines.local.requests import Request, checked_limit
from novarl.engines.local.sampling import Choice, Parameters, choose
from novarl.engines.local.stops import StopRule
from novarl.models.plain import PlainModel


@dataclass(slots=True)
class Running:
    """A request and its sampled tokens: (token, log-probability, log of the kept mass, version, support) each."""

    request: Request
    stream: int
    stops: StopRule
    tokens: list[int] = field(default_factory=list)
    sampled: list[tuple[float, float, int]] = field(default_factory=list)
    support: list[bytes] = field(default_factory=list)


class RecomputeEngine:
    """Samples from a `PlainModel` in batches of up to `max_batch`; implements `novarl.core.types.Engine`."""

    def __init__(
        self, model: PlainModel, tokenizer: Tokenizer, *, eos_ids: Sequence[int], context: int, max_batch: int = 256
    ) -> None:
        self.version, self.shares_weights = 0, True
        self._model, self._context, self._max_batch = model, context, max_batch
        self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._eos_ids = tuple(eos_ids)
        self._waiting: list[Request] = []
        self._driver: asyncio.Task[None] | None = None

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, key: str) -> Completion:
        """Sample one completion of the prompt `tokens`; `key` names the request's random stream under sampling.seed."""
        prompt, loop = tuple(tokens), asyncio.get_running_loop()
        limit = checked_limit(prompt, sampling, context=self._context, vocabulary=self._model.vocabulary)
        request = Request(prompt, sampling, key, limit, loop.create_future())
        self._waiting.append(request)
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive(), name="novarl-recompute-engine")
            self._driver.add_done_callback(lambda driver: driver.cancelled() or driver.exception())
        return await request.future

    def publish(self, weights: Iterable[tuple[str, Tensor]] | None, version: int) -> None:
        """None: the engine shares the learner's module, which has changed. Named tensors are copied into it."""
        if weights is not None:
            self._model.module.load_state_dict(dict(weights))
        self.version = version

    def close(self) -> None:
        """Cancel all requests."""
        if self._driver is not None and not self._driver.get_loop().is_closed():
            self._driver.cancel()

    async def _drive(self) -> None:
        running: list[Running] = []
        try:
            while True:
                await asyncio.sleep(0)  # requests made in the same turn join the batch
                room = self._max_batch - len(running)
                arrivals, self._waiting = self._waiting[:room], self._waiting[room:]
                running += [self._begin(request) for request in arrivals if not request.future.done()]
                if not running:
                    return
                running = self._step(running)
        except BaseException as error:
            for request in (*(one.request for one in running), *self._waiting):
                if not request.future.done():
                    if isinstance(error, Exception):
                        request.future.set_exception(error)
                    else:
                        request.future.cancel()
            self._waiting = []
            raise

    def _begin(self, request: Request) -> Running:
        sampling = request.sampling
        begun = request.prompt[len(request.prompt) - sampling.answered :]
        stops = StopRule((*self._eos_ids, *sampling.stop_tokens), sampling.stop, self._decode, begun=begun)
        return Running(request, derive(sampling.seed, request.key), stops)

    def _step(self, running: list[Running]) -> list[Running]:
        """Sample one token for each and return the unfinished ones."""
        choice = self._choose(running)
        columns = zip(choice.token.tolist(), choice.logp.tolist(), choice.kept_logmass.tolist(), strict=True)
        going_on = []
        for index, (one, (token, logp, kept)) in enumerate(zip(running, columns, strict=True)):
            one.tokens.append(token)
            one.sampled.append((logp, kept, self.version))
            if choice.support is not None:
                one.support.append(choice.support[index])
            if one.stops.feed(token):
                _end(one, "stop")
            elif len(one.tokens) >= one.request.limit:
                _end(one, "length")
            else:
                going_on.append(one)
        return going_on

    @torch.no_grad()
    def _choose(self, running: list[Running]) -> Choice:
        rows = [[*one.request.prompt, *one.tokens] for one in running]
        device, lengths = self._model.device, [len(row) for row in rows]
        tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64, device=device)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
        positions = torch.arange(tokens.size(1), device=device).expand_as(tokens)
        last = torch.tensor(lengths, device=device) - 1
        logits = self._model.logits(tokens, positions)[torch.arange(len(rows), device=device), last]
        samplings = [one.request.sampling for one in running]
        return choose(logits, Parameters.of([one.stream for one in running], samplings, device), last + 1)


def _end(one: Running, reason: str) -> None:
    if one.request.future.done():
        return
    logp, kept, versions = zip(*one.sampled, strict=True)
    records = one.request.sampling.records
    support = tuple(one.support) if records else None
    one.request.future.set_result(Completion(tuple(one.tokens), logp, kept, versions, reason, support))  # type: ignore[arg-type]
