"""Causal attention over a cache, over a padded batch, and over sequences packed on one axis.

Everything goes through PyTorch's scaled dot-product attention. One rule matters to whoever wants equal bits: with a
mask, always the masked kernel runs, whatever the mask says; only without one the causal kernel does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


PACKING_ATTENTION = "novarl_sdpa"
"""The name under which transformers models find the attention of this module."""


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """Attention under a mask: query [B, H, L, D], key and value [B, Hkv, K, D], mask [B, 1, L, K] -> [B, H, L, D].

    With one query a row (decoding) the H / Hkv heads that share a key head are laid along the query axis, which reads
    the cache once instead of H / Hkv times.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.size(1)
    if groups > 1 and length == 1:
        folded = query.reshape(batch, heads // groups, groups, size)
        return F.scaled_dot_product_attention(folded, key, value, mask, scale=scale).reshape(query.shape)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups > 1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """Plain causal attention, no mask: query [B, H, L, D], key and value [B, Hkv, L, D] -> [B, H, L, D].

    Raises ValueError where there are more keys than queries: which of them are in the past, only a mask can say.
    """
    if key.size(2) != query.size(2):
        raise ValueError(f"{query.size(2)} queries over {key.size(2)} keys need an attention_mask")
    grouped = key.size(1) != query.size(1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], *, scale: float | None = None
) -> Tensor:
    """Causal attention within each of the sequences packed on one axis: [1, H, N, D] with sum(lengths) == N.

    One causal call a sequence (one for all, where they are equally long): no [N, N] mask, and no work between
    sequences. The axis is cut by `split`, whose backward is one concatenation (that of slicing fills a full-size tensor
    for every slice).
    """
    if query.size(0) != 1 or sum(lengths) != query.size(2):
        raise ValueError(f"lengths sum to {sum(lengths)}, the packed axis is {tuple(query.shape)}")
    if len(set(lengths)) == 1:
        rows = (tensor[0].unflatten(1, (len(lengths), -1)).transpose(0, 1) for tensor in (query, key, value))
        return causal_attention(*rows, scale=scale).transpose(0, 1).flatten(1, 2)[None]
    parts = zip(*(tensor.split(list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([causal_attention(q, k, v, scale=scale) for q, k, v in parts], dim=2)
