"""The packed forward pass: from sequences on a flat axis to hidden states or log-probabilities on the same axis.

Three layouts give the same numbers. "packed" runs the flat axis as one row without padding, with attention restricted
to each sequence. "shared" also computes common prefixes of neighbouring sequences only once (`kernels.prefix`).
"padded" right-pads the sequences to a batch and uses the model's own attention, which every model family supports.
"auto" is "shared" if the model supports packing, otherwise "padded".
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from novarl.algos.support import Support
from novarl.core.errors import NovaError
from novarl.kernels.attention import PACKING_ATTENTION
from novarl.kernels.logprobs import chunked_scores, logits_logprobs
from novarl.kernels.packing import Kernel, packing_of
from novarl.kernels.prefix import Group, find_groups, unique_places
from novarl.kernels.products import full_rows, is_fast
from novarl.models.plain import PlainModel
from novarl.models.transformer import Decoder

Layout = Literal["auto", "shared", "packed", "padded"]


class Packed(Protocol):
    """The columns of a batch that a forward pass reads; see `core.types.Batch`."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def position_ids(self) -> Tensor: ...
    @property
    def prev(self) -> Tensor: ...
    @property
    def cu_seqlens(self) -> Tensor: ...


def packs(model: nn.Module) -> bool:
    """Whether `model` supports packed sequences: the built-in decoder does; others are checked when they are loaded."""
    if isinstance(model, Decoder):
        return True
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == PACKING_ATTENTION


def shares(model: nn.Module, layout: Layout = "auto") -> bool:
    """Whether shared prefixes are computed once in this layout."""
    return layout in ("auto", "shared") and packs(model)


def kernel_of(model: nn.Module) -> Kernel:
    """The packed attention kernel of `model`, chosen when it was loaded (`attention.choose_kernel`)."""
    kernel: Kernel = getattr(model, "packed_kernel", "sdpa")
    return kernel


def attention_of(model: nn.Module) -> str:
    """The attention implementation used in training: the packed kernel, or the transformers name of the model's own."""
    if isinstance(model, PlainModel):
        return "own"
    return kernel_of(model) if packs(model) else str(model.config._attn_implementation)  # type: ignore[union-attr]


def modules_of(model: nn.Module) -> str:
    """The modules that compute the model: "built-in" (also for adopted model families) or a transformers class."""
    if isinstance(model, PlainModel):
        return type(model.module).__name__
    return "built-in" if isinstance(model, Decoder) else type(model).__name__


def vocabulary_of(model: nn.Module) -> int:
    """The number of tokens that the model has logits for."""
    return model.vocabulary if isinstance(model, PlainModel) else head(model)[0].size(0)


def backbone(model: nn.Module) -> nn.Module:
    """The module from token ids to hidden states, called as `(input_ids=, position_ids=, ...).last_hidden_state`."""
    return model if isinstance(model, Decoder | PlainModel) else model.base_model  # type: ignore[return-value]


