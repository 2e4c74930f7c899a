"""Log-probabilities of chosen tokens and the entropy of the distribution they were chosen from.

`logits_logprobs` is the definition; `chunked_logprobs` computes the same from hidden states and the head's weight,
without ever allocating a tensor [tokens, vocabulary], in the forward or the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from novarl.algos.support import Support, impossible
from novarl.kernels.accumulation import Total, spare_memory, total_of
from novarl.kernels.products import FULL, full_rows, is_fast, times

_HALF = (torch.bfloat16, torch.float16)

TILE = 1 << 19
"""Elements that fit in the processor cache together with a copy: 2 MiB of float32."""

WIDE, LINE, PAGE = 1 << 13, 16, 1 << 10
"""Float32 numbers: the least columns for which the layout of a matrix is chosen, those of a cache line and of 4 KiB."""

LOGITS = 1 << 26
"""The default number of logits held in memory at once: 256 MiB of float32."""

SLICE = 2080
"""Columns per oneDNN product: the result stays in the cache, and its stride is no multiple of 4 KiB."""


IMPOSSIBLE = -1e30
"""The logit of a token outside the support: its probability is exactly 0, and its logarithm is finite."""


def logits_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, *, support: Support | None = None
) -> tuple[Tensor, Tensor]:
    """log p(targets) and the entropy of p = softmax(logits / temperature), in nats.

        logp = z_target - logsumexp(z),   H = -sum_j p_j log p_j,   z = logits / temperature

    logits [..., V] (finite), targets [...] int64; returns (logp, entropy), each [...], in the dtype of the logits
    (float32 for 16-bit ones). With a `support` (logits [N, V]) the sums run over each row's possible tokens only.
    Raises ValueError if the temperature is not positive.
    """
    _check_temperature(temperature)
    z = logits.float() if logits.dtype in _HALF else logits
    z = z / temperature
    if support is not None:
        z = _cut(z.clone(), support, 0)
    log_p = torch.log_softmax(z, dim=-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    bias: Tensor | None = None,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """`logits_logprobs(hidden @ weight.T + bias, targets, temperature, support=support)` in O(chunk * V) memory.

    hidden [N, D], weight [V, D], targets [N] int64, bias [V] or None, support of N rows or None; returns (logp [N],
    entropy [N]) in nats, both differentiable (once) in hidden, weight and bias, with the support held fixed. The rows
    are processed `chunk` at a time (None: as many as have `LOGITS` logits) in one scratch tensor [chunk, V]. The last
    chunk is kept for the backward pass, which recomputes the logits of all other chunks and replaces them in place by
    the gradient

        dz_j = g (1[j = target] - p_j) - g_H p_j (log p_j + H),      z = logits / temperature.

    The products run in the weight's dtype; everything after them, and the sums over chunks, in at least float32, which
    is also the dtype of the result (float64 for float64). Logits must be finite: mask a row of the vocabulary with a
    large negative bias, not with -inf. Raises ValueError if temperature or chunk is not positive.
    """
    logp, entropy, _ = chunked_scores(
        hidden, weight, targets, temperature=temperature, chunk=chunk, bias=bias, support=support
    )
    return logp, entropy


def chunked_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    bias: Tensor | None = None,
    support: Support | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunked_logprobs` and, from the same pass, max_j log p_j [N] without a gradient.

    Where logp equals it, the target is (one of) the most likely, i.e. the greedy choice.
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
        if support is not None:
            support = support._replace(cu_words=torch.cat([support.cu_words, support.cu_words[-1:].expand(idle)]))
    kind = _FastHead if fast else _Head
    given = (hidden, weight, bias, targets, temperature, chunk, kind, total_of(weight), support)
    found = _ChunkedLogprobs.apply(*given)  # type: ignore[no-untyped-call]
    logp, entropy, best = (column[:count] for column in found)
    return logp, entropy, best


class _ChunkedLogprobs(torch.autograd.Function):
    """Saves hidden, weight, target and entropy per token, and the last chunk's p for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        kind: type[_Head],
        total: Total | None,
        support: Support | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # the gradient of an unused entropy is None, and its computation is skipped
        ctx.temperature, ctx.chunk, ctx.kind, ctx.total, ctx.support = temperature, chunk, kind, total, support
        logp, entropy, best = hidden.new_empty(3, len(targets), dtype=_accumulator(weight.dtype))
        head = kind(weight, min(chunk, len(targets)))
        z = None
        for rows in _chunks(len(targets), chunk):
            z = None  # before there is another
            z = head.logits(hidden[rows])
            for tile in _tiles(z):
                here = _scale(z[tile], bias, temperature)
                if support is not None:
                    _cut(here, support, rows.start + tile.start)
                here.sub_(here.amax(-1, keepdim=True))
                chosen = here.gather(-1, targets[rows][tile, None]).squeeze(-1)
                odds = here.exp()
                mass = odds.sum(-1)
                log_mass = mass.log()
                logp[rows][tile], best[rows][tile] = chosen - log_mass, -log_mass
                entropy[rows][tile] = log_mass - here.mul_(odds).sum(-1) / mass
                torch.mul(odds, mass.reciprocal()[:, None], out=here)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.kept = None
        if any(ctx.needs_input_grad):
            ctx.kept = head, z
        else:
            head.release()
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
        d_weight = None
        if want_weight:
            fresh = ctx.total is None
            d_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if fresh else ctx.total.so_far()
        # The last chunk kept from the forward pass is used once: it is overwritten by the gradient.
        kept, ctx.kept = ctx.kept, None
        head, z = kept or (ctx.kind(weight, min(ctx.chunk, len(targets))), None)
        for rows in reversed(list(_chunks(len(targets), ctx.chunk))):
            if z is None:
                z = head.logits(hidden[rows])
                for tile in _tiles(z):
                    here = _scale(z[tile], bias, ctx.temperature)
                    if ctx.support is not None:
                        _cut(here, ctx.support, rows.start + tile.start)
                    z[tile] = torch.softmax(here, -1)
            for tile in _tiles(z):
                here = z[tile]
                if g_entropy is None:
                    here.mul_(-g[rows][tile, None])
                else:
                    by_entropy = torch.xlogy(here, here).addcmul_(here, entropy[rows][tile, None])
                    here.mul_(-g[rows][tile, None]).addcmul_(by_entropy, g_entropy[rows][tile, None], value=-1.0)
            z.scatter_add_(-1, targets[rows, None], g[rows, None])
            if d_bias is not None:
                d_bias.add_(z.sum(0))
            head.back(z.to(weight.dtype), hidden[rows], None if d_hidden is None else d_hidden[rows], d_weight)
            z = None
        head.release()
        return (
            d_hidden,
            None if d_weight is None or ctx.total is not None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
            None,
        )


