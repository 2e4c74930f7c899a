"""Shared prompts of running requests, whose keys and values are stored once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from novarl.engines.local.cache_rows import settle
from novarl.engines.local.runner import ModelRunner, Prefill
from novarl.engines.local.shared_prefix import SharedPrefixes, places_for

LONG = 128
"""Prompts of at least this many tokens are shared, shorter ones are copied to each row, because sharing costs some
launches. The rule depends on the prompt only, so bits do not depend on other requests."""


class Prefixes:
    """One lane per long prompt and version of the weights in use; none if sharing is not supported."""

    def __init__(self, runner: ModelRunner) -> None:
        self._queries = runner.shared_queries
        self._cache = runner.new_cache()
        self._prompts: list[tuple[tuple[int, ...], int]] = []

    def add(self, prefills: Sequence[Prefill], version: int) -> list[int]:
        """The lane of each prompt, prefilled with weights of `version`; -1 if not shared."""
        held = len(self._prompts)
        lanes = {named: lane for lane, named in enumerate(self._prompts)}
        new: dict[int, Prefill] = {}
        found = []
        for prefill in prefills:
            if self._queries is None or len(prefill.prompt) < LONG:
                found.append(-1)
                continue
            named = prefill.prompt, version
            if named not in lanes:
                lanes[named] = len(lanes)
                new[lanes[named]] = prefill
            found.append(lanes[named])
        if new:
            self._prompts = list(lanes)
            rows = max(len(lanes), 2 * self._cache.rows) if len(lanes) > self._cache.rows else 0
            self._cache.reserve(max(len(prefill.prompt) for prefill in new.values()), rows=rows, held=held)
            for lane, prefill in new.items():
                self._cache.insert([lane], prefill.cache, [prefill.row], length=len(prefill.prompt))
        return found

    def keep(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drop prompts that are not in `lanes`; returns the new lanes."""
        if not self._prompts:
            return lanes
        used = np.unique(lanes[lanes >= 0])
        prompts = [self._prompts[lane] for lane in used.tolist()]
        lengths = np.array([len(prompt) for prompt, _ in prompts], np.int64)
        places, movers = settle(used, self._slabs(lengths))
        if len(movers):
            self._cache.move(places[movers].tolist(), used[movers].tolist(), int(lengths[movers].max()))
        ordered = dict(zip(places.tolist(), prompts, strict=True))
        self._prompts = [ordered[lane] for lane in range(len(ordered))]
        moved = np.full(lanes.max(initial=0) + 2, -1)  # one extra entry, so that -1 maps to -1
        moved[used] = places
        return moved[lanes]

    def _slabs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-lengths // (self._cache.slab or self._cache.capacity))

    def shared(self, lanes: NDArray[np.int64], width: int) -> SharedPrefixes | None:
        """The prefixes of rows in these lanes, for a batch padded to `width`; None if nothing is shared."""
        if self._queries is None or not self._prompts:
            return None
        held = np.bincount(lanes[lanes >= 0], minlength=len(self._prompts))
        width_of_lane = places_for(int(held.max()), self._queries)
        sharing = np.argsort(lanes, kind="stable")[np.count_nonzero(lanes < 0) :]
        within = np.arange(len(sharing)) - (held.cumsum() - held)[lanes[sharing]]
        places = lanes[sharing] * width_of_lane + within
        rows = np.zeros((len(held), width_of_lane), np.int64)
        rows.reshape(-1)[places] = sharing
        lengths = [len(prompt) for prompt, _ in self._prompts]
        before = np.zeros((width, 1), np.int64)
        before[sharing, 0] = np.array(lengths)[lanes[sharing]]
        if len(sharing) == len(lanes):
            # In the order of rows; padding rows use the first place.
            where = np.zeros(width, np.int64)
            where[sharing] = places
            places = where
        return SharedPrefixes(
            self._cache,
            lengths,
            torch.from_numpy(rows),
            None if len(sharing) == len(lanes) else torch.from_numpy(sharing),
            torch.from_numpy(places),
            torch.from_numpy(before),
            queries=self._queries,
        )
