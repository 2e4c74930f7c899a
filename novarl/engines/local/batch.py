"""The requests being decoded: one step for all of them, with arrivals before it and departures after it.

Requests with one prompt that arrive together are one branch as long as they sample the same tokens, and a branch is
one row of what is computed: it is fed once, its logits serve all its requests, and it forks where they choose unlike
tokens. Each request chooses by its own noise, so nothing that is sampled depends on it.
"""

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
from novarl.engines.local.cache_rows import others, settle
from novarl.engines.local.decode import Segment
from novarl.engines.local.kv_cache import KVCache, round_up
from novarl.engines.local.prefixes import Prefixes
from novarl.engines.local.requests import Request
from novarl.engines.local.runner import ROWS, ModelRunner, Prefill
from novarl.engines.local.sampling import Choice, Parameters, choose
from novarl.engines.local.shared_prefix import SharedPrefixes
from novarl.engines.local.stops import Decode, StopRule

_SHORT = 96
"""Rows with up to this many tokens are read together, those with up to twice as many, and so on: in each run of rows
attention reads as many slots as the longest needs, and each run costs some launches."""

_BRANCH = np.dtype([("before", np.int64), ("length", np.int64), ("last", np.int64), ("lane", np.int64)])
_STATE = np.dtype([("branch", np.int64), ("count", np.int64), ("limit", np.int64), ("slot", np.int64)])
_SAMPLED = np.dtype([("token", np.int64), ("logp", np.float32), ("kept_logmass", np.float32), ("version", np.int64)])

_FIRST_SLOTS = 512
"""Room for tokens to begin with, where a request may need it; doubled when it is full."""

_FIRST_COLUMNS = 64
"""Room for sampled tokens to begin with; doubled when it is full."""


@dataclass(frozen=True, slots=True)
class Running:
    """What a request has that is no counter: its random stream, how it stops, where eos is not all, and the supports
    of its tokens so far, where they are recorded."""

    request: Request
    stream: int
    stops: StopRule | None
    support: list[bytes] | None


