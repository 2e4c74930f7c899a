"""Log-probabilities of chosen tokens and the entropy of the distribution they were chosen from.

`logits_logprobs` is the definition; `chunked_logprobs` computes the same from hidden states and the head's weight, so
that no tensor [tokens, vocabulary] ever exists, neither in the forward nor in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from novarl.algos.products import FULL, full_rows, is_fast, pack, times

_HALF = (torch.bfloat16, torch.float16)

TILE = 1 << 19
"""Numbers that stay in a processor's cache beside a copy: 2 MiB of float32."""

WIDE, LINE, PAGE = 1 << 13, 16, 1 << 10
"""Float32 numbers: the least columns for which the layout of a matrix is chosen, those of a cache line and of 4 KiB."""

LOGITS = 1 << 26
"""Logits that exist at a time where nobody says for how many rows: 256 MiB of float32."""

BLOCK = 128
"""Rows that oneDNN multiplies by a large vocabulary at a time, so that their logits stay in the cache."""


def logits_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log p(targets) and the entropy of p = softmax(logits / temperature), in nats.

        logp = z_target - logsumexp(z),   H = -sum_j p_j log p_j,   z = logits / temperature

    logits [..., V] (finite), targets [...] int64; returns (logp, entropy), each [...], in the dtype of the logits
    (float32 for 16-bit ones). ValueError if the temperature is not positive: greedy decoding has no log-probabilities.
    """
    _check_temperature(temperature)
    z = logits.float() if logits.dtype in _HALF else logits
    log_p = torch.log_softmax(z / temperature, dim=-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`logits_logprobs(hidden @ weight.T + bias, targets, temperature)` in O(chunk * V) memory.

    hidden [N, D], weight [V, D], targets [N] int64, bias [V] or None; returns (logp [N], entropy [N]) in nats, both
    differentiable in hidden, weight and bias (once). The rows are processed `chunk` at a time (None: as many as have
    `LOGITS` logits) in one scratch tensor [chunk, V]. The last chunk stays there for the backward pass, which computes
    every other chunk's logits once more, and turns them in place into the logits' gradient

        dz_j = g (1[j = target] - p_j) - g_H p_j (log p_j + H),      z = logits / temperature,

    and adds its product with the hidden states to the weight's gradient in place. That is three matrix products, as
    in the plain way, for the last chunk (often the only one) and four for the others, against [N, V] never written,
    read or kept. What is done element by element goes through a few rows at a time, which stay in the cache.

    The products run in the weight's dtype; everything after them, and the sums over chunks, in at least float32, which
    is then what comes back (float64 for float64). Logits must be finite: mask a row of the vocabulary with a large
    negative bias, not with -inf. ValueError if temperature or chunk is not positive.
    """
    logp, entropy, _ = chunked_scores(hidden, weight, targets, temperature=temperature, chunk=chunk, bias=bias)
    return logp, entropy


