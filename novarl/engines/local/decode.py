"""The built-in decoder's forward pass for sampling: the same results as `transformer.Decoder` with fewer operations.

It avoids module calls, norms in six kernels, copies of the residual, and converting a boolean mask in every layer;
queries, keys and values come from one product. It uses the learner's own tensors if possible, and otherwise copies: in
16 bits, stacked, or in the CPU's fastest layout (`matrices`). Copies are made in the first forward pass after a
`refresh` and released by the next `refresh`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from novarl.engines.local.kv_cache import SLAB, KVCache, attention_mask, step_of
from novarl.engines.local.matrices import Matrix, as_matrix
from novarl.engines.local.shared_prefix import SharedPrefixes, stands_alone
from novarl.kernels.attention import masked_attention
from novarl.kernels.fused import Linear
from novarl.models.lora import adapted_weight
from novarl.models.transformer import (
    MLP,
    Attention,
    Backbone,
    Decoder,
    Embedding,
    Layer,
    RMSNorm,
    rotary_angles,
)

_MODULES = {Decoder, Backbone, nn.ModuleList, Layer, Attention, MLP, RMSNorm, nn.Identity, Linear, Embedding}

Segment = tuple[int, int, int]
"""(start, stop, extent): the queries of rows start .. stop - 1 read `extent` slots of the cache."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """One layer's weights. `project` [(H + 2 Hkv) Dh, D] stacks the query, key and value projections. `gain` [H + Hkv,
    Dh] holds the norm weights of queries and keys (1 without norm); queries' include the attention scale 1 / sqrt(Dh).
    """

    attention_norm: Tensor
    project: Matrix
    bias: Tensor | None
    gain: Tensor
    output: Matrix
    mlp_norm: Tensor
    gate: Matrix
    up: Matrix
    down: Matrix

    @classmethod
    def of(cls, layer: Layer, heads: int, key_heads: int, dtype: torch.dtype) -> _Weights:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [attention.q_norm, attention.k_norm]
        ones = layer.input_layernorm.weight.new_ones(attention.head_dim)
        query_norm, key_norm = (norm.weight.detach() if isinstance(norm, RMSNorm) else ones for norm in norms)
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [bias for linear in projections if (bias := _bias(linear)) is not None]
        matrices = {"output": attention.o_proj, "gate": mlp.gate_proj, "up": mlp.up_proj, "down": mlp.down_proj}
        return cls(
            attention_norm=layer.input_layernorm.weight.detach(),
            project=as_matrix(torch.cat([_weight(linear).to(dtype) for linear in projections])),
            bias=torch.cat(biases) if biases else None,
            gain=torch.cat([(query_norm * attention.head_dim**-0.5).expand(heads, -1), key_norm.expand(key_heads, -1)]),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            **{name: as_matrix(_weight(linear).to(dtype)) for name, linear in matrices.items()},
        )


def _weight(linear: nn.Module) -> Tensor:
    """The weight [N, K] of a linear layer, including its adapter."""
    weight: Tensor = linear.weight  # type: ignore[assignment]
    return weight.detach() if type(linear) is Linear else adapted_weight(linear)


def _bias(linear: nn.Module) -> Tensor | None:
    bias: Tensor | None = linear.bias  # type: ignore[assignment]
    return None if bias is None else bias.detach()


def is_plain(model: nn.Module) -> TypeGuard[Decoder]:
    """Whether `LeanDecoder` supports `model`: a built-in decoder with original modules and no hooks, maybe adapters."""
    return isinstance(model, Decoder) and _is_plain(model)


def _is_plain(module: nn.Module) -> bool:
    if type(getattr(module, "base_layer", None)) is Linear:
        return True
    if type(module) not in _MODULES or module._forward_hooks or module._forward_pre_hooks:
        return False
    return all(_is_plain(child) for child in module.children())


class LeanDecoder:
    """Runs a `Decoder` with a `KVCache`: any number of tokens per row, fastest for one.

    `dtype` is used for products with weights, the dtype of the cache for attention; residual stream, norms and rotary
    embeddings use that of the weights. Call `refresh` after the weights have changed.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype) -> None:
        self._model, self._config, self._dtype = model.model, model.config, dtype
        self._layers: list[_Weights] = []
        self._cos = self._sin = torch.empty(0)

    def refresh(self) -> None:
        """Release everything derived from the old weights."""
        self._layers = []

    def _weights(self) -> list[_Weights]:
        if not self._layers:
            heads, key_heads = self._config.num_attention_heads, self._config.num_key_value_heads
            layers: Iterable[Layer] = self._model.layers  # type: ignore[assignment]
            self._layers = [_Weights.of(layer, heads, key_heads, self._dtype) for layer in layers]
        return self._layers

    @property
    def cache_dtype(self) -> torch.dtype:
        """The fastest cache dtype: on a CPU never 16-bit, whose scores would be rounded and whose kernel is slower."""
        weight = self._model.norm.weight
        return weight.dtype if weight.device.type == "cpu" else self._dtype

    @property
    def slab(self) -> int | None:
        """The slab size, if a cache for decoding should be divided into slabs."""
        return SLAB if self._model.norm.weight.device.type == "cpu" else None

    @property
    def step(self) -> int:
        """Attention should read a multiple of this many slots."""
        config = self._config
        return step_of(config.num_attention_heads // config.num_key_value_heads * config.head_dim)

    @property
    def shared_queries(self) -> int | None:
        """Query heads per key head, if rows can share the keys of a common prefix: this requires slabs, several key
        heads (PyTorch treats a batch of one product differently), and suitable CPU products."""
        config = self._config
        if self.slab is None or config.num_key_value_heads == 1 or not stands_alone(config.head_dim, self.cache_dtype):
            return None
        return config.num_attention_heads // config.num_key_value_heads

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all slots so far; longer caches extend them."""
        return self._cos, self._sin

    def hidden(
        self,
        tokens: Tensor,
        slots: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        read: tuple[Tensor, Tensor] | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> Tensor:
        """Hidden states [B, L, D] after the final norm, for tokens [B, L] at `slots` [B, L] of rows 0 on.

        `segments` divide the rows into ranges, each with the number of slots its queries read. `read` (rows [R], places
        [R]) are the tokens whose hidden states are returned, [R, 1, D], the i-th in row i; entries beyond B are padding
        in unused cache rows. For other tokens the last layer computes only keys and values. With `prefixes`, L = 1 and
        a row's slots follow its prefix.
        """
        dtype, size = self._dtype, self._config.head_dim
        heads, key_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        queries, keys, half = heads * size, (heads + key_heads) * size, size // 2
        layers, shape, count = self._weights(), tokens.shape, tokens.numel()
        idle = layers[0].project.rows(count) - count  # padding rows that make products faster
        x = self._model.embed_tokens.weight.detach()[F.pad(tokens.flatten(), (0, idle))]
        eps = torch.full((), self._config.rms_norm_eps, dtype=x.dtype, device=x.device)
        longest = max(extent for _, _, extent in segments)
        cache.place(slots, longest)
        positions, most = (slots, 0) if prefixes is None else (slots + prefixes.before, prefixes.longest)
        cos, sin = self._rotation(F.pad(positions.flatten(), (0, idle)), cache.capacity + most)
        attend = _Attention(slots, cache, segments, heads, key_heads, prefixes)
        # Every layer writes to the same buffer, so its views are made once.
        plain, turned = x.new_empty(2, len(x), heads + key_heads, size)
        (first, second), (left, right) = plain.split(half, -1), turned.split(half, -1)
        states = turned if x.dtype == cache.dtype else torch.empty_like(turned, dtype=cache.dtype)
        query, key = states[:count].view(*shape, -1, size).split([heads, key_heads], 2)
        mixed = x.new_zeros(len(x), queries, dtype=cache.dtype)
        for index, layer in enumerate(layers):
            projected = layer.project.times(_as(dtype, _normalised(x, layer.attention_norm, eps)))
            if layer.bias is not None:
                projected = projected + layer.bias  # in the biases' own precision, as the learner adds them
            raw, value = projected[:, :keys].view(plain.shape), projected[:count, keys:]
            if self._config.qk_norm:
                _normalised(_as(x.dtype, raw), layer.gain, eps, out=plain)
            else:
                torch.mul(raw, layer.gain, out=plain)
            torch.mul(plain, cos, out=turned)
            left.addcmul_(second, sin, value=-1)
            right.addcmul_(first, sin)
            if states is not turned:
                states.copy_(turned)
            cache.write(key, _as(cache.dtype, value).view(key.shape), index)
            if read is not None and layer is layers[-1]:
                query, count = query[read][:, None], len(read[0])
                idle = layer.output.rows(count) - count
                x = F.pad(x[: tokens.numel()].view(*shape, -1)[read], (0, 0, 0, idle))
                mixed = x.new_zeros(len(x), queries, dtype=cache.dtype)
                attend = _Attention(slots[read][:, None], cache, [(0, count, longest)], heads, key_heads)
            attend(query, index, mixed[:count])
            x = layer.output.added(_as(dtype, mixed), x)
            y = _as(dtype, _normalised(x, layer.mlp_norm, eps))
            x = layer.down.added(layer.up.gated(y, layer.gate.opened(y)), x)
        x = _normalised(x[:count], self._model.norm.weight.detach(), eps)
        return x.unflatten(0, shape if read is None else (-1, 1))

    def _rotation(self, positions: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """cos [N, 1, Dh] (its halves are equal) and sin [N, 1, Dh / 2] of the rotations at positions [N]."""
        if len(self._cos) < capacity:
            slots = torch.arange(capacity, device=positions.device)[None]
            cos, sin = rotary_angles(slots, self._config)
            dtype = self._model.norm.weight.dtype
            self._cos, self._sin = cos[0, 0].repeat(1, 2).to(dtype), sin[0, 0].to(dtype)
        return self._cos[positions][:, None], self._sin[positions][:, None]


class _Attention:
    """The attention of all layers of one forward pass; masks are made once.

    With one query per row, two batched products are 2 to 3 times as fast on a CPU as the fused kernel. Their scores
    would be rounded to 16 bits, so 16-bit caches use the kernel, which requires a cache with one slab.
    """

    def __init__(
        self,
        positions: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        heads: int,
        key_heads: int,
        prefixes: SharedPrefixes | None = None,
    ) -> None:
        self._cache, self._segments, self._prefixes = cache, segments, prefixes
        self._by_products = positions.device.type == "cpu" and positions.shape[1] == 1 and cache.dtype.itemsize > 2
        if self._by_products:
            longest = max(extent for _, _, extent in segments)
            self._parts = list(_parts(cache.slab or longest, longest, segments, key_heads))
            self._mask = _as_scores(attention_mask(positions, longest), heads, key_heads, cache.dtype)
        else:
            self._masks = [attention_mask(positions[start:stop], extent) for start, stop, extent in segments]

    def __call__(self, query: Tensor, layer: int, out: Tensor) -> None:
        """query [B, L, H, Dh], already scaled, to attention outputs, written to `out` [B * L, H * Dh]."""
        if self._by_products:
            self._products(query, layer, out)
        else:
            self._fused(query, self._cache.keys[layer][0], self._cache.values[layer][0], out)

    def _products(self, query: Tensor, layer: int, out: Tensor) -> None:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        folded = query.reshape(-1, self._mask.shape[1], query.shape[3])
        mixed = out.view(folded.shape)
        scores = torch.empty_like(self._mask) if len(self._parts) == 1 else self._mask.clone()
        for slab, (rows, slots, pairs, span) in enumerate(self._parts):
            found = torch.bmm(folded[pairs], keys[slab, rows, :, slots].flatten(0, 1).transpose(1, 2))
            torch.add(found, self._mask[pairs, :, span], out=scores[pairs, :, span])
        shared = self._prefixes
        weights = torch.softmax(scores, -1) if shared is None else shared.attend(layer, folded, scores, mixed)
        for slab, (rows, slots, pairs, span) in enumerate(self._parts):
            part = values[slab, rows, :, slots].flatten(0, 1)
            if slab == 0 and shared is None:
                torch.bmm(weights[:, :, span], part, out=mixed)
            else:
                mixed[pairs].baddbmm_(weights[pairs, :, span], part)

    def _fused(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        mixed = out.unflatten(0, query.shape[:2]).unflatten(-1, query.shape[2:])
        for (start, stop, extent), mask in zip(self._segments, self._masks, strict=True):
            rows = slice(start, stop)
            asked = query[rows].transpose(1, 2)
            found = masked_attention(asked, keys[rows, :, :extent], values[rows, :, :extent], mask, scale=1.0)
            mixed[rows] = found.transpose(1, 2)


def _parts(
    width: int, longest: int, segments: Sequence[Segment], key_heads: int
) -> Iterator[tuple[slice, slice, slice, slice]]:
    """For each slab, the rows that read it, its slots, and the position of their scores: (row, key head) pairs and
    slots of the whole cache. If a row reads a slab, all earlier rows do too."""
    for start in range(0, longest, width):
        reading = [(stop, extent - start) for _, stop, extent in segments if extent > start]
        # PyTorch computes a batch of one product differently, with different bits.
        rows = max(2 if key_heads == 1 else 1, *(stop for stop, _ in reading))
        slots = min(width, max(slots for _, slots in reading))
        yield slice(0, rows), slice(0, slots), slice(0, rows * key_heads), slice(start, start + slots)


def _as_scores(visible: Tensor, heads: int, key_heads: int, dtype: torch.dtype) -> Tensor:
    """bool [B, 1, 1, K] to an additive mask of 0 or -inf for each row and key head: [B * Hkv, H / Hkv, K]."""
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return mask.expand(-1, heads, 1, -1).reshape(len(mask) * key_heads, heads // key_heads, -1)


def _normalised(x: Tensor, gain: Tensor, eps: Tensor, out: Tensor | None = None) -> Tensor:
    """gain * x / sqrt(mean(x^2) + eps) over the last axis, into `out` if given; from |x|, one kernel less."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.mul(x, torch.addcmul(eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_(), out=out).mul_(gain)


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """x in `dtype`, without a call if it already is: the call takes as long as a small product."""
    return x if x.dtype == dtype else x.to(dtype)
