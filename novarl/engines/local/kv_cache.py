"""The key/value cache of incremental decoding: rows of different lengths side by side, without left padding.

Token i of a row lives in slot i, whatever the other rows are doing, so a row's keys never move when others come and
go, and its position ids are its slots. What a query may see follows from its own slot alone: `attention_mask`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SLAB = 128
"""Slots of a slab, where a cache is cut into slabs: more would make rows read more than they hold, fewer would make
products so small that calling them is most of the work."""

STEP = 16
"""Attention reads a multiple of this many slots, or of more where heads are small (`step_of`)."""

LOOP = 400
"""Multiplications of a product in a batch from which on PyTorch leaves it to MKL; below it runs a loop of its own,
whose bits are others."""

GROWTH = 2.0
"""Capacity grows by at least this factor, so that copying on growth costs O(1) per token."""

COPIED = 1 << 20
"""Numbers that are copied into a cache at a time: they exist twice meanwhile."""

BLOCK, UNDIVIDED = 512, 192
"""The keys that attention takes at a time, and the most of them that a product adds up from the left to the right."""

MAPPED = 16 * 2**20
"""Bytes of a layer's keys from which on they have pages of their own; fewer lie where learning has freed memory."""


def round_up(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def step_of(size: int) -> int:
    """How many slots attention should read a multiple of, as products of `size` numbers with a slot: queries to a key
    head times the head's size. So that none of them is left to PyTorch's loop, or all are."""
    step = STEP
    while step * size < LOOP and step < SLAB:
        step *= 2
    return step


def extent(length: int, step: int = STEP) -> int:
    """How many slots attention should read for rows of up to `length` tokens, so that no row's bits depend on it.

    Keys are taken in blocks of 512 by PyTorch's CPU attention, of which MKL adds up more than 192 in pieces whose sizes
    follow their number and the processor, and the vector loops of softmax want multiples of 16. Hence: multiples of 16,
    except that a last block of more than 192 is a whole one. (Measured with heads of 32 to 256, 1 to 16 queries to a
    key head, processors of two makers, each by its `core.processor.exact_products`: the other extents differ.)
    """
    slots = round_up(length, step)
    return round_up(slots, BLOCK) if slots % BLOCK > UNDIVIDED else slots


class KVCache:
    """Keys and values of `rows` sequences, per layer [slabs, rows, Hkv, slots of a slab, Dh], allocated at first use.

    One slab of `capacity` slots, or, if `slab` is given, as many of so many slots as that takes, a single one being no
    wider than need be. Where rows attend slab by slab, each reads no more slabs than it has filled, and memory is read
    from one end to the other, without the gaps between rows that are longer than what they hold, at which a CPU stops
    reading ahead.

    Implements the part of Hugging Face's Cache protocol that attention layers call (`update`, `get_seq_length`), for
    one slab and any family whose layers keep one key and one value per token; head sizes may differ between layers and
    between keys and values. `place` says where the next forward pass writes and how much it reads; between forward
    passes rows are filled from other caches (`insert`), moved (`move`) and, like their number, given more room
    (`reserve`).
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
        """Settle `capacity`, for so many slots at least, and the slots of a slab."""
        least = max(1, capacity)
        self._width = least if self.slab is None else min(self.slab, round_up(least, self.step))
        self.capacity = round_up(capacity, self._width)

    def extent(self, length: int) -> int:
        """How many slots attention should read for rows of up to `length` tokens, so that no row's bits depend on it:
        in slabs of up to 192, any multiple of `step`. A last slab that is more than half filled is read whole, since
        memory without gaps is read so much faster that the slots in between cost less than nothing."""
        if self.slab is None:
            return extent(length, self.step)
        slots = round_up(length, self.step)
        return round_up(slots, self._width) if 2 * (slots % self._width) > self._width else slots

    def place(self, positions: Tensor, extent: int) -> None:
        """Direct the next forward pass: token [b, l] is written to slot positions[b, l] of row b (int64 [B, L]), and
        attention reads slots 0 .. extent - 1 of rows 0 .. B - 1."""
        if extent > self.capacity:
            raise ValueError(f"{extent} slots asked of a cache with {self.capacity}: call reserve() first")
        self._extent = extent
        self._slots, self._at = positions, {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write key and value [B, Hkv, L, Dh] of this forward pass; return all that its queries may read, [B, Hkv,
        extent, Dh]. Slots not yet written hold zeros or a former row's values: finite, and hidden by the mask."""
        self.write(key_states.transpose(1, 2).to(self.dtype), value_states.transpose(1, 2).to(self.dtype), layer_idx)
        rows = len(self._slots)
        key, value = (store[layer_idx][0, :rows, :, : self._extent] for store in (self.keys, self.values))
        return key, value

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Write key and value [B, L, Hkv, Dh], of the cache's dtype, where `place` has said."""
        if layer == len(self.keys):
            self._allocate(key.transpose(1, 2), value.transpose(1, 2))
        at = self._indices(key.shape[2])
        self.keys[layer].view(-1, key.shape[3])[at] = key
        self.values[layer].view(-1, value.shape[3])[at] = value

    def _indices(self, heads: int) -> Tensor:
        """Where the keys of this forward pass go, counted head by head from one end of a layer's memory to the other:
        int64 [B, L, Hkv]."""
        if heads not in self._at:
            device, slots = self._slots.device, self._slots[:, :, None]
            row = torch.arange(len(slots), device=device)[:, None, None]
            pair = (slots // self._width * self.rows + row) * heads + torch.arange(heads, device=device)
            self._at[heads] = pair * self._width + slots % self._width
        return self._at[heads]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many slots attention reads; positions come from `position_ids`, never from this."""
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
        """Overwrite the first `length` slots of rows `targets` by those of rows `sources`: how holes left by finished
        rows are closed."""
        if not self.keys:  # nothing has been written yet
            return
        device = self.keys[0].device
        to, origin = torch.as_tensor(targets, device=device), torch.as_tensor(sources, device=device)
        for store in self.keys + self.values:
            for start in range(0, length, self._width):
                slab, slots = store[start // self._width], min(length - start, self._width)
                slab[to, :, :slots] = slab[origin, :, :slots]

    def reserve(self, capacity: int, *, rows: int = 0, held: int | None = None) -> None:
        """Make room for `capacity` slots a row in `rows` rows, copying what the first `held` rows (None: all) hold;
        does nothing where the room is there."""
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
        """Room for keys or values of which `like` [B, Hkv, L, Dh] are some."""
        # Zeros, not empty memory: a masked slot is multiplied by probability 0, and 0 times a stray NaN is NaN.
        shape = (self.capacity // self._width, self.rows, like.shape[1], self._width, like.shape[3])
        size = math.prod(shape) * self.dtype.itemsize
        if like.device.type != "cpu" or size < MAPPED:
            return torch.zeros(shape, dtype=self.dtype, device=like.device)
        # The system hands out zeroed pages at their first touch; torch.zeros would touch all of them now.
        pages = mmap.mmap(-1, size)
        return torch.frombuffer(pages, dtype=self.dtype, count=math.prod(shape)).view(shape)


def attention_mask(positions: Tensor, extent: int, *, window: int | None = None) -> Tensor:
    """Which slots each query may see: bool [B, 1, L, extent] for queries at slots `positions` (int64 [B, L]).

    Query at slot p sees slots s <= p, and with a sliding window of w only s > p - w. It is always given, also where
    every slot is visible: attention with and without a mask differ in their last bits.
    """
    slots = torch.arange(extent, device=positions.device)
    visible = slots <= positions[:, :, None]
    if window is not None:
        visible &= slots > positions[:, :, None] - window
    return visible[:, None]