def chunked_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunked_logprobs` and, from the same pass, max_j log p_j [N] without a gradient.

    Where logp equals it, the target is (one of) the most likely: the greedy choice.
    """
    _check_temperature(temperature)
    if chunk is None:
        chunk = max(1, LOGITS // weight.shape[0])
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    hidden, count = hidden.to(weight.dtype), len(targets)
    fast = chunk >= FULL and is_fast(hidden, weight)
    if fast:
        chunk = chunk // FULL * FULL
        last = count % chunk
        idle = full_rows(last) - last
        hidden, targets = F.pad(hidden, (0, 0, 0, idle)), F.pad(targets, (0, idle))
    found = _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, chunk, fast)  # type: ignore[no-untyped-call]
    logp, entropy, best = (column[:count] for column in found)
    return logp, entropy, best


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps hidden, weight, two numbers a token (target, entropy) and the last chunk's p for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        fast: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an unused entropy arrives as None, and its half of the work is left out
        ctx.temperature, ctx.chunk, ctx.fast = temperature, chunk, fast
        logp, entropy, best = hidden.new_empty(3, len(targets), dtype=_accumulator(weight.dtype))
        head = (_FastHead if fast else _Head)(weight)
        scratch = head.scratch(min(chunk, len(targets)))
        for rows, size in _chunks(len(targets), chunk):
            z = scratch[:size]
            for tile, logits in head.logits(hidden[rows], z):
                _scale(logits, bias, temperature)
                here = torch.sub(logits, logits.amax(-1, keepdim=True), out=z[tile])
                chosen = here.gather(-1, targets[rows][tile, None]).squeeze(-1)
                odds = here.exp()
                mass = odds.sum(-1)
                log_mass = mass.log()
                logp[rows][tile], best[rows][tile] = chosen - log_mass, -log_mass
                entropy[rows][tile] = log_mass - here.mul_(odds).sum(-1) / mass
                torch.mul(odds, mass.reciprocal()[:, None], out=here)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.kept = scratch
        ctx.mark_non_differentiable(best)
        return logp, entropy, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        wide = _accumulator(weight.dtype)
        # The chain rule's 1 / temperature, on [N] rather than on [N, V].
        g = (torch.zeros_like(entropy) if grad_logp is None else grad_logp) / ctx.temperature
        g_entropy = None if grad_entropy is None else grad_entropy / ctx.temperature
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_bias = torch.zeros_like(bias, dtype=wide) if want_bias else None
        head = (_FastHead if ctx.fast else _Head)(weight)
        # What the forward pass left in the scratch tensor serves once: here it becomes the gradient.
        kept, ctx.kept = ctx.kept, None
        scratch = head.scratch(min(ctx.chunk, len(targets))) if kept is None else kept
        for rows, size in reversed(list(_chunks(len(targets), ctx.chunk))):
            z = scratch[:size]
            if kept is None:
                for tile, logits in head.logits(hidden[rows], z):
                    z[tile] = torch.softmax(_scale(logits, bias, ctx.temperature), -1)
            kept = None
            for tile in _tiles(z):
                here = z[tile]
                if g_entropy is None:
                    here.mul_(-g[rows][tile, None])
                else:
                    by_entropy = torch.xlogy(here, here).addcmul_(here, entropy[rows][tile, None])
                    here.mul_(-g[rows][tile, None]).addcmul_(by_entropy, g_entropy[rows][tile, None], value=-1.0)
            z.scatter_add_(-1, targets[rows, None], g[rows, None])
            dz = z.to(weight.dtype)
            if d_hidden is not None:
                head.back(dz, d_hidden[rows])
            if want_weight:
                head.add_gradient(dz, hidden[rows])
            if d_bias is not None:
                d_bias.add_(z.sum(0))
        return (
            d_hidden,
            head.gradient().to(weight.dtype) if want_weight else None,
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


class _Head:
    """The products of a chunk with the head's weight [V, D], and the sum of the gradient in it."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._sum: Tensor | None = None

    def scratch(self, rows: int) -> Tensor:
        """One [rows, V] for all chunks: a fresh one each time costs more in page faults than the arithmetic on it."""
        vocabulary = len(self._weight)
        shape = rows, _row_stride(vocabulary)
        return self._weight.new_empty(shape, dtype=_accumulator(self._weight.dtype))[:, :vocabulary]

    def logits(self, hidden: Tensor, z: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """hidden @ weight.T a tile at a time, each with its rows; z [R, V] is memory that may be used for them."""
        if z.dtype == self._weight.dtype:
            torch.mm(hidden, self._weight.T, out=z)
        else:
            z.copy_(torch.mm(hidden, self._weight.T))
        for tile in _tiles(z):
            yield tile, z[tile]

    def back(self, dz: Tensor, out: Tensor) -> None:
        """out = dz @ weight, the gradient in the hidden states."""
        torch.mm(dz, self._weight, out=out)

    def add_gradient(self, dz: Tensor, hidden: Tensor) -> None:
        """Add a chunk's gradient in the weight, without a tensor for the product where the dtypes allow it."""
        if self._sum is None:
            self._sum = torch.mm(dz.T, hidden).to(_accumulator(dz.dtype))
        elif self._sum.dtype == dz.dtype:
            self._sum.addmm_(dz.T, hidden)
        else:
            self._sum.add_(torch.mm(dz.T, hidden))

    def gradient(self) -> Tensor:
        """The gradient in the weight [V, D]."""
        if self._sum is None:  # there were no tokens
            return torch.zeros_like(self._weight, dtype=_accumulator(self._weight.dtype))
        return self._sum


class _FastHead(_Head):
    """The same through oneDNN, which writes its products to memory of its own and wants z without gaps.

    The weight is packed for the logits. Its gradient is summed transposed: with the vocabulary as rows, it would have
    to copy all of z.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self._packed: Tensor | None = None

    def scratch(self, rows: int) -> Tensor:
        return self._weight.new_empty(rows, len(self._weight))

    def logits(self, hidden: Tensor, z: Tensor) -> Iterator[tuple[slice, Tensor]]:
        if self._packed is None:
            self._packed = pack(self._weight)
        block = max(BLOCK, TILE // len(self._weight) // FULL * FULL)
        for start in range(0, len(hidden), block):
            found = times(hidden[start : start + block], self._packed)
            for tile in _tiles(found):
                yield slice(start + tile.start, start + min(tile.stop, len(found))), found[tile]

    def back(self, dz: Tensor, out: Tensor) -> None:
        out.copy_(times(dz, self._weight.t()))

    def add_gradient(self, dz: Tensor, hidden: Tensor) -> None:
        found = times(hidden.t(), dz.t())
        self._sum = found if self._sum is None else self._sum.add_(found)

    def gradient(self) -> Tensor:
        return super().gradient() if self._sum is None else self._sum.t()


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _chunks(total: int, chunk: int) -> Iterator[tuple[slice, int]]:
    """The rows of each chunk and how many they are."""
    for start in range(0, total, chunk):
        stop = min(start + chunk, total)
        yield slice(start, stop), stop - start


def _row_stride(columns: int) -> int:
    """How far apart the rows of a matrix begin so that a CPU multiplies it fast. Many columns are padded to whole cache
    lines, and by one more where rows would lie a multiple of 4 KiB apart: all would share a few lines of the cache."""
    if columns < WIDE:
        return columns
    stride = -(-columns // LINE) * LINE
    return stride + LINE if stride % PAGE == 0 else stride


def _tiles(chunk: Tensor) -> Iterator[slice]:
    """A few rows of a chunk at a time, `TILE` numbers or one row."""
    rows = max(1, TILE // max(1, chunk.shape[1]))
    for start in range(0, chunk.shape[0], rows):
        yield slice(start, start + rows)


def _scale(logits: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(logits + bias) / temperature, in place."""
    if bias is not None:
        logits.add_(bias)
    return logits if temperature == 1.0 else logits.div_(temperature)
