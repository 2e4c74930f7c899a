"""Log-probabilities of chosen tokens and the entropy of the distribution they were chosen from.

`logits_logprobs` is the definition; `chunked_logprobs` computes the same from hidden states and the head's weight, so
that no tensor [tokens, vocabulary] ever exists, neither in the forward nor in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_HALF = (torch.bfloat16, torch.float16)

TILE = 1 << 19
"""Numbers that stay in a processor's cache beside a copy: 2 MiB of float32."""

WIDE, LINE, PAGE = 1 << 13, 16, 1 << 10
"""Float32 numbers: the least columns for which the layout of a matrix is chosen, those of a cache line and of 4 KiB."""

LOGITS = 1 << 26
"""Logits that exist at a time where nobody says for how many rows: 256 MiB of float32."""


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
    hidden = hidden.to(weight.dtype)
    logp, entropy, best = _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, chunk)  # type: ignore[no-untyped-call]
    return logp, entropy, best


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps hidden, weight, two numbers a token (target, entropy) and the last chunk's p for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an unused entropy arrives as None, and its half of the work is left out
        ctx.temperature, ctx.chunk = temperature, chunk
        logp, entropy, best = hidden.new_empty(3, len(targets), dtype=_accumulator(weight.dtype))
        scratch = _scratch(hidden, weight, chunk)
        for rows, size in _chunks(len(targets), chunk):
            z = scratch[:size]
            _product_into(z, hidden[rows], weight)
            for tile in _tiles(z):
                here = _scaled(z[tile], bias, temperature)
                here.sub_(here.amax(-1, keepdim=True))
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
        d_weight = torch.empty_like(weight, dtype=wide) if want_weight else None
        if d_weight is not None and not len(targets):
            d_weight.zero_()  # no product is there to fill it
        d_bias = torch.zeros_like(bias, dtype=wide) if want_bias else None
        # What the forward pass left in the scratch tensor serves once: here it becomes the gradient.
        kept, ctx.kept = ctx.kept, None
        scratch = _scratch(hidden, weight, ctx.chunk) if kept is None else kept
        for turn, (rows, size) in enumerate(reversed(list(_chunks(len(targets), ctx.chunk)))):
            z = scratch[:size]
            if kept is None:
                _product_into(z, hidden[rows], weight)
            for tile in _tiles(z):
                here = z[tile]
                if kept is None:
                    here.copy_(torch.softmax(_scaled(here, bias, ctx.temperature), -1))
                if g_entropy is None:
                    here.mul_(-g[rows][tile, None])
                else:
                    by_entropy = torch.xlogy(here, here).addcmul_(here, entropy[rows][tile, None])
                    here.mul_(-g[rows][tile, None]).addcmul_(by_entropy, g_entropy[rows][tile, None], value=-1.0)
            kept = None
            z.scatter_add_(-1, targets[rows, None], g[rows, None])
            dz = z.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(dz, weight, out=d_hidden[rows])
            if d_weight is not None:
                _put_product(d_weight, dz.T, hidden[rows], add=turn > 0)
            if d_bias is not None:
                d_bias.add_(z.sum(0))
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
        )


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


def _scratch(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """One [chunk, V] for all chunks: a fresh one each time costs more in page faults than the arithmetic on it."""
    rows, vocabulary = min(chunk, hidden.shape[0]), weight.shape[0]
    stride = _row_stride(vocabulary)
    return hidden.new_empty(rows, stride, dtype=_accumulator(weight.dtype))[:, :vocabulary]


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


def _product_into(out: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """out = hidden @ weight.T, multiplied in the weight's dtype."""
    if out.dtype == weight.dtype:
        torch.mm(hidden, weight.T, out=out)
    else:
        out.copy_(torch.mm(hidden, weight.T))


def _scaled(logits: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(logits + bias) / temperature, in place."""
    if bias is not None:
        logits.add_(bias)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _put_product(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """out = left @ right, or out += left @ right, without a tensor for the product where the dtypes allow it."""
    if out.dtype != left.dtype:
        product = torch.mm(left, right)
        _ = out.add_(product) if add else out.copy_(product)
    elif add:
        out.addmm_(left, right)
    else:
        torch.mm(left, right, out=out)
