"""The model as the sampler sees it: a prompt goes in and logits come out, then one token a row at a time.

Bits. On a CPU with `MKL_CBWR=AVX2` in the environment before torch loads, the logits of a row are the same bits
whichever other rows are computed with it, because (1) every matrix product has a multiple of 4 rows, (2) attention
always gets an explicit mask, (3) a prompt is prefilled by itself. (A mixture of experts multiplies as many rows by an
expert as were routed to it, so its rows do depend on their company, in the last bits.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.models.attention import PACKING_ATTENTION
from novarl.models.forward import autocast, backbone, head
from novarl.models.kv_cache import KVCache, attention_mask

ROWS = 4
"""Rows are padded to a multiple of this: from 4 rows on, in steps of 4, a row's matrix product has the same bits."""

SLOTS = 32
"""Attention reads a multiple of this many slots, so that shapes recur from step to step."""


def padded(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt, its keys and values (row 0 of `cache`), and the logits [V] of the token after it."""

    prompt: tuple[int, ...]
    cache: KVCache
    logits: Tensor


class ModelRunner:
    """Runs a decoder-only model on a KVCache, without gradients and with dropout off.

    `model` follows Hugging Face's call convention, as novarl's Decoder or as any transformers causal LM whose cache is
    plain keys and values; others are refused by name when the runner is made. `compute_dtype` runs the forward pass
    under autocast.
    """

    def __init__(self, model: nn.Module, *, compute_dtype: torch.dtype | None = None, pad_id: int = 0) -> None:
        weight, _ = head(model)
        self.model, self.pad_id = model, pad_id
        self.device, self.vocabulary = weight.device, len(weight)
        self.dtype = compute_dtype or weight.dtype
        self._masks = _Masks(model, self.dtype)
        self._check_cache()

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> Prefill:
        """Run a prompt by itself; its tokens are padded to a multiple of ROWS, after their end."""
        length, width = len(prompt), padded(len(prompt), ROWS)
        tokens = torch.full((1, width), self.pad_id, device=self.device)
        tokens[0, :length] = torch.tensor(prompt)
        positions = torch.arange(width, device=self.device)[None]
        cache = KVCache(1, width, dtype=self.dtype)
        # The head multiplies ROWS rows here too; the last token's is one of them.
        first = min(length - 1, width - ROWS)
        with self._sampling():
            hidden = self._hidden(tokens, positions, cache, extent=width)[0, first : first + ROWS].contiguous()
            logits = self._logits(hidden)[length - 1 - first]
        return Prefill(tuple(prompt), cache, logits)

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache, *, extent: int) -> Tensor:
        """Logits [B, V] after feeding one token a row [B] at slots `positions` [B]; B a multiple of ROWS."""
        with self._sampling():
            hidden = self._hidden(tokens[:, None], positions[:, None], cache, extent=extent)
            return self._logits(hidden[:, 0].contiguous())

    def _hidden(self, tokens: Tensor, positions: Tensor, cache: KVCache, *, extent: int) -> Tensor:
        cache.place(positions, extent)
        mask = self._masks.build(positions, extent)
        arguments: dict[str, Any] = {"position_ids": positions, "attention_mask": mask, "past_key_values": cache}
        with autocast(self.device, self.dtype):
            hidden: Tensor = backbone(self.model)(tokens, **arguments).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, D] to logits [B, V], in the dtype of the head's weight as in the learner, whatever the layers ran
        in: rounding logits to 16 bits is what would drive the two apart."""
        weight, bias = head(self.model)
        return nn.functional.linear(hidden.to(weight.dtype), weight, bias)

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Dropout off; every module's own mode is put back afterwards, since the learner shares the modules."""
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @torch.no_grad()
    def _check_cache(self) -> None:
        """Refuse a model that computes something else with our cache than without any cache.

        Two prompts of unlike lengths and two more tokens each, side by side, against the model's own full forward pass:
        a family that ignores position ids or masks (ALiBi from a padding mask, recurrent states) shows here.
        """
        sequences = [[(7 * i + 3 * j) % self.vocabulary for j in range(length)] for i, length in ((1, 9), (2, 6))]
        cache = KVCache(ROWS, 12, dtype=self.dtype)
        try:
            for row, sequence in enumerate(sequences):
                cache.insert([row], self.prefill(sequence[:-2]).cache, len(sequence) - 2)
            fed = torch.tensor([*(s[-2:] for s in sequences), *([self.pad_id] * 2 for _ in range(ROWS - 2))])
            at = torch.tensor([*([len(s) - 2, len(s) - 1] for s in sequences), *([0, 1] for _ in range(ROWS - 2))])
            fed, at = fed.to(self.device), at.to(self.device)
            self.decode(fed[:, 0], at[:, 0], cache, extent=12)
            ours = self.decode(fed[:, 1], at[:, 1], cache, extent=12)[: len(sequences)].float()
            with self._sampling():
                true = torch.stack([self._uncached(sequence) for sequence in sequences]).float()
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise _refusal(self.model, f"its forward pass fails with a plain key/value cache: {error}") from error
        if not bool(torch.isfinite(true).all()):
            raise NovaError("the model's logits are not finite", where=_family(self.model), fix="check its weights")
        error = float((ours - true).norm() / true.norm().clamp(min=1e-9))
        if error > (1e-3 if self.dtype == torch.float32 else 0.1):
            raise _refusal(self.model, f"with a plain key/value cache its logits are off by a relative {error:.1e}")

    def _uncached(self, sequence: Sequence[int]) -> Tensor:
        """The logits [V] after a sequence, by the model's own full forward pass."""
        tokens = torch.tensor([sequence], device=self.device)
        positions = torch.arange(len(sequence), device=self.device)[None]
        with autocast(self.device, self.dtype):
            hidden: Tensor = backbone(self.model)(tokens, position_ids=positions).last_hidden_state
        return self._logits(hidden[0, -1:])[0]


class _Masks:
    """Attention masks in the form a family takes: one tensor, or one per layer type; boolean, or additive for `eager`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        config: Any = getattr(model, "config", None)
        if getattr(model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
            raise _refusal(model, "its state is not one key and one value per token")
        window = getattr(config, "sliding_window", None)
        layer_types = getattr(config, "layer_types", None) or [
            "full_attention" if window is None else "sliding_attention"
        ]
        self.windows = {name: window if name == "sliding_attention" else None for name in layer_types}
        unknown = sorted(set(self.windows) - {"full_attention", "sliding_attention"})
        if unknown:
            raise _refusal(model, f"its layers include {', '.join(unknown)}")
        implementation = getattr(config, "_attn_implementation", "sdpa")
        if implementation not in ("sdpa", "eager", PACKING_ATTENTION):
            raise _refusal(model, f"its attention is {implementation!r}", fix="load it with attention 'sdpa' or 'eager'")
        self.additive = dtype if implementation == "eager" else None

    def build(self, positions: Tensor, extent: int) -> Tensor | dict[str, Tensor]:
        masks = {}
        for name, window in self.windows.items():
            mask = attention_mask(positions, extent, window=window)
            if self.additive is not None:
                lowest = torch.finfo(self.additive).min
                mask = torch.zeros(mask.shape, dtype=self.additive, device=mask.device).masked_fill(~mask, lowest)
            masks[name] = mask
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _family(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _refusal(model: nn.Module, why: str, *, fix: str = "use a decoder with a plain key/value cache") -> NovaError:
    return NovaError(f"cannot sample from a {_family(model)} model: {why}", fix=fix)