class _Head:
    """The products of a chunk with the head's weight [V, D]."""

    def __init__(self, weight: Tensor, rows: int) -> None:
        self._weight, self._rows = weight, rows
        self._scratch: Tensor | None = None
        self._spare = spare_memory(weight.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden @ weight.T [R, V], in one buffer for all chunks and passes: new memory would cost page faults."""
        z = self._place(len(hidden))
        if z.dtype == self._weight.dtype:
            return torch.mm(hidden, self._weight.T, out=z)
        return z.copy_(torch.mm(hidden, self._weight.T))

    def _place(self, rows: int) -> Tensor:
        """The buffer for the logits of a chunk of `rows` rows."""
        if self._scratch is None:
            self._scratch = self._room()
        return self._scratch[:rows, : len(self._weight)]

    def _room(self) -> Tensor:
        """A suitable buffer left by an earlier pass."""
        left = self._spare.pop() if self._spare else None
        shape, dtype = (self._rows, _row_stride(len(self._weight))), _accumulator(self._weight.dtype)
        if left is not None and len(left) >= shape[0] and left.shape[1] == shape[1] and left.dtype == dtype:
            return left
        return self._weight.new_empty(shape, dtype=dtype)

    def release(self) -> None:
        """Keep the buffer for the next pass."""
        if self._scratch is not None:
            self._spare.append(self._scratch)
            self._scratch = None

    def back(self, dz: Tensor, hidden: Tensor, d_hidden: Tensor | None, d_weight: Tensor | None) -> None:
        """A chunk's gradients, from those in its logits: d_hidden = dz @ weight, d_weight += dz.T @ hidden."""
        if d_hidden is not None:
            torch.mm(dz, self._weight, out=d_hidden)
        if d_weight is None:
            return
        if d_weight.dtype == dz.dtype:
            d_weight.addmm_(dz.T, hidden)
        else:
            d_weight.add_(torch.mm(dz.T, hidden))


class _FastHead(_Head):
    """The same with oneDNN, one slice of the vocabulary at a time: small allocations are reused."""

    def logits(self, hidden: Tensor) -> Tensor:
        if len(self._weight) <= SLICE:
            return times(hidden, self._weight)
        z = self._place(len(hidden))
        for columns in _chunks(len(self._weight), SLICE):
            z[:, columns] = times(hidden, self._weight[columns])
        return z

    def back(self, dz: Tensor, hidden: Tensor, d_hidden: Tensor | None, d_weight: Tensor | None) -> None:
        # With the vocabulary as rows, all of dz would have to be transposed; instead the product is, one slice at a
        # time.
        wide = hidden.t().contiguous()
        if d_hidden is not None:
            d_hidden.zero_()
        for columns in _chunks(len(self._weight), SLICE):
            here = dz[:, columns].contiguous()
            if d_hidden is not None:
                d_hidden.add_(times(here, self._weight[columns].t()))
            if d_weight is not None:
                d_weight[columns].add_(times(wide, here.t()).t())


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


def _chunks(total: int, chunk: int) -> Iterator[slice]:
    """The rows (of a weight: the columns of logits) of each chunk."""
    for start in range(0, total, chunk):
        yield slice(start, min(start + chunk, total))


def _row_stride(columns: int) -> int:
    """The row stride for fast CPU products: whole cache lines, plus one more if the stride would be a multiple of 4
    KiB, at which all rows compete for the same cache lines."""
    if columns < WIDE:
        return columns
    stride = -(-columns // LINE) * LINE
    return stride + LINE if stride % PAGE == 0 else stride


def _tiles(chunk: Tensor) -> Iterator[slice]:
    """Slices of a few rows of a chunk: `TILE` elements, or one row."""
    return _chunks(len(chunk), max(1, TILE // max(1, chunk.shape[1])))


def _scale(logits: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(logits + bias) / temperature, in place."""
    if bias is not None:
        logits.add_(bias)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _cut(z: Tensor, support: Support, first: int) -> Tensor:
    """Set the logits of the rows from `first` on to `IMPOSSIBLE` outside their supports, in place."""
    outside = impossible(support, first, first + len(z), z.shape[1])
    return z.masked_fill_(outside, IMPOSSIBLE)
