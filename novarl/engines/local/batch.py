"""The batch of requests being decoded: each step adds new requests, samples a token for all, and removes finished ones.

Requests with the same prompt that arrive together form one branch, one row of the computation, as long as they sample
the same tokens. Each request uses its own noise, so branches do not affect what is sampled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from novarl.core.errors import NotFinite
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
"""Rows are grouped by length: up to this many tokens, up to twice as many, and so on. Within a group attention reads as
many slots as the longest row needs; each group costs some kernel launches."""

_BRANCH = np.dtype([("before", np.int64), ("length", np.int64), ("last", np.int64), ("lane", np.int64)])
_STATE = np.dtype([("branch", np.int64), ("count", np.int64), ("limit", np.int64), ("slot", np.int64)])
_SAMPLED = np.dtype([("token", np.int64), ("logp", np.float32), ("kept_logmass", np.float32), ("version", np.int64)])

_FIRST_SLOTS = 512
"""Initial token capacity, if a request may need it; doubled when full."""

_FIRST_COLUMNS = 64
"""Initial capacity for sampled tokens; doubled when full."""


@dataclass(frozen=True, slots=True)
class Running:
    """A request, its random stream, its stop rule (if more than eos), and the recorded supports of its tokens."""

    request: Request
    stream: int
    stops: StopRule | None
    support: list[bytes] | None


class Batch:
    """Up to `max_batch` requests decoded side by side.

    Branches are always rows 0 .. branches - 1 of the cache, sorted by length group with long ones first; rows move when
    others have finished or they have outgrown their group. A long prompt is stored once for all of its branches, whose
    rows then hold only sampled tokens. Per branch: `length`, the tokens of its row; `before`, the tokens of its prompt
    in lane `lane` of `Prefixes` (-1: none); `last`, the next token to feed. Sampled tokens are stored in row `slot` of
    another array per request, in the order of branches, and become tuples when the request ends.
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
        """The number of requests that can be added."""
        return self._max_batch - len(self._running)

    def __len__(self) -> int:
        return len(self._running)

    def step(
        self, arrivals: Sequence[tuple[Sequence[Request], Prefill]], version: int
    ) -> list[tuple[Request, Completion]]:
        """Sample one token for every request: running ones continue from their last token, new ones from their prompt.

        Returns the requests that finished. `version` of the weights is recorded with each token.
        """
        # Decode first: its padding rows (to a multiple of ROWS) are those that new requests will overwrite.
        logits = [self._decode_branches()] if self._running else []
        if arrivals:
            self._add(arrivals, version)
            streams, samplings = [one.stream for one in self._running], [one.request.sampling for one in self._running]
            self._parameters = Parameters.of(streams, samplings, self._runner.device)
            self._watch()
            logits += [prefill.logits[None] for _, prefill in arrivals]
        every = logits[0] if len(logits) == 1 else torch.cat(logits)  # torch.cat would copy a single one too
        branch, device = self._state["branch"], self._runner.device
        if len(branch) > len(every):
            every = every[torch.from_numpy(branch).to(device)]
        position = torch.from_numpy((self._branches["before"] + self._branches["length"])[branch]).to(device)
        return self._accept(choose(every, self._parameters, position), version)

    def drop_cancelled(self) -> None:
        """Remove requests that were cancelled."""
        waited_for = np.array([not one.request.future.done() for one in self._running], bool)
        self._keep(np.flatnonzero(waited_for), self._branches["last"][self._state["branch"]])

    def _decode_branches(self) -> Tensor:
        """Logits [branches, V] after feeding every branch's last token. Padding rows write to unused rows."""
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
        """Reserve cache rows for more requests, one branch each: double the number, up to the maximum."""
        needed = round_up(len(self) + arriving, ROWS)
        if needed > self._cache.rows:
            rows = min(round_up(self._max_batch, ROWS), max(needed, 2 * self._cache.rows))
            self._cache.reserve(0, rows=rows, held=len(self._branches))

    def _add(self, arrivals: Sequence[tuple[Sequence[Request], Prefill]], version: int) -> None:
        """Add a branch for the requests of each prompt, which was prefilled with weights of `version`."""
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
            # Values beyond a shorter prompt are copied too: they are finite, and masked until overwritten.
            longest = max(len(prefill.prompt) for _, prefill in pairs)
            rows, origins = [row for row, _ in pairs], [prefill.row for _, prefill in pairs]
            self._cache.insert(rows, cache, origins, length=longest)

    def _rule(self, request: Request) -> StopRule | None:
        """The stop rule of a request besides eos, if any."""
        sampling, prompt = request.sampling, request.prompt
        if not sampling.stop and not sampling.stop_tokens:
            return None
        begun = prompt[len(prompt) - sampling.answered :]
        return StopRule(sampling.stop_tokens, sampling.stop, self._decode, begun=begun)

    def _watch(self) -> None:
        """Find the requests that have a stop rule."""
        self._watched = [index for index, one in enumerate(self._running) if one.stops is not None]

    def _accept(self, choice: Choice, version: int) -> list[tuple[Request, Completion]]:
        """Record one chosen token per request and remove the requests that finish."""
        state = self._state
        tokens, logp = choice.token.cpu().numpy(), choice.logp.cpu().numpy()
        if not np.isfinite(logp).all():
            raise NotFinite("the model's logits are not finite", where="sampling", fix="the weights may have diverged")
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
        """The next token of each branch, or None if one forks or has to move to another length group."""
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
        """Keep the requests `staying`; those of one branch stay together if they chose the same of `tokens`."""
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
        """The new rows of branches that are now in rows `parents` (ascending), by `cache_rows.settle`."""
        lengths = self._branches["length"][parents]  # including the token just chosen, which has no slot yet
        sizes = self._sizes(lengths)
        self._places = -np.sort(-sizes)
        places, movers = settle(parents, sizes)
        if len(movers):
            self._cache.move(places[movers].tolist(), parents[movers].tolist(), int(lengths[movers].max()) - 1)
        return places

    def _sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The length group: 0 for rows of up to _SHORT tokens, 1 for up to twice as many, ...; with slabs, the slabs
        filled."""
        if not self._runner.reads_segments:
            return np.zeros_like(lengths)
        if self._cache.slab is not None:
            return -(-lengths // self._cache.slab)
        return np.ceil(np.log2(np.maximum(lengths, _SHORT) / _SHORT)).astype(np.int64)

    def _segments(self, width: int) -> list[Segment]:
        """The segments of equal length group in rows 0 .. width - 1; padding rows belong to the last."""
        starts = [0, *(np.flatnonzero(np.diff(self._places)) + 1).tolist()]
        lengths = self._branches["length"]
        ends = [*starts[1:], len(lengths)]
        slots = [self._cache.extent(int(lengths[start:end].max())) for start, end in zip(starts, ends, strict=True)]
        return list(zip(starts, [*starts[1:], width], slots, strict=True))
