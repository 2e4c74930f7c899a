"""What the library assumes of a model, measured once after loading on eight tokens: that it is causal, that its logits
are hidden @ head.T (+ bias), and that packing changes nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.models.forward import head, hidden_states
from novarl.models.hugging_face.failures import MEND, NAMES
from novarl.models.transformer import Decoder

TOLERANCE = 1e-4
"""Largest relative difference that the probes accept as rounding (measured: about 1e-6)."""

LOGIT_TRANSFORMS = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
}
"""Configuration attributes that change logits after the head, with the values under which they do not."""


def _probe_tokens(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Eight tokens in two sequences of five and three: tokens, position_ids, cu_seqlens."""
    weight = head(model)[0]
    tokens = torch.arange(8, device=weight.device) * 7 % weight.size(0)
    positions = torch.cat([torch.arange(5), torch.arange(3)]).to(weight.device)
    return tokens, positions, torch.tensor([0, 5, 8])


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


@torch.no_grad()
def check_model(model: Any, name: str) -> None:
    """Raise NovaError if `model` is not causal or transforms its logits after the head."""
    text = model.config.get_text_config()
    for attribute, harmless in LOGIT_TRANSFORMS.items():
        value = getattr(text, attribute, None)
        if value not in harmless:
            raise NovaError(
                f"{model.config.model_type} transforms its logits after the head ({attribute}={value}), "
                "so their log-probabilities cannot be computed in chunks",
                where=name,
            )
    if model.get_output_embeddings() is None:
        raise NovaError(f"{type(model).__name__} has no language-model head", where=name, fix=NAMES)
    tokens, positions, cu_seqlens = _probe_tokens(model)
    logits = model(input_ids=tokens[None, :5], use_cache=False).logits[0]
    if not bool(logits.isfinite().all()):
        what = "the model's logits are not finite: a weight or a configuration value is corrupt"
        raise NovaError(what, where=name, fix=MEND)
    shorter = model(input_ids=tokens[None, :4], use_cache=False).logits[0]
    if _relative(shorter, logits[:4]) > TOLERANCE:
        what = f"{model.config.model_type} is not a causal language model: tokens depend on later tokens"
        raise NovaError(what, where=name, fix=NAMES)
    weight, bias = head(model)
    ours = nn.functional.linear(hidden_states(model, tokens, positions, cu_seqlens, layout="padded")[:5], weight, bias)
    if _relative(ours, logits) > TOLERANCE:
        raise NovaError(
            f"the logits of {model.config.model_type} are not the product of its last hidden states and its head "
            f"(they differ by {_relative(ours, logits):.1g}); check its configuration for a logit scale or cap",
            where=name,
        )


@torch.no_grad()
def distance(decoder: Decoder, model: Any) -> float:
    """The difference between the logits of the decoder (packed) and of the model on the probe."""
    tokens, positions, cu_seqlens = _probe_tokens(model)
    weight, bias = head(decoder)
    ours = nn.functional.linear(hidden_states(decoder, tokens, positions, cu_seqlens), weight, bias)
    alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split([5, 3])]
    return _relative(ours, torch.cat(alone))


@torch.no_grad()
def packing_error(model: nn.Module) -> float:
    """The difference between the two layouts on the probe."""
    tokens, positions, cu_seqlens = _probe_tokens(model)
    packed = hidden_states(model, tokens, positions, cu_seqlens, layout="packed")
    return _relative(packed, hidden_states(model, tokens, positions, cu_seqlens, layout="padded"))
