"""Run a model for sampling: prefill prompts, then decode one token per row at a time.

On a CPU, with MKL_CBWR set according to `core.processor` before torch is loaded, the results of a row are bit-identical
whatever other rows are in the batch: matrix products have a multiple of ROWS rows, attention always has an explicit
mask, and it reads `kv_cache.extent` slots. (In a mixture of experts the rows per expert vary, so last bits do too.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from novarl.core.errors import NotFinite, NovaError
from novarl.engines.local.decode import LeanDecoder, Segment, is_plain
from novarl.engines.local.kv_cache import STEP, KVCache, attention_mask, extent, round_up
from novarl.engines.local.matrices import PackedMatrix
from novarl.engines.local.recorded import RecordedSteps, records
from novarl.engines.local.shared_prefix import SharedPrefixes
from novarl.kernels.attention import PACKING_ATTENTION
from novarl.kernels.prefix import common_length
from novarl.kernels.products import can_pack, mkl_has_avx512, only_pytorch
from novarl.models.compiled import uncompiled
from novarl.models.forward import autocast, backbone, head

ROWS = 4
"""Matrix products have a multiple of this many rows: from 4 on, in steps of 4, a row's bits are the same."""

COLUMNS, BLOCK = 16, 2048
"""For the head's product on a CPU: the row multiple, and the vocabulary block whose logits fit in a core's cache until
they are transposed."""

PREFILL_TOKENS = 2048
"""Maximum tokens of a prefill batch, including padding; a longer prompt runs alone."""

SHARED = 16
"""The minimum number of tokens worth sharing between two prompts."""

FORWARD_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
"""Exceptions of a forward pass that does not support the cache or mask."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt, its keys and values (a row of `cache`), and the logits [V] of the next token."""

    prompt: tuple[int, ...]
    cache: KVCache
    row: int
    logits: Tensor