class Batch:
    """Up to `max_batch` requests decoded side by side.

    Branches are always rows 0 .. branches - 1 of the cache, long ones before short ones so that attention need not read
    for all what the longest needs: arrivals are appended, and rows move when others have ended or they have outgrown
    their size, which costs a copy of them and nothing per step. A long prompt is kept once for all of its branches,
    whose rows then hold what they have sampled alone. Counters live in arrays: for each branch `length`, the tokens of
    its row, `before`, those that come before them, in lane `lane` of `Prefixes` (-1: none), and `last`, the token to
    feed next; for each request, in the order of branches, what it has sampled so far is row `slot` of another array,
    and becomes tuples when it ends.
    """

    def __init__(self, runner: ModelRunner, decode: Decode, *, max_batch: int, eos_ids: Sequence[int]) -> None:
        self._runner, self._decode, self._max_batch = runner, decode, max_batch
        self._eos_ids = np.array(eos_ids, np.int64)
        rows = round_up(max_batch, ROWS)
        self._cache = runner.new_cache()
        self._prefixes = Prefixes(runner)
        self._shared: SharedPrefixes | None = None
        self._running: list[Running] = []
        self._state = np.zeros(0, _STATE)
        self._branches = np.zeros(0, _BRANCH)
        self._sampled = np.zeros((rows, _FIRST_COLUMNS), _SAMPLED)
        self._slots = np.arange(rows)
        self._places = np.zeros(0, np.int64)
        self._parameters = Parameters.of([], [], runner.device)
        self._watched: list[int] = []

    @property
    def free(self) -> int:
        """How many more requests may arrive."""
        return self._max_batch - len(self._running)

    def __len__(self) -> int:
        return len(self._running)

    def step(
        self, arrivals: Sequence[tuple[Sequence[Request], Prefill]], version: int
    ) -> list[tuple[Request, Completion]]:
        """Sample one token of every request: of those here by feeding their last token, of arrivals after their prompt.

        Returns the requests that ended with it. `version` is that of the weights, written beside each token.
        """
        # Decoding goes first: the rows that pad it to a multiple of ROWS are those that arrivals will overwrite.
        logits = [self._decode_branches()] if self._running else []
        if arrivals:
            self._add(arrivals, version)
            streams, samplings = [one.stream for one in self._running], [one.request.sampling for one in self._running]
            self._parameters = Parameters.of(streams, samplings, self._runner.device)
            self._watch()
            logits += [prefill.logits[None] for _, prefill in arrivals]
        every = logits[0] if len(logits) == 1 else torch.cat(logits)  # which copies even one
        branch, device = self._state["branch"], self._runner.device
        if len(branch) > len(every):
            every = every[torch.from_numpy(branch).to(device)]
        position = torch.from_numpy((self._branches["before"] + self._branches["length"])[branch]).to(device)
        return self._accept(choose(every, self._parameters, position), version)

    def drop_cancelled(self) -> None:
        """Let go of the requests that nobody waits for any more."""
        waited_for = np.array([not one.request.future.done() for one in self._running], bool)
        self._keep(np.flatnonzero(waited_for), self._branches["last"][self._state["branch"]])

    def _decode_branches(self) -> Tensor:
        """Logits [branches, V] after feeding every branch's last token. Rows that only pad feed slot 0 of an idle
        row."""
        size = len(self._branches)
        width = round_up(size, ROWS)
        tokens, slots = np.full(width, self._runner.pad_id, np.int64), np.zeros(width, np.int64)
        tokens[:size], slots[:size] = self._branches["last"], self._branches["length"] - 1
        segments = self._segments(width)
        self._cache.reserve(max(slots for _, _, slots in segments), held=size)
        device = self._runner.device
        fed, at = torch.from_numpy(tokens).to(device), torch.from_numpy(slots).to(device)
        if self._shared is None:
            self._shared = self._prefixes.shared(self._branches["lane"], width)
        return self._runner.decode(fed, at, self._cache, segments, self._shared)[:size]

    def _make_room(self, arriving: int) -> None:
        """Rows of the cache for so many more requests, if each comes to a branch of its own: twice as many as before or
        all that there may be."""
        needed = round_up(len(self) + arriving, ROWS)
        if needed > self._cache.rows:
            rows = min(round_up(self._max_batch, ROWS), max(needed, 2 * self._cache.rows))
            self._cache.reserve(0, rows=rows, held=len(self._branches))

    def _add(self, arrivals: Sequence[tuple[Sequence[Request], Prefill]], version: int) -> None:
        """Give the requests of each prompt, which the weights of `version` have run, a branch that holds it."""
        first = len(self._branches)
        self._make_room(sum(len(requests) for requests, _ in arrivals))
        state: list[tuple[int, int, int, int]] = []
        copies: dict[KVCache, list[tuple[int, Prefill]]] = defaultdict(list)
        room = 0
        branches: list[tuple[int, int, int, int]] = []
        lanes = self._prefixes.add([prefill for _, prefill in arrivals], version)
        for branch, ((requests, prefill), lane) in enumerate(zip(arrivals, lanes, strict=True), first):
            prompt = len(prefill.prompt)
            before, length = (0, prompt) if lane < 0 else (prompt, 0)
            branches.append((before, length, 0, lane))
            longest = self._cache.extent(length + max(request.limit for request in requests))
            room = max(room, min(longest, _FIRST_SLOTS), self._cache.extent(length + 1))
            if lane < 0:
                copies[prefill.cache].append((branch, prefill))
            for request in requests:
                sampling = request.sampling
                state.append((branch, 0, request.limit, int(self._slots[len(self._running)])))
                support: list[bytes] | None = [] if sampling.records else None
                self._running.append(Running(request, derive(sampling.seed, request.key), self._rule(request), support))
        self._state = np.concatenate([self._state, np.array(state, _STATE)])
        self._branches = np.concatenate([self._branches, np.array(branches, _BRANCH)])
        self._cache.reserve(room, held=first)
        for cache, pairs in copies.items():
            # What lies beyond a shorter prompt comes along: finite, and hidden until it is overwritten.
            longest = max(len(prefill.prompt) for _, prefill in pairs)
            rows, origins = [row for row, _ in pairs], [prefill.row for _, prefill in pairs]
            self._cache.insert(rows, cache, origins, length=longest)

    def _rule(self, request: Request) -> StopRule | None:
        """How a request stops beside eos, if it does."""
        sampling, prompt = request.sampling, request.prompt
        if not sampling.stop and not sampling.stop_tokens:
            return None
        begun = prompt[len(prompt) - sampling.answered :]
        return StopRule(sampling.stop_tokens, sampling.stop, self._decode, begun=begun)

    def _watch(self) -> None:
        """Which requests have a rule of their own to stop."""
        self._watched = [index for index, one in enumerate(self._running) if one.stops is not None]

    def _accept(self, choice: Choice, version: int) -> list[tuple[Request, Completion]]:
        """Record one chosen token a request, and let the requests that end with it go."""
        state = self._state
        tokens, logp = choice.token.cpu().numpy(), choice.logp.cpu().numpy()
        if not np.isfinite(logp).all():
            raise NovaError("the model's logits are not finite", where="sampling", fix="the weights have diverged")
        if state["count"].max() == self._sampled.shape[1]:
            self._sampled = np.concatenate([self._sampled, np.zeros_like(self._sampled)], axis=1)
        here = state["slot"], state["count"]
        self._sampled["token"][here], self._sampled["logp"][here] = tokens, logp
        self._sampled["kept_logmass"][here], self._sampled["version"][here] = choice.kept_logmass.cpu().numpy(), version
        if choice.support is not None:
            for running, possible in zip(self._running, choice.support, strict=True):
                if running.support is not None:
                    running.support.append(possible)
        state["count"] += 1
        self._branches["length"] += 1

        stopped = (tokens[:, None] == self._eos_ids).any(1)
        for index in self._watched:
            stops = self._running[index].stops
            stopped[index] |= stops is not None and stops.feed(int(tokens[index]))
        ended = stopped | (state["count"] >= state["limit"])
        finished = [
            (self._running[index].request, self._completion(index, bool(stopped[index])))
            for index in np.flatnonzero(ended).tolist()
        ]
        going_on = None if finished else self._unparted(tokens)
        if going_on is None:
            self._keep(np.flatnonzero(~ended), tokens)
        else:
            self._branches["last"] = going_on
        return finished

    def _unparted(self, tokens: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The token that each branch goes on with; None where one forks, or its place is not of its size any more."""
        if len(self._places) != len(self._branches) or (self._sizes(self._branches["length"]) != self._places).any():
            return None
        branch = self._state["branch"]
        chosen = tokens[np.flatnonzero(np.diff(branch, prepend=-1))]
        if len(chosen) < len(branch) and (tokens != chosen[branch]).any():
            return None
        return chosen

    def _completion(self, index: int, stopped: bool) -> Completion:
        sampled = self._sampled[self._state["slot"][index], : self._state["count"][index]]
        columns = {name: tuple(sampled[name].tolist()) for name in ("token", "logp", "kept_logmass", "version")}
        support = self._running[index].support
        return Completion(
            tokens=columns["token"],
            logp=columns["logp"],
            kept_logmass=columns["kept_logmass"],
            versions=columns["version"],
            finish_reason="stop" if stopped else "length",
            support=None if support is None else tuple(support),
        )

    def _keep(self, staying: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Requests `staying` stay, those of one branch together as far as they have the same of `tokens`."""
        state = self._state[staying]
        chosen = state["branch"] * self._runner.vocabulary + tokens[staying]
        _, first, branch = np.unique(chosen, return_index=True, return_inverse=True)
        parents = state["branch"][first]
        places = self._settle(parents)
        branches = np.empty(len(parents), _BRANCH)
        branches[places] = self._branches[parents]
        branches["last"][places] = tokens[staying][first]
        branches["lane"] = self._prefixes.keep(branches["lane"])
        self._branches, self._shared = branches, None
        state["branch"] = places[branch]
        order = np.argsort(state["branch"], kind="stable")
        self._state = state[order]
        self._slots = np.concatenate([self._state["slot"], others(self._state["slot"], len(self._slots))])
        self._running = [self._running[index] for index in staying[order].tolist()]
        self._parameters = self._parameters.of_rows(torch.from_numpy(staying[order]).to(self._runner.device))
        self._watch()

    def _settle(self, parents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where branches go that are now in rows `parents` (rising), as `places.settle` says."""
        lengths = self._branches["length"][parents]  # with the token just chosen, which has no slot yet
        sizes = self._sizes(lengths)
        self._places = -np.sort(-sizes)
        places, movers = settle(parents, sizes)
        if len(movers):
            self._cache.move(places[movers].tolist(), parents[movers].tolist(), int(lengths[movers].max()) - 1)
        return places

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
        lengths = self._branches["length"]
        ends = [*starts[1:], len(lengths)]
        slots = [self._cache.extent(int(lengths[start:end].max())) for start, end in zip(starts, ends, strict=True)]
        return list(zip(starts, [*starts[1:], width], slots, strict=True))
