"""The model as the sampler sees it: prompts go in and logits come out, then one token a row at a time.

Bits. On a CPU with `MKL_CBWR=AVX2` in the environment before torch loads, the numbers of a row are the same bits
whichever rows are computed with it, because matrix products have a multiple of ROWS rows, attention always gets an
explicit mask, and it reads as many slots as `kv_cache.extent` says. Without any one of these they are not. (A mixture
of experts multiplies as many rows by an expert as were routed to it, so its last bits do depend on the company.)
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
from novarl.models.kv_cache import KVCache, attention_mask, extent, round_up

ROWS = 4
"""Matrix products get a multiple of this many rows: from 4 on, in steps of 4, a row's product has the same bits."""

PREFILL_TOKENS = 2048
"""Prompts are prefilled together up to this many tokens, padding included; a longer prompt goes alone."""

FORWARD_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""What a forward pass raises that was given a cache or a mask it does not understand."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt, where its keys and values are (a row of `cache`), and the logits [V] of the token after it."""

    prompt: tuple[int, ...]
    cache: KVCache
    row: int
    logits: Tensor


class ModelRunner:
    """Runs a decoder-only model on a KVCache, without gradients and with dropout off.

    `model` is novarl's Decoder or any transformers causal LM whose cache is one key and one value per token; others are
    refused by name when the runner is made. Layers run under autocast if `compute_dtype` is a 16-bit type.
    """

    def __init__(self, model: nn.Module, *, compute_dtype: torch.dtype | None = None, pad_id: int = 0) -> None:
        weight, _ = head(model)
        self.model, self.pad_id = model, pad_id
        self.device, self.vocabulary = weight.device, len(weight)
        self.dtype = compute_dtype or weight.dtype
        self._masks = _Masks(model, self.dtype)
        self._check_cache()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> list[Prefill]:
        """Run prompts, those of like length together, and return them in their order."""
        done: dict[int, Prefill] = {}
        waiting = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
        while waiting:
            width = round_up(len(prompts[waiting[0]]), ROWS)
            count = max(1, PREFILL_TOKENS // width)
            together, waiting = waiting[:count], waiting[count:]
            done |= zip(together, self._prefill([prompts[index] for index in together], width), strict=True)
        return [done[index] for index in range(len(prompts))]

    def _prefill(self, prompts: Sequence[tuple[int, ...]], width: int) -> list[Prefill]:
        """Run prompts side by side, each padded to `width` tokens after its end, where no token of it looks."""
        tokens = torch.full((len(prompts), width), self.pad_id)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(width, device=self.device).expand(len(prompts), width)
        slots = extent(width)
        cache = KVCache(len(prompts), slots, dtype=self.dtype)
        # The head multiplies a multiple of ROWS rows here too: the first is repeated.
        rows = torch.tensor([*range(len(prompts)), *[0] * (-len(prompts) % ROWS)], device=self.device)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)[rows]
        with self._sampling():
            hidden = self._hidden(tokens.to(self.device), positions, cache, extent=slots)
            logits = self._logits(hidden[rows, last])
        return [Prefill(prompt, cache, row, logits[row]) for row, prompt in enumerate(prompts)]

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
        idle = [[self.pad_id] * 2 for _ in range(ROWS - len(sequences))]
        fed = torch.tensor([*(sequence[-2:] for sequence in sequences), *idle], device=self.device)
        ends = [len(sequence) for sequence in sequences] + [2] * len(idle)
        at = torch.tensor([[end - 2, end - 1] for end in ends], device=self.device)
        cache = KVCache(ROWS, slots := extent(9), dtype=self.dtype)
        try:
            for row, prefill in enumerate(self.prefill([tuple(sequence[:-2]) for sequence in sequences])):
                cache.insert([row], prefill.cache, prefill.row, length=len(prefill.prompt))
            for step in range(2):
                logits = self.decode(fed[:, step], at[:, step], cache, extent=slots)
            with self._sampling():
                true = torch.stack([self._uncached(sequence) for sequence in sequences])
        except FORWARD_ERRORS as error:
            raise _refusal(self.model, f"its forward pass fails with a plain key/value cache: {error}") from error
        if not bool(torch.isfinite(true).all()):
            raise NovaError("the model's logits are not finite", where=_family(self.model), fix="check its weights")
        distance = float((logits[: len(true)] - true).norm() / true.norm().clamp(min=1e-9))
        if distance > (0.1 if self.dtype.itemsize == 2 else 1e-3):
            raise _refusal(self.model, f"with a plain key/value cache its logits are off by a relative {distance:.1e}")

    def _uncached(self, sequence: Sequence[int]) -> Tensor:
        """The logits [V] after a sequence, by the model's own full forward pass."""
        tokens = torch.tensor([sequence], device=self.device)
        positions = torch.arange(len(sequence), device=self.device)[None]
        with autocast(self.device, self.dtype):
            hidden: Tensor = backbone(self.model)(tokens, position_ids=positions).last_hidden_state
        return self._logits(hidden[0, -1:])[0]


class _Masks:
    """Attention masks in the form a family takes: one, or one per layer type; boolean, or additive for `eager`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        config: Any = getattr(model, "config", None)
        if getattr(model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
            raise _refusal(model, "its state is not one key and one value per token")
        window = getattr(config, "sliding_window", None)
        every = "full_attention" if window is None else "sliding_attention"
        layer_types = getattr(config, "layer_types", None) or [every]
        self.windows = {name: window if name == "sliding_attention" else None for name in layer_types}
        unknown = sorted(set(self.windows) - {"full_attention", "sliding_attention"})
        if unknown:
            raise _refusal(model, f"it has layers of type {', '.join(unknown)}")
        implementation = getattr(config, "_attn_implementation", "sdpa")
        if implementation not in ("sdpa", "eager", PACKING_ATTENTION):
            raise _refusal(
                model, f"its attention is {implementation!r}", fix="load it with attention 'sdpa' or 'eager'"
            )
        self.additive = dtype if implementation == "eager" else None

    def build(self, positions: Tensor, extent: int) -> Tensor | dict[str, Tensor]:
        """The mask(s) of a forward pass whose queries are at `positions` [B, L] and read `extent` slots."""
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