class ModelRunner:
    """Runs a decoder-only model with a KVCache, without gradients and dropout.

    `model` is novarl's Decoder or any transformers causal LM whose cache is one key and one value per token; others are
    rejected when the runner is created. Layers run under autocast if `compute_dtype` is a 16-bit type.
    """

    def __init__(self, model: nn.Module, *, compute_dtype: torch.dtype | None = None, pad_id: int = 0) -> None:
        weight, _ = head(model)
        self.model, self.pad_id = model, pad_id
        self.device, self.vocabulary = weight.device, len(weight)
        self.dtype = compute_dtype or weight.dtype
        self._masks = _Masks(model, self.dtype)
        self._lean: LeanDecoder | None = None
        self._head: PackedMatrix | None = None
        self._recorded = RecordedSteps(self._step, self._tables) if records(model) else None
        self.refresh()
        self._check_cache()
        self.refresh()  # free what the check allocated

    @property
    def reads_segments(self) -> bool:
        """Whether `decode` reads only the extent of each segment; otherwise it reads that of the longest row."""
        return self._lean is not None and self._recorded is None

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the KV cache."""
        return self.dtype if self._lean is None else self._lean.cache_dtype

    def new_cache(self) -> KVCache:
        """An empty cache for `decode`."""
        slab = None if self._lean is None else self._lean.slab
        return KVCache(0, 0, dtype=self.cache_dtype, slab=slab, step=self._step_of_slots)

    @property
    def shared_queries(self) -> int | None:
        """Query heads per key head, if `decode` can read shared prefixes once for all rows."""
        return None if self._lean is None else self._lean.shared_queries

    @property
    def _step_of_slots(self) -> int:
        return STEP if self._lean is None else self._lean.step

    def refresh(self) -> None:
        """Release copies of the weights, which may have changed; new ones are made on demand."""
        self._head = None
        if self._recorded is not None:
            self._recorded.forget()
        with self._evaluating():
            if not is_plain(self.model):
                self._lean = None
            elif self._lean is None:
                self._lean = LeanDecoder(self.model, self.dtype)
            else:
                self._lean.refresh()

    @torch.no_grad()
    def prefill(self, prompts: Sequence[tuple[int, ...]], known: Iterable[Prefill] = ()) -> list[Prefill]:
        """Run prompts in batches of similar length and return them in order.

        The common prefix with one of `known` or another of `prompts` is not recomputed; the bits are the same, because
        batches are padded to a multiple of ROWS tokens.
        """
        done: dict[int, Prefill] = {}
        turns, after = _turns(prompts, known)
        for turn in turns:
            shared: dict[int, tuple[Prefill, int]] = {
                index: (done[leader] if isinstance(leader, int) else leader, length)
                for index, (leader, length) in ((index, after[index]) for index in turn if index in after)
            }
            for together in _alike(turn, lambda index: len(prompts[index]) - after.get(index, (0, 0))[1]):
                work = [(prompts[index], shared.get(index)) for index in together]
                done |= zip(together, self._prefill(work), strict=True)
        return [done[index] for index in range(len(prompts))]

    def _prefill(self, work: Sequence[tuple[tuple[int, ...], tuple[Prefill, int] | None]]) -> list[Prefill]:
        """Run a batch of right-padded prompts, each after the prefix that it shares with another prefill (None:
        nothing)."""
        starts = [0 if shared is None else shared[1] for _, shared in work]
        rests = [prompt[start:] for (prompt, _), start in zip(work, starts, strict=True)]
        width = round_up(max(map(len, rests)), ROWS)
        slots = extent(max(starts) + width, self._step_of_slots)
        cache = KVCache(round_up(len(work), ROWS), slots, dtype=self.cache_dtype)
        tokens = torch.full((len(work), width), self.pad_id)
        for row, ((_, shared), rest) in enumerate(zip(work, rests, strict=True)):
            tokens[row, : len(rest)] = torch.tensor(rest)
            if shared is not None:
                cache.insert([row], shared[0].cache, [shared[0].row], length=shared[1])
        positions = torch.arange(width, device=self.device) + torch.tensor(starts, device=self.device)[:, None]
        # The operations after the last attention also need a multiple of ROWS rows: the first row is repeated.
        rows = torch.tensor([*range(len(work)), *[0] * (cache.rows - len(work))], device=self.device)
        last = torch.tensor([len(rest) - 1 for rest in rests], device=self.device)[rows]
        segments = [(0, len(work), slots)]
        with self._sampling():
            hidden = self._hidden(tokens.to(self.device), positions, cache, segments, (rows, last))
            logits = self._logits(hidden[:, 0].contiguous())
        return [Prefill(prompt, cache, row, logits[row]) for row, (prompt, _) in enumerate(work)]

    @torch.no_grad()
    def decode(
        self,
        tokens: Tensor,
        slots: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        prefixes: SharedPrefixes | None = None,
    ) -> Tensor:
        """Logits [B, V] after feeding one token per row [B] at `slots` [B] (after the row's prefix, with `prefixes`).
        ROWS divides B.

        `segments` divide the rows into ranges, each with the number of slots to read.
        """
        if self._recorded is not None and self._lean is not None:
            return self._recorded(tokens, slots, cache, max(extent for _, _, extent in segments))
        with self._sampling():
            hidden = self._hidden(tokens[:, None], slots[:, None], cache, segments, prefixes=prefixes)
            return self._logits(hidden[:, 0].contiguous())

    def _step(self, tokens: Tensor, positions: Tensor, cache: KVCache, slots: int) -> Tensor:
        """`decode` for rows that all read the same number of slots, which can be captured."""
        hidden = self._hidden(tokens[:, None], positions[:, None], cache, [(0, len(tokens), slots)])
        return self._logits(hidden[:, 0].contiguous())

    def _tables(self) -> tuple[Tensor, ...]:
        """The tensors that a step reads besides weights and cache."""
        return () if self._lean is None else self._lean.tables

    def _hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        read: tuple[Tensor, Tensor] | None = None,
        prefixes: SharedPrefixes | None = None,
    ) -> Tensor:
        """`LeanDecoder.hidden`, or the model's own forward pass, which does not support shared prefixes."""
        if self._lean is not None:
            return self._lean.hidden(tokens, positions, cache, segments, read, prefixes)
        extent = max(extent for _, _, extent in segments)
        cache.place(positions, extent)
        mask = self._masks.build(positions, extent)
        if read is not None:  # padding positions could exceed the position table or change some rotary embeddings
            positions = positions.minimum(positions[read].max())
        arguments: dict[str, Any] = {"position_ids": positions, "attention_mask": mask, "past_key_values": cache}
        with autocast(self.device, self.dtype), only_pytorch():
            hidden: Tensor = backbone(self.model)(tokens, **arguments).last_hidden_state
        return hidden if read is None else hidden[read][:, None]

    def _logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, D] to logits [B, V], in the dtype of the head's weight, as in the learner."""
        weight, bias = head(self.model)
        hidden = hidden.to(weight.dtype)
        if can_pack(weight):
            logits = self._packed_logits(hidden, weight)
        elif weight.device.type != "cpu" or len(weight) < BLOCK or mkl_has_avx512():
            return F.linear(hidden, weight, bias)
        else:
            logits = _blockwise(hidden, weight)
        return logits if bias is None else logits.add_(bias)

    def _packed_logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        if self._head is None:
            self._head = PackedMatrix(weight)
        count = len(hidden)
        return self._head.times(F.pad(hidden, (0, 0, 0, self._head.rows(count) - count)))[:count]

    def _sampling(self) -> AbstractContextManager[None]:
        """The context of a sampling forward pass; `LeanDecoder` has no dropout."""
        return self._evaluating() if self._lean is None else nullcontext()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Disable dropout and compilation; modes are restored afterwards, because the learner shares the modules."""
        training = [module for module in self.model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with uncompiled(self.model):
                yield
        finally:
            for module in training:
                module.training = True

    @torch.no_grad()
    def _check_cache(self) -> None:
        """Reject a model whose results with this cache differ from those without a cache.

        Compares a batch of two prompts of different lengths and two more tokens each with the model's full forward
        pass. This detects families that ignore position ids or masks (ALiBi from a padding mask, recurrent states).
        """
        sequences = [[(7 * i + 3 * j) % self.vocabulary for j in range(length)] for i, length in ((1, 9), (2, 6))]
        idle = [[self.pad_id] * 2 for _ in range(ROWS - len(sequences))]
        fed = torch.tensor([*(sequence[-2:] for sequence in sequences), *idle], device=self.device)
        ends = [len(sequence) for sequence in sequences] + [2] * len(idle)
        at = torch.tensor([[end - 2, end - 1] for end in ends], device=self.device)
        cache = KVCache(ROWS, slots := extent(9), dtype=self.cache_dtype)
        try:
            for row, prefill in enumerate(self.prefill([tuple(sequence[:-2]) for sequence in sequences])):
                cache.insert([row], prefill.cache, [prefill.row], length=len(prefill.prompt))
            for step in range(2):
                logits = self.decode(fed[:, step], at[:, step], cache, [(0, ROWS, slots)])
            with self._evaluating():
                true = self._uncached(sequences)
        except FORWARD_ERRORS as error:
            raise _refusal(self.model, f"its forward pass fails with a plain KV cache: {error}") from error
        if not bool(torch.isfinite(true).all()):
            raise NotFinite("the model's logits are not finite", where=_family(self.model), fix="check its weights")
        distance = float((logits[: len(true)] - true).norm() / true.norm().clamp(min=1e-9))
        if distance > (0.1 if self.dtype.itemsize == 2 else 1e-3):
            raise _refusal(self.model, f"with a plain KV cache its logits have a relative error of {distance:.1e}")

    def _uncached(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """The logits [S, V] after sequences, from the model's full forward pass on a right-padded batch."""
        ends = torch.tensor([len(sequence) - 1 for sequence in sequences], device=self.device)
        width = int(ends.max()) + 1
        rows = [[*sequence, *[self.pad_id] * (width - len(sequence))] for sequence in sequences]
        positions = torch.arange(width, device=self.device).expand(len(rows), -1)
        with autocast(self.device, self.dtype):
            tokens = torch.tensor(rows, device=self.device)
            hidden: Tensor = backbone(self.model)(tokens, position_ids=positions).last_hidden_state
        return self._logits(hidden[torch.arange(len(rows), device=self.device), ends])


