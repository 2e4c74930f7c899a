"""The KV cache for incremental decoding, with rows of different lengths and without left padding.

Token i of a row is in slot i, so a row's keys do not move when other rows come and go, and position ids equal slots.
What a query may attend to depends only on its slot: `attention_mask`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SLAB = 128
"""Slots per slab: with more, rows would read more than they hold; with fewer, call overhead would dominate."""

STEP = 16
"""Attention reads a multiple of this many slots, or of more for small heads (`step_of`)."""

LOOP = 400
"""Number of multiplications from which PyTorch uses MKL for a batched product; below, its own loop has other bits."""

GROWTH = 2.0
"""Capacity grows by at least this factor, so that copying on growth costs O(1) per token."""

COPIED = 1 << 20
"""Elements copied into a cache at a time; they exist twice during the copy."""

BLOCK, UNDIVIDED = 512, 192
"""The keys per attention block, and the maximum that a product sums from left to right."""

MAPPED = 16 * 2**20
"""Bytes of a layer's keys from which they get new pages; smaller caches reuse memory freed by training."""


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def step_of(size: int) -> int:
    """The slot multiple for attention with `size` multiplications per slot (queries per key head times head size), such
    that either all products or none use PyTorch's own loop."""
    step = STEP
    while step * size < LOOP and step < SLAB:
        step *= 2
    return step


def extent(length: int, step: int = STEP) -> int:
    """The number of slots that attention reads for rows of up to `length` tokens, chosen so that the bits of a row do
    not depend on it.

    PyTorch's CPU attention processes keys in blocks of 512; MKL sums more than 192 of them in pieces that depend on
    their number, and the vector loops of softmax need multiples of 16. Hence multiples of 16, except that a last block
    of more than 192 is rounded up to a whole one. (Measured on processors of two vendors; other extents differ.)
    """
    slots = round_up(length, step)
    return round_up(slots, BLOCK) if slots % BLOCK > UNDIVIDED else slots


