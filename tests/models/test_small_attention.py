"""Attention by small products: the numbers and gradients of a softmax as it is written; what it leaves to others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from novarl.kernels.attention import plain_attention
from novarl.kernels.small_attention import FEW, SEVERAL, is_small, small_attention


def states(batch: int, heads: int, key_heads: int, length: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values as a layer has them, heads behind tokens, sharp enough for masks to matter."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, length: int) -> Tensor:
        values = 2.0 * torch.randn(batch, length, heads, 8, generator=generator, dtype=dtype)
        return values.transpose(1, 2).requires_grad_()

    return [drawn(heads, length), drawn(key_heads, keys), drawn(key_heads, keys)]


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (7, 7), (5, 33), (1, 20)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_values_and_gradients(heads: int, key_heads: int, length: int, keys: int, scale: float | None) -> None:
    qkv = states(3, heads, key_heads, length, keys, torch.float64)
    upstream = torch.randn(3, length, heads, 8, dtype=torch.float64).transpose(1, 2)
    visible = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
    ours, plain = small_attention(*qkv, scale=scale), plain_attention(*qkv, visible, scale=scale)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-13)
    found, expected = (torch.autograd.grad(mixed, qkv, upstream) for mixed in (ours, plain))
    assert all(gradient.abs().max() > 0 for gradient in expected[2:])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_a_sequence_has_its_bits_whoever_is_beside_it() -> None:
    qkv = states(9, 4, 2, 21, 40, torch.float32)
    together = small_attention(*qkv)
    for row in range(9):
        assert torch.equal(small_attention(*(x[row : row + 1] for x in qkv))[0], together[row])


def test_others_take_what_is_long_or_16_bit() -> None:
    def wants(batch: int, keys: int, dtype: torch.dtype = torch.float32) -> bool:
        return is_small(*states(batch, 4, 2, 3, keys, dtype))

    assert wants(SEVERAL // 2, FEW) and wants(8, 5, torch.float64)
    assert not wants(SEVERAL // 2 - 1, FEW)
    assert not wants(8, FEW + 1)
    assert not wants(8, 5, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert not wants(8, 5)
    query, key, value = states(8, 4, 2, 3, 5, torch.float32)
    assert not is_small(query, key, value.bfloat16())