class _Masks:
    """Attention masks in the form a model family expects: one, or one per layer type; additive for `eager`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        config: Any = getattr(model, "config", None)
        if getattr(model, "_is_stateful", False) or getattr(config, "is_encoder_decoder", False):
            raise _refusal(model, "it does not keep one key and one value per token")
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
        """The mask(s) for queries at `positions` [B, L] that read `extent` slots."""
        masks = {}
        for name, window in self.windows.items():
            mask = attention_mask(positions, extent, window=window)
            if self.additive is not None:
                lowest = torch.finfo(self.additive).min
                mask = torch.zeros(mask.shape, dtype=self.additive, device=mask.device).masked_fill(~mask, lowest)
            masks[name] = mask
        return masks if len(masks) > 1 else next(iter(masks.values()))


def _blockwise(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [B, D] @ weight.T on a CPU, one vocabulary block at a time with the weights on the left, which is faster
    without AVX-512 for few rows. Rows are padded to COLUMNS, so that their bits do not depend on each other."""
    count = len(hidden)
    columns = hidden.new_zeros(hidden.shape[1], round_up(count, COLUMNS))
    columns[:, :count] = hidden.t()
    logits = hidden.new_empty(count, len(weight))
    for part, block in zip(logits.split(BLOCK, 1), weight.split(BLOCK), strict=True):
        part.copy_((block @ columns)[:, :count].t())
    return logits


