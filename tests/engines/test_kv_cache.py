"""The cache as a store of rows, the masks, and the extents that keep attention's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from novarl.engines.local.kv_cache import KVCache, attention_mask, extent

HEADS, SIZE = 2, 4


def states(tokens: Tensor) -> Tensor:
    """A key [B, Hkv, L, Dh] that says which token [B, L] it belongs to."""
    return tokens[:, None, :, None].expand(-1, HEADS, -1, SIZE).float()


def write(cache: KVCache, tokens: Tensor, positions: Tensor, read: int) -> tuple[Tensor, Tensor]:
    cache.place(positions, read)
    for layer in range(2):
        keys, values = cache.update(states(tokens), states(-tokens)[..., :3], layer)
    return keys, values


def in_order(store: Tensor) -> Tensor:
    """[slabs, rows, Hkv, W, Dh] to [rows, Hkv, slots, Dh]."""
    return store.movedim(0, 2).flatten(2, 3)


def held(cache: KVCache, row: int, length: int) -> list[float]:
    layers = [in_order(cache.keys[layer])[row, :, :length].mean((0, 2)).tolist() for layer in range(2)]
    assert layers[0] == layers[1]
    assert in_order(cache.values[1])[row, 0, :length, 0].neg().tolist() == layers[0]
    return layers[0]


def prompt_cache(*prompts: list[int]) -> KVCache:
    width = max(map(len, prompts))
    cache = KVCache(len(prompts), width, dtype=torch.float32)
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    write(cache, tokens, torch.arange(width).expand(len(prompts), width), width)
    return cache


def test_rows_of_unlike_lengths_grow_each_at_its_own_end_and_move() -> None:
    cache = KVCache(4, 4, dtype=torch.float32)
    prompts = prompt_cache([11, 12, 13], [21])
    cache.insert([0, 2, 1], prompts, [0, 0, 1], length=3)
    keys, values = write(cache, torch.tensor([[14], [22], [34]]), torch.tensor([[3], [1], [3]]), 4)
    assert keys.shape == (3, HEADS, 4, SIZE) and values.shape == (3, HEADS, 4, 3)
    assert [held(cache, row, 4) for row in (0, 2)] == [[11, 12, 13, 14], [11, 12, 13, 34]]
    assert held(cache, 1, 2) == [21, 22]
    cache.reserve(6)
    assert cache.capacity >= 6 and held(cache, 2, 4) == [11, 12, 13, 34]
    cache.move([0], [1], 2)
    keys, _ = write(cache, torch.tensor([[23]]), torch.tensor([[2]]), 5)
    assert held(cache, 0, 3) == [21, 22, 23] and held(cache, 2, 4) == [11, 12, 13, 34]
    assert keys.shape[2] == cache.get_seq_length() == 5


def test_slabs_hold_what_one_row_of_slots_would() -> None:
    cache = KVCache(4, 5, dtype=torch.float32, slab=2)
    assert cache.capacity == 6
    prompts = prompt_cache([11, 12, 13], [21])
    cache.insert([0, 2, 1], prompts, [0, 0, 1], length=3)
    assert cache.keys[0].shape == (3, 4, HEADS, 2, SIZE)
    for step, tokens in enumerate(([14, 22, 34], [15, 23, 35])):
        cache.place(torch.tensor([[3], [1], [3]]) + step, 5)
        for layer in range(2):
            key, value = states(torch.tensor(tokens)[:, None]), states(-torch.tensor(tokens)[:, None])[..., :3]
            cache.write(key.transpose(1, 2), value.transpose(1, 2), layer)
    assert [held(cache, row, 5) for row in (0, 2)] == [[11, 12, 13, 14, 15], [11, 12, 13, 34, 35]]
    assert held(cache, 1, 3) == [21, 22, 23]
    cache.reserve(7, held=3)
    assert cache.capacity % 2 == 0 and cache.capacity >= 7 and held(cache, 2, 5) == [11, 12, 13, 34, 35]
    cache.move([0, 3], [1, 2], 5)
    assert held(cache, 0, 3) == [21, 22, 23] and held(cache, 3, 5) == [11, 12, 13, 34, 35]
    assert [cache.extent(length) for length in (1, 16, 200, 250)] == [16, 16, 208, 256]


def test_the_only_slab_is_no_wider_than_need_be_and_grows() -> None:
    cache = KVCache(2, 0, dtype=torch.float32, slab=128)
    cache.reserve(20)
    cache.insert([1], prompt_cache([11, 12, 13]), [0], length=3)
    widths = [(cache.keys[0].shape[0], cache.keys[0].shape[3])]
    for capacity in (33, 100, 129, 300):
        cache.reserve(capacity)
        widths.append((cache.keys[0].shape[0], cache.keys[0].shape[3]))
        assert cache.capacity == widths[-1][0] * widths[-1][1] >= capacity and held(cache, 1, 3) == [11, 12, 13]
    assert widths == [(1, 32), (1, 64), (1, 128), (2, 128), (4, 128)]


def test_a_slab_that_is_more_than_half_filled_is_read_whole() -> None:
    """Also one narrower than the others would be; and never more than there is."""
    for capacity, expected in ((300, [64, 128, 128, 192, 256, 256]), (96, [96, 96])):
        cache = KVCache(2, capacity, dtype=torch.float32, slab=128)
        lengths = [length for length in (64, 65, 127, 192, 193, 256) if length <= capacity]
        assert [cache.extent(length) for length in lengths] == expected
        assert all(length <= cache.extent(length) <= cache.capacity for length in range(1, cache.capacity + 1))
    assert [KVCache(2, 96, dtype=torch.float32, slab=128).extent(n) for n in (1, 17, 48, 49)] == [16, 32, 48, 96]


def test_writing_beyond_the_capacity_is_an_error() -> None:
    with pytest.raises(ValueError, match="5 slots requested from a cache with 4"):
        KVCache(1, 4, dtype=torch.float32).place(torch.tensor([[4]]), 5)


def test_a_mask_shows_each_query_its_past_and_within_the_window() -> None:
    mask = attention_mask(torch.tensor([[0, 1, 2], [3, 4, 5]]), 6)
    assert mask.shape == (2, 1, 3, 6)
    for row, first in enumerate((0, 3)):
        for query in range(3):
            assert mask[row, 0, query].tolist() == [slot <= first + query for slot in range(6)]
    windowed = attention_mask(torch.tensor([[5]]), 8, window=3)
    assert windowed[0, 0, 0].tolist() == [False, False, False, True, True, True, False, False]


def test_extents_hold_the_rows_and_waste_little() -> None:
    assert [extent(n) for n in (1, 16, 17, 192, 193, 384, 385, 512, 513, 704, 705)] == [
        16, 16, 32, 192, 512, 512, 512, 512, 528, 704, 1024,
    ]  # fmt: skip
    for n in range(1, 3000):  # the last block is read whole from 193 of it on: at most 319 slots for nothing
        assert n <= extent(n) < n + 16 if (n - 1) % 512 < 192 else extent(n) == -(-n // 512) * 512


@pytest.mark.parametrize("queries_per_key_head", [1, 2, 4, 7])
def test_a_rows_attention_has_the_same_bits_at_every_extent(queries_per_key_head: int, reproducible: None) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(8, 2, queries_per_key_head, 32, generator=generator) * 2
    key, value = (torch.randn(8, 2, 2048, 32, generator=generator) for _ in range(2))

    def attend(length: int, slots: int) -> Tensor:
        mask = attention_mask(torch.full((8, 1), length - 1), slots)
        return scaled_dot_product_attention(query, key[:, :, :slots], value[:, :, :slots], mask)

    for length in (1, 17, 100, 127, 190, 200, 300, 500, 513, 650, 700, 1000, 1100, 1500):
        extents = sorted({extent(n) for n in range(length, 2049, 8)})
        widest = attend(length, extents[-1])
        assert [slots for slots in extents if not torch.equal(attend(length, slots), widest)] == [], length


def test_rows_are_added_and_those_held_stay() -> None:
    cache = KVCache(0, 4, dtype=torch.float32)
    cache.reserve(4, rows=2)
    cache.insert([0, 1], prompt_cache([11, 12, 13]), [0, 0], length=3)
    cache.reserve(0, rows=4, held=1)
    assert (cache.rows, cache.capacity) == (4, 4) and cache.keys[0].shape[1] == 4
    assert held(cache, 0, 3) == [11, 12, 13]
    assert not cache.keys[0][:, 1:].any()