class KVCache:
    """Keys and values of `rows` sequences, per layer [slabs, rows, Hkv, slots of a slab, Dh], allocated at first use.

    One slab of `capacity` slots or, with `slab`, as many slabs of that size as needed: each row then reads only the
    slabs it has filled, and memory is read contiguously. Implements the part of the Hugging Face Cache protocol that
    attention layers call (`update`, `get_seq_length`), for one slab. `place` sets where the next forward pass writes
    and how much it reads. Between forward passes rows are filled from other caches (`insert`), moved (`move`) and
    enlarged (`reserve`).
    """

    def __init__(
        self, rows: int, capacity: int, *, dtype: torch.dtype, slab: int | None = None, step: int = STEP
    ) -> None:
        self.rows, self.dtype, self.slab, self.step = rows, dtype, slab, step
        self._fit(capacity)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._slots = torch.empty(0, 0, dtype=torch.int64)
        self._at: dict[int, Tensor] = {}
        self._extent = 0

    def _fit(self, capacity: int) -> None:
        """Set `capacity`, at least as many slots as given, and the slab size."""
        least = max(1, capacity)
        self._width = least if self.slab is None else min(self.slab, round_up(least, self.step))
        self.capacity = round_up(capacity, self._width)

    def extent(self, length: int) -> int:
        """The number of slots that attention reads for rows of up to `length` tokens, chosen so that the bits of a row
        do not depend on it: in slabs of up to 192, any multiple of `step`. A last slab that is more than half full is
        read completely, because contiguous memory is read faster."""
        if self.slab is None:
            return extent(length, self.step)
        slots = round_up(length, self.step)
        return round_up(slots, self._width) if 2 * (slots % self._width) > self._width else slots

    def place(self, positions: Tensor, extent: int) -> None:
        """Set up the next forward pass: token [b, l] is written to slot positions[b, l] of row b (int64 [B, L]), and
        attention reads slots 0 .. extent - 1 of rows 0 .. B - 1."""
        if extent > self.capacity:
            raise ValueError(f"{extent} slots requested from a cache with {self.capacity}: call reserve() first")
        self._extent = extent
        self._slots, self._at = positions, {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write key and value [B, Hkv, L, Dh] of this forward pass; return everything its queries may read, [B, Hkv,
        extent, Dh]. Unwritten slots hold zeros or values of a former row, which are finite and masked."""
        self.write(key_states.transpose(1, 2).to(self.dtype), value_states.transpose(1, 2).to(self.dtype), layer_idx)
        rows = len(self._slots)
        key, value = (store[layer_idx][0, :rows, :, : self._extent] for store in (self.keys, self.values))
        return key, value

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Write key and value [B, L, Hkv, Dh], of the cache's dtype, at the positions set by `place`."""
        if layer == len(self.keys):
            self._allocate(key.transpose(1, 2), value.transpose(1, 2))
        at = self._indices(key.shape[2])
        self.keys[layer].view(-1, key.shape[3])[at] = key
        self.values[layer].view(-1, value.shape[3])[at] = value

    def _indices(self, heads: int) -> Tensor:
        """Flat indices (by head) of this forward pass's keys in a layer's memory: int64 [B, L, Hkv]."""
        if heads not in self._at:
            device, slots = self._slots.device, self._slots[:, :, None]
            row = torch.arange(len(slots), device=device)[:, None, None]
            pair = (slots // self._width * self.rows + row) * heads + torch.arange(heads, device=device)
            self._at[heads] = pair * self._width + slots % self._width
        return self._at[heads]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of slots that attention reads; positions come from `position_ids` instead."""
        return self._extent

    def insert(self, rows: Sequence[int], source: KVCache, source_rows: Sequence[int], *, length: int) -> None:
        """Copy the first `length` slots of rows `source_rows` of `source`, a cache of one slab, into rows `rows`."""
        if not self.keys:
            for key, value in zip(source.keys, source.values, strict=True):
                self._allocate(key[0], value[0])
        device = source.keys[0].device
        to, origin = torch.as_tensor(rows, device=device), torch.as_tensor(source_rows, device=device)
        for new, old in zip(self.keys + self.values, source.keys + source.values, strict=True):
            together = max(1, COPIED // old[0, 0, :, :length].numel())
            for targets, places in zip(to.split(together), origin.split(together), strict=True):
                parts = old[0, :, :, :length][places].split(new.shape[3], dim=2)
                for slab, part in zip(new, parts, strict=False):
                    slab[targets, :, : part.shape[2]] = part

    def move(self, targets: Sequence[int], sources: Sequence[int], length: int) -> None:
        """Overwrite the first `length` slots of rows `targets` with those of rows `sources`, to close gaps."""
        if not self.keys:  # nothing written yet
            return
        device = self.keys[0].device
        to, origin = torch.as_tensor(targets, device=device), torch.as_tensor(sources, device=device)
        for store in self.keys + self.values:
            for start in range(0, length, self._width):
                slab, slots = store[start // self._width], min(length - start, self._width)
                slab[to, :, :slots] = slab[origin, :, :slots]

    def reserve(self, capacity: int, *, rows: int = 0, held: int | None = None) -> None:
        """Ensure `capacity` slots per row in `rows` rows, keeping the first `held` rows (None: all)."""
        if capacity <= self.capacity and rows <= self.rows:
            return
        if capacity > self.capacity:
            self._fit(max(capacity, int(self.capacity * GROWTH)))
        held = self.rows if held is None else held
        self.rows = max(self.rows, rows)
        for stores in (self.keys, self.values):
            for layer, old in enumerate(stores):
                stores[layer] = self._zeros(old[0])
                stores[layer][: len(old), :held, :, : old.shape[3]] = old[:, :held]

    def _allocate(self, key: Tensor, value: Tensor) -> None:
        self.keys.append(self._zeros(key))
        self.values.append(self._zeros(value))

    def _zeros(self, like: Tensor) -> Tensor:
        """Zeros for keys or values like `like` [B, Hkv, L, Dh]."""
        # Zeros, not empty memory: a masked slot is multiplied by probability 0, and 0 times NaN is NaN.
        shape = (self.capacity // self._width, self.rows, like.shape[1], self._width, like.shape[3])
        size = math.prod(shape) * self.dtype.itemsize
        if like.device.type != "cpu" or size < MAPPED:
            return torch.zeros(shape, dtype=self.dtype, device=like.device)
        # The system zeroes pages at first use; torch.zeros would touch all of them now.
        pages = mmap.mmap(-1, size)
        return torch.frombuffer(pages, dtype=self.dtype, count=math.prod(shape)).view(shape)


def attention_mask(positions: Tensor, extent: int, *, window: int | None = None) -> Tensor:
    """The slots each query may attend to: bool [B, 1, L, extent] for queries at slots `positions` (int64 [B, L]).

    A query at slot p attends to slots s <= p, and with a sliding window of w only to s > p - w. The mask is always
    used, even if every slot is visible, because attention with and without a mask differs in the last bits.
    """
    slots = torch.arange(extent, device=positions.device)
    visible = slots <= positions[:, :, None]
    if window is not None:
        visible &= slots > positions[:, :, None] - window
    return visible[:, None]