def _turns(
    prompts: Sequence[tuple[int, ...]], known: Iterable[Prefill]
) -> tuple[list[list[int]], dict[int, tuple[int | Prefill, int]]]:
    """The order in which to run prompts, and for each the prefill with which it shares a prefix (one of `known`, or of
    an earlier turn) and its length: at least SHARED, and never the whole prompt, because its last logits are needed."""
    places: dict[tuple[int, tuple[int, ...]], int] = {}  # nodes of a tree with SHARED tokens per edge
    firsts: list[tuple[tuple[int, ...], int | Prefill, int]] = []  # the first prompt there, and its turn

    def grow(prompt: tuple[int, ...], leader: int | Prefill, turn: int) -> None:
        place = -1
        for start in range(0, len(prompt) - SHARED + 1, SHARED):
            place = places.setdefault((place, prompt[start : start + SHARED]), len(firsts))
            if place == len(firsts):
                firsts.append((prompt, leader, turn))

    def first(prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int | Prefill, int] | None:
        place, found = -1, None
        for start in range(0, len(prompt) - SHARED, SHARED):
            if (place := places.get((place, prompt[start : start + SHARED]), -2)) < 0:
                break
            found = firsts[place]
        return found

    for prefill in known:
        grow(prefill.prompt, prefill, 0)
    turns: dict[int, list[int]] = {0: []}
    after: dict[int, tuple[int | Prefill, int]] = {}
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True):
        prompt, turn = prompts[index], 0
        if (found := first(prompt)) is not None:
            other, leader, before = found
            after[index] = (leader, min(common_length(prompt, other), len(prompt) - 1))
            turn = before + 1
        turns.setdefault(turn, []).append(index)
        grow(prompt, index, turn)
    return [turns[turn] for turn in sorted(turns)], after


def _alike(indices: Iterable[int], length: Callable[[int], int]) -> Iterator[list[int]]:
    """Divide prompts into batches of up to PREFILL_TOKENS tokens, including at most a quarter of padding."""
    together: list[int] = []
    width = 0
    for index in sorted(indices, key=length, reverse=True):
        if together and (width * (len(together) + 1) > PREFILL_TOKENS or length(index) < 0.75 * width):
            yield together
            together = []
        if not together:
            width = round_up(length(index), ROWS)
        together.append(index)
    if together:
        yield together


def _family(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _refusal(model: nn.Module, why: str, *, fix: str = "use a decoder with a plain KV cache") -> NovaError:
    return NovaError(f"cannot sample from a {_family(model)} model: {why}", fix=fix)
