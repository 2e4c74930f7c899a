"""Scalar heads: a critic or a reward model predicts one number per position instead of a distribution.

Both are a causal language model with a linear map from hidden states, [D] -> 1. A critic is evaluated at the position
that predicts a token, `prev[t]`: the value of the state in which tokens[t] was chosen. A reward model is evaluated at
the last token of a sequence. The map is initialised to zero, so all values are exactly 0 before the first update.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.models import load
from novarl.models.files import WHOLE, read_tensors
from novarl.models.forward import Layout, Packed, head as language_head, hidden_states
from novarl.models.lora import sibling

VALUE_HEAD = "value_head.safetensors"
"""The file in the model directory that holds the scalar head: tensors `weight` [1, D] and `bias` [1]."""


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """The output of a reward model for a batch: `sequence` [S], and of implicit rewards (`algos.implicit_prm`) `token`
    [N], the parts whose sum over a sequence's mask is `sequence`. A scalar head evaluated at the last token has no
    `token`."""

    sequence: Tensor
    token: Tensor | None = None


class ScalarHead(nn.Linear):
    """value = weight . hidden + bias: hidden [..., D] -> [..., 1], weight and bias initialised to zero."""

    def __init__(
        self, size: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__(size, 1, dtype=dtype, device=device)

    def reset_parameters(self) -> None:
        """Set to zero without using a generator: creating a critic does not advance any random stream."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class ValueModel(nn.Module):
    """A causal language model (its own, or the policy's) with a scalar head on its hidden states."""

    def __init__(self, model: nn.Module, head: ScalarHead) -> None:
        super().__init__()
        self.model = model
        self.head = head


def with_head(model: nn.Module, *, separate: bool = False) -> ValueModel:
    """`model` with a zero scalar head, of the width, dtype and device of its language-model head. The value model
    shares `model` and its weights; `separate` makes a copy (with LoRA: own adapters on the same base), whose unused
    language-model head is frozen unless tied to the embedding."""
    if separate:
        model = sibling(model)
    weight, bias = language_head(model)
    if separate:
        places = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
        for unread in (weight, bias):
            if unread is not None and places.count(id(unread)) == 1:
                unread.requires_grad_(False)
    return ValueModel(model, ScalarHead(weight.size(1), dtype=weight.dtype, device=weight.device))


def token_values(
    model: ValueModel,
    batch: Packed,
    *,
    positions: Tensor,
    layout: Layout = "auto",
    compute_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The values [M] at the flat `positions` [M] int64, each of which depends on its sequence up to there:
    `batch.prev[batch.mask]` for a critic, `last_positions(batch)` for a reward model. The head runs in the dtype of its
    weights. ValueError for a negative position, such as a first token's `prev`."""
    if positions.numel() and int(positions.min()) < 0:
        raise ValueError(f"positions must not be negative: {int(positions.min())}")
    hidden = hidden_states(
        model.model,
        batch.tokens,
        batch.position_ids,
        batch.cu_seqlens,
        places=positions,
        layout=layout,
        compute_dtype=compute_dtype,
    )
    values: Tensor = model.head(hidden.to(model.head.weight.dtype))
    return values.squeeze(-1)


def last_positions(batch: Packed) -> Tensor:
    """The flat position [S] of the last token of each sequence, none of which may be empty."""
    return batch.cu_seqlens[1:] - 1


def save_with_head(policy: load.Policy, head: ScalarHead, folder: str | Path) -> None:
    """Save `policy` as `load.save` does (readable by transformers), plus the head."""
    from safetensors.torch import save_file

    load.save(policy, folder)
    tensors = {name: tensor.detach().to("cpu").contiguous() for name, tensor in head.named_parameters()}
    save_file(tensors, Path(folder, VALUE_HEAD))


def refuse_reward_model(name: str) -> None:
    """Raise NovaError if `name` is the directory of a reward model, which no longer generates meaningful text."""
    if Path(name, VALUE_HEAD).is_file():
        raise NovaError(
            f"the directory contains a reward model ({VALUE_HEAD}), which cannot generate text",
            where=f"model={name}",
            fix="use a policy; to score with a reward model set reward=model:<its run>",
        )


def load_head(folder: str | Path, model: nn.Module) -> ScalarHead:
    """The head that `save_with_head` wrote, bit-exact, on the device of `model`. NovaError: it is missing, cannot be
    read, or has another width."""
    path = Path(folder, VALUE_HEAD)
    if not path.is_file():
        raise NovaError(
            f"{VALUE_HEAD} is missing, so this is not a reward model or critic",
            where=str(folder),
            fix="use the model directory of a novarl rm run with loss bt or bce",
        )
    tensors = read_tensors(path, "the head")
    weight = language_head(model)[0]
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shapes != {"weight": (1, weight.size(1)), "bias": (1,)}:
        raise NovaError(f"the head has {shapes}, the model's size is {weight.size(1)}", where=str(path), fix=WHOLE)
    head = ScalarHead(weight.size(1), dtype=tensors["weight"].dtype, device=weight.device)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])
    return head
