"""What the library assumes of a model, measured once after loading on eight tokens: that it is causal, that its logits
are hidden @ head.T (+ bias), and that packing changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.models.forward import head, hidden_states
from novarl.models.hugging_face.failures import MEND, NAMES
from novarl.models.transformer import Decoder

if TYPE_CHECKING:
    from torch import Tensor


TOLERANCE = 1e-4
"""Largest difference, relative to the largest value, that the probes take for rounding (measured: about 1e-6)."""

LOGIT_TRANSFORMS = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
}
"""Attributes of a configuration that change logits after the head, with the values under which they do not."""


def _probe_tokens(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Eight tokens in two sequences of five and three: tokens, position_ids, cu_seqlens."""
    weight = head(model)[0]
    tokens = torch.arange(8, device=weight.device) * 7 % weight.size(0)
    positions = torch.cat([torch.arange(5), torch.arange(3)]).to(weight.device)
    return tokens, positions, torch.tensor([0, 5, 8])


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in units of the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


@torch.no_grad()
def check_model(model: Any, name: str) -> None:
    """Raises NovaError where `model` is not causal or does more to its logits than the head."""
    text = model.config.get_text_config()
    for attribute, harmless in LOGIT_TRANSFORMS.items():
        value = getattr(text, attribute, None)
        if value not in harmless:
            raise NovaError(
                f"{model.config.model_type} changes its logits after the head ({attribute}={value}), "
                "so their log-probabilities cannot be computed in chunks",
                where=name,
            )
    if model.get_output_embeddings() is None:
        raise NovaError(f"{type(model).__name__} has no language-model head", where=name, fix=NAMES)
    tokens, positions, cu_seqlens = _probe_tokens(model)
    logits = model(input_ids=tokens[None, :5], use_cache=False).logits[0]
    if not bool(logits.isfinite().all()):
        what = "the model's logits are not all finite: a weight or a number in its configuration is damaged"
        raise NovaError(what, where=name, fix=MEND)
    shorter = model(input_ids=tokens[None, :4], use_cache=False).logits[0]
    if _relative(shorter, logits[:4]) > TOLERANCE:
        what = f"{model.config.model_type} lets tokens see their future: no causal language model"
        raise NovaError(what, where=name, fix=NAMES)
    weight, bias = head(model)
    ours = nn.functional.linear(hidden_states(model, tokens, positions, cu_seqlens, layout="padded")[:5], weight, bias)
    if _relative(ours, logits) > TOLERANCE:
        raise NovaError(
            f"the logits of {model.config.model_type} are not its last hidden states times its head "
            f"(they differ by {_relative(ours, logits):.1g}); look for a logit scale or cap in its configuration",
            where=name,
        )


@torch.no_grad()
def distance(decoder: Decoder, model: Any) -> float:
    """How far the decoder's logits are from the model's on the probe, whose sequences it takes packed."""
    tokens, positions, cu_seqlens = _probe_tokens(model)
    weight, bias = head(decoder)
    ours = nn.functional.linear(hidden_states(decoder, tokens, positions, cu_seqlens), weight, bias)
    alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in tokens.split([5, 3])]
    return _relative(ours, torch.cat(alone))


@torch.no_grad()
def packing_error(model: nn.Module) -> float:
    """How much the two layouts differ on the probe."""
    tokens, positions, cu_seqlens = _probe_tokens(model)
    packed = hidden_states(model, tokens, positions, cu_seqlens, layout="packed")
    return _relative(packed, hidden_states(model, tokens, positions, cu_seqlens, layout="padded"))
