"""The rows being decoded: one step for all of them, with arrivals before it and departures after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.core.types import Completion
from novarl.engines.requests import Request
from novarl.engines.runner import ROWS, ModelRunner, Prefill
from novarl.engines.sampling import Choice, Parameters, choose
from novarl.engines.stops import Decode, StopRule
from novarl.models.decode import Segment
from novarl.models.kv_cache import KVCache, round_up

_SHORT = 96
"""Rows with up to this many tokens are read together, those with up to twice as many, and so on: in each run of rows
attention reads as many slots as the longest needs, and each run costs some launches."""

_STATE = np.dtype([("length", np.int64), ("count", np.int64), ("limit", np.int64), ("last", np.int64)])
_SAMPLED = np.dtype([("token", np.int64), ("logp", np.float32), ("kept_logmass", np.float32), ("version", np.int64)])

_FIRST_SLOTS = 512
"""Room for tokens to begin with, where a request may need it; doubled when it is full."""

_FIRST_COLUMNS = 64
"""Room for sampled tokens to begin with; doubled when it is full."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a row has that is no counter: its request, its random stream, and how it stops, where eos is not all."""

    request: Request
    stream: int
    stops: StopRule | None


class Batch:
    """Up to `max_batch` requests decoded side by side.

    Active rows are always rows 0 .. size - 1, long ones before short ones so that attention need not read for all what
    the longest needs: arrivals are appended, and rows move when others have ended or they have outgrown their size,
    which costs a copy of them and nothing per step. Counters and what was sampled live in arrays, one
    entry a row (`length` counts the prompt too, `last` is the token to feed next), and become tuples when a row ends.
    """

    def __init__(self, runner: ModelRunner, decode: Decode, *, max_batch: int, eos_ids: Sequence[int]) -> None:
        self._runner, self._decode, self._max_batch = runner, decode, max_batch
        self._eos_ids = np.array(eos_ids, np.int64)
        rows = round_up(max_batch, ROWS)
        self._cache = runner.new_cache()
        self._rows: list[Row] = []
        self._state = np.zeros(rows, _STATE)
        self._sampled = np.zeros((rows, _FIRST_COLUMNS), _SAMPLED)
        self._places = np.zeros(0, np.int64)
        self._regroup()

    @property
    def free(self) -> int:
        """How many more requests may arrive."""
        return self._max_batch - len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def step(
        self, arrivals: Sequence[tuple[Sequence[Request], Prefill]], version: int
    ) -> list[tuple[Request, Completion]]:
        """Sample one token of every row: of those here by feeding their last token, of arrivals after their prompt.

        Returns the requests that ended with it. `version` is that of the weights, written beside each token.
        """
        # Decoding goes first: the rows that pad it to a multiple of ROWS are those that arrivals will overwrite.
        logits = [self._decode_rows()] if self._rows else []
        if arrivals:
            self._add(arrivals)
            self._regroup()
            logits += [prefill.logits.expand(len(requests), -1) for requests, prefill in arrivals]
        position = torch.from_numpy(self._state["length"][: len(self)]).to(self._runner.device)
        every = logits[0] if len(logits) == 1 else torch.cat(logits)  # which copies even one
        return self._accept(choose(every, self._parameters, position), version)

    def drop_cancelled(self) -> None:
        """Let go of the rows whose requests nobody waits for any more."""
        self._keep([index for index, row in enumerate(self._rows) if not row.request.future.done()])

    def _decode_rows(self) -> Tensor:
        """Logits [size, V] after feeding every row's last token. Rows that only pad feed slot 0 of an idle row."""
        size, width = len(self), round_up(len(self), ROWS)
        tokens, slots = np.full(width, self._runner.pad_id, np.int64), np.zeros(width, np.int64)
        tokens[:size], slots[:size] = self._state["last"][:size], self._state["length"][:size] - 1
        segments = self._segments(width)
        self._cache.reserve(max(slots for _, _, slots in segments), held=size)
        device = self._runner.device
        fed, at = torch.from_numpy(tokens).to(device), torch.from_numpy(slots).to(device)
        return self._runner.decode(fed, at, self._cache, segments)[:size]

    def _make_room(self, arriving: int) -> None:
        """Rows of the cache for so many more, twice as many as before or all that there may be."""
        needed = round_up(len(self) + arriving, ROWS)
        if needed > self._cache.rows:
            rows = min(round_up(self._max_batch, ROWS), max(needed, 2 * self._cache.rows))
            self._cache.reserve(0, rows=rows, held=len(self))

    def _add(self, arrivals: Sequence[tuple[Sequence[Request], Prefill]]) -> None:
        """Give each request a row that holds its prompt."""
        held = len(self)
        self._make_room(sum(len(requests) for requests, _ in arrivals))
        copies: dict[KVCache, list[tuple[int, Prefill]]] = defaultdict(list)
        slots = 0
        for requests, prefill in arrivals:
            length = len(prefill.prompt)
            longest = self._cache.extent(length + max(request.limit for request in requests))
            slots = max(slots, min(longest, _FIRST_SLOTS), self._cache.extent(length + 1))
            for request in requests:
                copies[prefill.cache].append((len(self), prefill))
                sampling = request.sampling
                own_rule = sampling.stop or sampling.stop_tokens
                stops = StopRule(sampling.stop_tokens, sampling.stop, self._decode) if own_rule else None
                self._state[len(self)] = (length, 0, request.limit, 0)
                self._rows.append(Row(request, derive(sampling.seed, request.key), stops))
        self._cache.reserve(slots, held=held)
        for cache, pairs in copies.items():
            # What lies beyond a shorter prompt comes along: finite, and hidden until it is overwritten.
            longest = max(len(prefill.prompt) for _, prefill in pairs)
            rows, origins = [row for row, _ in pairs], [prefill.row for _, prefill in pairs]
            self._cache.insert(rows, cache, origins, length=longest)

    def _regroup(self) -> None:
        """What is worked out once for each set of rows, not at each step."""
        streams, samplings = [row.stream for row in self._rows], [row.request.sampling for row in self._rows]
        self._parameters = Parameters.of(streams, samplings, self._runner.device)
        self._watched = [index for index, row in enumerate(self._rows) if row.stops is not None]

    def _accept(self, choice: Choice, version: int) -> list[tuple[Request, Completion]]:
        """Record one chosen token a row, and let the rows that end with it go."""
        size = len(self)
        state = self._state[:size]
        tokens, logp = choice.token.cpu().numpy(), choice.logp.cpu().numpy()
        if not np.isfinite(logp).all():
            raise NovaError("the model's logits are not finite", where="sampling", fix="the weights have diverged")
        if state["count"].max() == self._sampled.shape[1]:
            self._sampled = np.concatenate([self._sampled, np.zeros_like(self._sampled)], axis=1)
        here = np.arange(size), state["count"]
        self._sampled["token"][here], self._sampled["logp"][here] = tokens, logp
        self._sampled["kept_logmass"][here], self._sampled["version"][here] = choice.kept_logmass.cpu().numpy(), version
        state["last"] = tokens
        state["length"] += 1
        state["count"] += 1

        stopped = (tokens[:, None] == self._eos_ids).any(1)
        for index in self._watched:
            stops = self._rows[index].stops
            stopped[index] |= stops is not None and stops.feed(int(tokens[index]))
        ended = stopped | (state["count"] >= state["limit"])
        finished = [
            (self._rows[index].request, self._completion(index, bool(stopped[index])))
            for index in np.flatnonzero(ended).tolist()
        ]
        if finished or len(self._places) != size or (self._sizes(state["length"]) != self._places).any():
            self._keep(np.flatnonzero(~ended))
        return finished

    def _completion(self, row: int, stopped: bool) -> Completion:
        sampled = self._sampled[row, : self._state["count"][row]]
        columns = {name: tuple(sampled[name].tolist()) for name in ("token", "logp", "kept_logmass", "version")}
        return Completion(
            tokens=columns["token"],
            logp=columns["logp"],
            kept_logmass=columns["kept_logmass"],
            versions=columns["version"],
            finish_reason="stop" if stopped else "length",
        )

    def _keep(self, staying: Sequence[int] | NDArray[np.int64]) -> None:
        """Rows `staying` become rows 0 .. n - 1, the longest sizes first; who is in a place of its size stays there."""
        lengths, old = self._state["length"], np.asarray(staying, np.int64)
        sizes = self._sizes(lengths[old])
        self._places = -np.sort(-sizes)
        settled = old < len(old)
        settled[settled] = self._places[old[settled]] == sizes[settled]
        places = np.setdiff1d(np.arange(len(old)), old[settled], assume_unique=True)
        movers = old[~settled][np.argsort(-sizes[~settled], kind="stable")]
        if len(movers):
            self._cache.move(places.tolist(), movers.tolist(), int(lengths[movers].max()))
            self._state[places], self._sampled[places] = self._state[movers], self._sampled[movers]
            for place, row in zip(places, [self._rows[mover] for mover in movers], strict=True):
                self._rows[place] = row
        del self._rows[len(old) :]
        self._regroup()

    def _sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """0 for rows of up to _SHORT tokens, 1 for those of up to twice as many, and so on; in a cache that is cut into
        slabs, how many of them a row has filled."""
        if not self._runner.reads_segments:
            return np.zeros_like(lengths)
        if self._cache.slab is not None:
            return -(-lengths // self._cache.slab)
        return np.ceil(np.log2(np.maximum(lengths, _SHORT) / _SHORT)).astype(np.int64)

    def _segments(self, width: int) -> list[Segment]:
        """The runs of rows of a size in rows 0 .. width - 1; those that pad go with the last."""
        starts = [0, *(np.flatnonzero(np.diff(self._places)) + 1).tolist()]
        lengths = self._state["length"]
        ends = [*starts[1:], len(self)]
        slots = [self._cache.extent(int(lengths[start:end].max())) for start, end in zip(starts, ends, strict=True)]
        return list(zip(starts, [*starts[1:], width], slots, strict=True))