def head(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [V, D] and bias [V] (or None) of the head: logits are hidden @ weight.T + bias. Raises NovaError for a
    user's plain module, which returns only logits."""
    if isinstance(model, PlainModel):
        what = f"{type(model.module).__name__} returns logits but no hidden states, which critics and value heads need"
        raise NovaError(what, where="model", fix="use an algorithm without a critic, or a transformers model")
    linear = model.get_output_embeddings()  # type: ignore[operator]
    return linear.weight, linear.bias


def autocast(device: torch.device, compute_dtype: torch.dtype) -> AbstractContextManager[object]:
    """Autocast matrix products to `compute_dtype` if it is a 16-bit type; norms, softmax and weights are unchanged."""
    if compute_dtype in (torch.bfloat16, torch.float16):
        return torch.autocast(device.type, compute_dtype)
    return contextlib.nullcontext()


def hidden_states(
    model: nn.Module,
    tokens: Tensor,
    position_ids: Tensor,
    cu_seqlens: Tensor,
    *,
    places: Tensor | None = None,
    layout: Layout = "auto",
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Hidden states [N, D] after the final norm, for tokens [N] of sequences that begin and end at cu_seqlens [S + 1].

    `hidden[t]` depends on the tokens of its own sequence up to and including t. With `places` (int64 [M], 0 to N - 1)
    the result is `hidden[places]` [M, D], and computation that only other positions need is skipped. Sequences may be
    empty. The result has the dtype of the head's weight. Raises NovaError if "packed" or "shared" is requested for a
    model that does not support it, and ValueError if cu_seqlens is not a partition of the axis.
    """
    bounds: list[int] = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != tokens.numel() or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to {tokens.numel()}, got {bounds}")
    if layout in ("packed", "shared") and not packs(model):
        raise NovaError(
            f"{type(model).__name__} does not support packed sequences", where=f"layout={layout}", fix="use layout=auto"
        )
    lengths = [length for length in lengths if length > 0]
    forward = _padded
    if layout != "padded" and packs(model):
        forward = _packed if layout == "packed" else _sharing
    with autocast(tokens.device, compute_dtype):
        if lengths and (places is None or places.numel()):
            hidden = forward(model, tokens, position_ids, lengths, places)
        else:  # a rank without work still takes part in the forward and backward pass
            hidden = forward(model, tokens.new_zeros(1), position_ids.new_zeros(1), [1], None)[:0]
    return hidden if isinstance(model, PlainModel) else hidden.to(head(model)[0].dtype)


def token_logprobs(
    model: nn.Module,
    batch: Packed,
    *,
    wanted: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
    layout: Layout = "auto",
    compute_dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """log pi(token_t | before) at `temperature` and the entropy of that distribution in nats, each [N].

    Column t describes tokens[t] and is predicted at position prev[t]; it is 0 where prev[t] is -1 and where t is not in
    `wanted` (indices, or a mask [N]; None: all), for which no logits are computed. The head always runs in the dtype of
    its weights, because rounding logits to 16 bits would make sampler and learner disagree.
    """
    index = predicted(batch, wanted)
    hidden = hidden_states(
        model,
        batch.tokens,
        batch.position_ids,
        batch.cu_seqlens,
        places=batch.prev[index],
        layout=layout,
        compute_dtype=compute_dtype,
    )
    logp, entropy, _ = read_scores(model, hidden, batch, index, temperature=temperature, chunk=chunk)
    return logp, entropy


def predicted(batch: Packed, wanted: Tensor | None = None) -> Tensor:
    """Indices [M] of the tokens among `wanted` (indices, or a mask [N]; None: all) that have a preceding token."""
    possible = batch.prev >= 0
    if wanted is None:
        return possible.nonzero().flatten()
    index = wanted.nonzero().flatten() if wanted.dtype == torch.bool else wanted
    return index[possible[index]]


def read_scores(
    model: nn.Module,
    hidden: Tensor,
    batch: Packed,
    index: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    support: Support | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The second half of `token_logprobs`, for callers that also use the hidden states for something else: `hidden` [M,
    D] at `batch.prev[index]`. The third column is the log-probability of the most likely token. With the `support` of
    these M tokens, their distributions are renormalised over it."""
    if isinstance(model, PlainModel):
        logp, entropy = logits_logprobs(hidden, batch.tokens[index], temperature, support=support)
        logits = hidden.detach()
        best, _ = logits_logprobs(logits, logits.argmax(-1), temperature, support=support)
        columns = (logp, entropy, best)
    else:
        weight, bias = head(model)
        columns = chunked_scores(
            hidden, weight, batch.tokens[index], temperature=temperature, chunk=chunk, bias=bias, support=support
        )
    zeros = columns[0].new_zeros(batch.tokens.shape)
    logp, entropy, best = (zeros.index_copy(0, index, column) for column in columns)
    return logp, entropy, best


def _packed(
    model: nn.Module, tokens: Tensor, position_ids: Tensor, lengths: list[int], places: Tensor | None
) -> Tensor:
    """One row of N tokens without sharing."""
    return _row(model, tokens, position_ids, [Group(length) for length in lengths], places)


def _sharing(
    model: nn.Module, tokens: Tensor, position_ids: Tensor, lengths: list[int], places: Tensor | None
) -> Tensor:
    """One row of the unique tokens, expanded to the hidden states of every sequence that shares them."""
    groups = find_groups(tokens, position_ids, lengths)
    if not any(group.rests for group in groups):
        return _row(model, tokens, position_ids, groups, places)
    kept, spread = unique_places(groups, tokens.device)
    return _row(model, tokens[kept], position_ids[kept], groups, spread if places is None else spread[places])


def _row(model: nn.Module, tokens: Tensor, position_ids: Tensor, groups: list[Group], places: Tensor | None) -> Tensor:
    """The hidden states at `places` of one row. The packing is a keyword of the attention, also in recomputation."""
    count, device = len(tokens), tokens.device
    # oneDNN, used on CPUs for 16-bit and many 32-bit products, caches a kernel for every number of rows.
    compiled = torch.is_autocast_enabled("cpu") or is_fast(head(model)[0])

    def idle(rows: int) -> int:
        return full_rows(rows) - rows if compiled else 0

    tokens, position_ids = (F.pad(column, (0, idle(count))) for column in (tokens, position_ids))
    read = keep = None
    if isinstance(model, Decoder) and places is not None:
        read, places = torch.unique(places, return_inverse=True)
        read = read if len(read) < count else None
        keep = None if read is None else F.pad(read, (0, idle(len(read))))
    # A transformers model would build a mask [N, N], but passes a four-dimensional mask on unchanged. This one is
    # empty, so it cannot be mistaken for a real mask if a model family drops the packing.
    empty = torch.empty(0, 0, 0, 0, dtype=torch.bool, device=device)
    own: dict[str, Any] = {"keep": keep} if isinstance(model, Decoder) else {"attention_mask": empty}
    output = backbone(model)(
        input_ids=tokens[None],
        position_ids=position_ids[None],
        use_cache=False,
        packed_sequences=packing_of(groups, device, kernel_of(model), read=read),
        **own,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden[:count] if places is None else hidden.index_select(0, places)


def _padded(
    model: nn.Module, tokens: Tensor, position_ids: Tensor, lengths: list[int], places: Tensor | None
) -> Tensor:
    """Convert to a right-padded batch [S, T] and back. Padding comes after every token, so it has no effect."""
    width = torch.arange(max(lengths), device=tokens.device)
    real = width < torch.tensor(lengths, dtype=torch.int64, device=tokens.device)[:, None]
    padded = width.expand(real.shape)
    # The padding needs no mask, and a padded row with nothing to attend to (beyond a sliding window) would be NaN. But
    # without a mask transformers looks for packed sequences.
    mask = None if isinstance(model, Decoder) else torch.ones_like(padded)
    output = backbone(model)(
        input_ids=torch.zeros_like(padded).masked_scatter(real, tokens),
        position_ids=padded.masked_scatter(real, position_ids),
        attention_mask=mask,
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state[real]
    return hidden if places is None else hidden.index_select(0, places)
