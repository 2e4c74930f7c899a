"""Decoding steps captured as CUDA graphs and replayed.

On a GPU one step consists of hundreds of small kernels whose launches take longer than most of them run; a graph
launches them all at once. Graphs need fixed memory and shapes, so the numbers of rows and of slots read are rounded up:
padding rows write to unused parts of the cache, and slots beyond a row's tokens are masked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.core.memory import first_line, out_of_memory
from novarl.models.compiled import WITHOUT

if TYPE_CHECKING:
    from novarl.engines.local.kv_cache import KVCache

OFTEN = 4
"""A shape is captured after this many uses: what the first steps prepare (workspaces, tables) must not be captured."""

LEAST = 128
"""The minimum number of slots attention reads; larger numbers are this times a power of two."""

EQUAL = 1e-2
"""Tolerated relative difference between the logits of a graph and the captured step: the order of sums may differ."""

Step = Callable[[Tensor, Tensor, "KVCache", int], Tensor]
"""From tokens [B], their slots [B], the cache and the number of slots read to logits [B, V]."""


def records(model: nn.Module) -> bool:
    """Whether steps of `model` are captured: on a GPU, if its layers are compiled (`compile=true`)."""
    return getattr(model, "layers_are_compiled", False) and next(model.parameters()).device.type == "cuda"


class RecordedSteps:
    """`step` for any number of rows, replayed from CUDA graphs for frequent shapes."""

    def __init__(self, step: Step, reads: Callable[[], Sequence[Tensor]]) -> None:
        """`reads` returns tensors, besides the cache and the weights, that steps read and that may be replaced."""
        self._step, self._reads, self._recorder = step, reads, Recorder()
        self.forget()

    def forget(self) -> None:
        """Discard all graphs, because weights or the cache have moved."""
        self._seen: Counter[tuple[int, int]] = Counter()
        self._recorded: dict[tuple[int, int], Callable[[], None]] = {}
        self._memory: list[Tensor] = []
        self._logits: Tensor | None = None
        self._recorder.forget()

    def __call__(self, tokens: Tensor, positions: Tensor, cache: KVCache, longest: int) -> Tensor:
        """Logits [B, V] after feeding tokens [B] at slots `positions` [B]; valid until the next call. `longest` is the
        number of slots that attention must read; cache rows from B on are unused."""
        memory = [cache.keys[0], *self._reads()]
        if [id(tensor) for tensor in memory] != [id(tensor) for tensor in self._memory]:
            self.forget()
            self._memory = memory  # kept so that the memory is not reused
            self._fed = tokens.new_zeros(2, cache.rows)
        count = len(tokens)
        shape = rows, slots = min(_doubling(count, 1), cache.rows), min(_doubling(longest, LEAST), cache.capacity)
        self._fed[0, :count], self._fed[1, :count] = tokens, positions
        self._seen[shape] += 1
        if shape not in self._recorded:
            logits = self._run(cache, rows, slots)
            if self._seen[shape] == OFTEN:
                self._record(cache, shape, logits)
            return logits[:count]
        self._recorded[shape]()
        assert self._logits is not None
        return self._logits[:count]

    def _run(self, cache: KVCache, rows: int, slots: int) -> Tensor:
        return self._step(self._fed[0, :rows], self._fed[1, :rows], cache, slots)

    def _record(self, cache: KVCache, shape: tuple[int, int], true: Tensor) -> None:
        """Capture the step that has just run, whose logits were `true`, and check that the graph reproduces them; it
        writes the same values to the cache. Without enough memory, nothing is captured."""
        try:
            if self._logits is None:
                self._logits = true.new_empty(
                    cache.rows, true.shape[1]
                )  # shared by all graphs, because the vocabulary is large
            logits = self._logits[: len(true)]
            replay = self._recorder(lambda: logits.copy_(self._run(cache, *shape)))
        except RuntimeError as error:
            if out_of_memory(error):
                return
            raise _refusal(f"the decoding step cannot be captured as a CUDA graph: {first_line(error)}") from error
        logits.zero_()
        replay()
        distance = float((logits - true).norm() / true.norm().clamp(min=1e-9))
        if not distance <= EQUAL and bool(true.isfinite().all()):
            raise _refusal(f"the logits of the CUDA graph have a relative error of {distance:.1e}")
        self._recorded[shape] = replay


class Recorder:
    """Captures the GPU work of a function without running it, and returns a function that replays it."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    def forget(self) -> None:
        """Release the memory of discarded graphs."""
        self._first = None

    def __call__(self, function: Callable[[], object]) -> Callable[[], None]:
        with suppress(torch.OutOfMemoryError):
            return self._record(function)
        torch.cuda.empty_cache()  # memory cached for training is not available to a graph
        return self._record(function)

    def _record(self, function: Callable[[], object]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        # All graphs share a memory pool; the first is kept so that the pool survives.
        pool = None if self._first is None else self._first.pool()
        # Not `torch.cuda.graph`, which collects garbage and empties the learner's memory cache each time.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):  # ending a failed capture fails too, with a less useful message
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._first = self._first or graph
        return graph.replay


def _doubling(count: int, least: int) -> int:
    """The first of `least`, 2 `least`, 4 `least`, ... that is at least `count`."""
    size = least
    while size < count:
        size *= 2
    return size


def _refusal(why: str) -> NovaError:
    return NovaError(why, where="sampling with compile=true", fix=WITHOUT)
