"""Steps of decoding that are recorded once and replayed, through CUDA graphs.

On a GPU one step is hundreds of small kernels, and starting each of them takes longer than most of them do; a recording
starts them all at once. It works on fixed memory and fixed shapes. So rows, and the slots that attention reads, are
rounded up to few numbers: rows beyond those asked for are fed something, into parts of the cache that hold nothing, and
slots beyond a row's tokens are hidden by the mask.
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
"""A shape is recorded when it has been asked for so often. What the first steps prepare (programs, workspaces, tables)
must not be part of a recording, and rarer shapes are not worth it."""

LEAST = 128
"""Attention reads this many slots of a cache, or twice as many, and so on."""

EQUAL = 1e-2
"""How far a recording's logits may be from those of the step that it recorded, relative to their norm. The kernels are
the same; a library may sum in another order."""

Step = Callable[[Tensor, Tensor, "KVCache", int], Tensor]
"""Tokens [B], their slots [B], the cache and how many slots are read, to logits [B, V]."""


def records(model: nn.Module) -> bool:
    """Whether steps of `model` are recorded: where its layers are compiled (`compile=true`), on a GPU."""
    return getattr(model, "layers_are_compiled", False) and next(model.parameters()).device.type == "cuda"


class RecordedSteps:
    """`step` for any number of rows, replayed from recordings where a shape comes again and again."""

    def __init__(self, step: Step, reads: Callable[[], Sequence[Tensor]]) -> None:
        """`reads` are tensors beside the cache's and the weights that steps read, and that others may replace."""
        self._step, self._reads, self._recorder = step, reads, Recorder()
        self.forget()

    def forget(self) -> None:
        """Let go of recordings: weights or the cache are elsewhere now."""
        self._seen: Counter[tuple[int, int]] = Counter()
        self._recorded: dict[tuple[int, int], Callable[[], None]] = {}
        self._memory: list[Tensor] = []
        self._logits: Tensor | None = None
        self._recorder.forget()

    def __call__(self, tokens: Tensor, positions: Tensor, cache: KVCache, longest: int) -> Tensor:
        """Logits [B, V] after feeding tokens [B] at slots `positions` [B]; they hold until the next call. `longest` is
        the number of slots that attention must read; rows of the cache from B on hold nothing."""
        memory = [cache.keys[0], *self._reads()]
        if [id(tensor) for tensor in memory] != [id(tensor) for tensor in self._memory]:
            self.forget()
            self._memory = memory  # kept: nobody else's tensors shall lie there meanwhile
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
        """Record a shape by the step that has just run, whose logits were `true`, and see that it gives them again:
        the step writes to the cache what is there already. Where there is no memory for it, steps go on as they are."""
        try:
            if self._logits is None:
                self._logits = true.new_empty(cache.rows, true.shape[1])  # one for all: a vocabulary is wide
            logits = self._logits[: len(true)]
            replay = self._recorder(lambda: logits.copy_(self._run(cache, *shape)))
        except RuntimeError as error:
            if out_of_memory(error):
                return
            raise _refusal(f"a step of decoding cannot be recorded: {first_line(error)}") from error
        logits.zero_()
        replay()
        distance = float((logits - true).norm() / true.norm().clamp(min=1e-9))
        if not distance <= EQUAL and bool(true.isfinite().all()):
            raise _refusal(f"a recorded step's logits are off by a relative {distance:.1e}")
        self._recorded[shape] = replay


class Recorder:
    """Records what a function starts on the GPU, without doing it, and returns what does it."""

    def __init__(self) -> None:
        self._first: torch.cuda.CUDAGraph | None = None
        self._stream: torch.cuda.Stream | None = None

    def forget(self) -> None:
        """The memory of recordings that are gone may go back."""
        self._first = None

    def __call__(self, function: Callable[[], object]) -> Callable[[], None]:
        with suppress(torch.OutOfMemoryError):
            return self._record(function)
        torch.cuda.empty_cache()  # what learning has freed is kept for it, and not given to a recording
        return self._record(function)

    def _record(self, function: Callable[[], object]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self._stream = self._stream or torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        # All recordings share memory; the first is kept, since the memory goes with the last that has it.
        pool = None if self._first is None else self._first.pool()
        # Not `torch.cuda.graph`, which collects garbage and gives the learner's free memory back each time.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                function()
            except BaseException:
                with suppress(RuntimeError):  # a recording that broke does not end well either, and says less of why
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._first = self._first or graph
        return graph.replay


def _doubling(count: int, least: int) -> int:
    """`least`, or twice as many, and so on: the first that is at least `count`."""
    size = least
    while size < count:
        size *= 2
    return size


def _refusal(why: str) -> NovaError:
    return NovaError(why, where="sampling with compile=true", fix=WITHOUT)
