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
    chunk: int = 1024,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`logits_logprobs(hidden @ weight.T + bias, targets, temperature)` in O(chunk * V) memory.

    hidden [N, D], weight [V, D], targets [N] int64, bias [V] or None; returns (logp [N], entropy [N]) in nats, both
    differentiable in hidden, weight and bias (once). The rows are processed `chunk` at a time through one or two
    scratch tensors [chunk, V]; the backward pass computes each chunk's logits once more instead of keeping them, turns
    them in place into the logits' gradient

        dz_j = g (1[j = target] - p_j) - g_H p_j (log p_j + H),      z = logits / temperature,

    and adds its product with the hidden states to the weight's gradient in place. That is four matrix products where
    the plain way takes three, against [N, V] never written, read or kept.

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
    chunk: int = 1024,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunked_logprobs` and, from the same pass, max_j log p_j [N] without a gradient.

    Where logp equals it, the target is (one of) the most likely: the greedy choice.
    """
    _check_temperature(temperature)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    hidden = hidden.to(weight.dtype)
    logp, entropy, best = _ChunkedLogprobs.apply(hidden, weight, bias, targets, temperature, chunk)  # type: ignore[no-untyped-call]
    return logp, entropy, best


class _ChunkedLogprobs(torch.autograd.Function):
    """Keeps hidden, weight and three numbers a token (target, log-normaliser, entropy) for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # an unused entropy arrives as None, and its half of the work is left out
        ctx.temperature, ctx.chunk = temperature, chunk
        wide = _accumulator(weight.dtype)
        logp, entropy, log_norm, best = hidden.new_empty(4, len(targets), dtype=wide)
        z_scratch, exp_scratch = _scratch(hidden, weight, chunk), _scratch(hidden, weight, chunk)
        for rows, size in _chunks(len(targets), chunk):
            z, exp = z_scratch[:size], exp_scratch[:size]
            _logits_into(z, hidden[rows], weight, bias, temperature)
            top = z.amax(-1, keepdim=True)
            z.sub_(top)
            torch.exp(z, out=exp)
            total = exp.sum(-1)
            log_total = total.log()
            log_norm[rows] = log_total + top.squeeze(-1)
            best[rows] = -log_total
            logp[rows] = z.gather(-1, targets[rows, None]).squeeze(-1) - log_total
            entropy[rows] = log_total - exp.mul_(z).sum(-1) / total
        ctx.save_for_backward(hidden, weight, bias, targets, log_norm, entropy)
        ctx.mark_non_differentiable(best)
        return logp, entropy, best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_norm, entropy = ctx.saved_tensors
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        wide = _accumulator(weight.dtype)
        # The chain rule's 1 / temperature, on [N] rather than on [N, V].
        g = (torch.zeros_like(log_norm) if grad_logp is None else grad_logp) / ctx.temperature
        g_entropy = None if grad_entropy is None else grad_entropy / ctx.temperature
        d_hidden = torch.empty_like(hidden) if want_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide) if want_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if want_bias else None
        z_scratch = _scratch(hidden, weight, ctx.chunk)
        p_scratch = None if g_entropy is None else torch.empty_like(z_scratch)
        for rows, size in _chunks(len(targets), ctx.chunk):
            z = z_scratch[:size]
            _logits_into(z, hidden[rows], weight, bias, ctx.temperature)
            z.sub_(log_norm[rows, None])
            if g_entropy is None or p_scratch is None:
                z.exp_().mul_(-g[rows, None])
            else:
                p = torch.exp(z, out=p_scratch[:size])
                z.add_(entropy[rows, None]).mul_(-g_entropy[rows, None]).sub_(g[rows, None]).mul_(p)
            z.scatter_add_(-1, targets[rows, None], g[rows, None])
            dz = z.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(dz, weight, out=d_hidden[rows])
            if d_weight is not None:
                _add_product(d_weight, dz.T, hidden[rows])
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
    return hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0], dtype=_accumulator(weight.dtype))


def _logits_into(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> None:
    if out.dtype == weight.dtype:
        torch.mm(hidden, weight.T, out=out)
    else:
        out.copy_(torch.mm(hidden, weight.T))
    if bias is not None:
        out.add_(bias)
    if temperature != 1.0:
        out.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without a tensor for the product where the dtypes allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))
