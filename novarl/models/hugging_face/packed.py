"""The packed attention as one of transformers' attention functions, and the models that can take it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.kernels.attention import PACKING_ATTENTION, packed_attention
from novarl.kernels.packing import Packing
from novarl.models.hugging_face.probes import TOLERANCE, packing_error

PASSED_ALONG = {"position_ids", "use_cache", "is_causal", "cache_position"}
"""Keywords that every attention function receives and that packed attention may ignore."""


def packing_obstacle(config: Any) -> str | None:
    """The configuration setting that packed attention does not support, or None."""
    text = config.get_text_config()
    layers = sorted(set(getattr(text, "layer_types", None) or ()) - {"full_attention"})
    if layers:
        return f"layer_types={layers}"
    for name in ("sliding_window", "attention_chunk_size", "attn_logit_softcapping"):
        value = getattr(text, name, None)
        if value is not None:
            return f"{name}={value}"
    return None


def enable_packing(model: Any) -> str | None:
    """Enable packed attention in `model` if results are the same; otherwise leave it unchanged and return why."""
    obstacle = packing_obstacle(model.config)
    if obstacle is None and not (model._supports_attention_backend and model._supports_sdpa):
        obstacle = f"{type(model).__name__} does not support custom attention functions"
    if obstacle is not None:
        return obstacle
    _register()
    own = model.config._attn_implementation
    model.set_attn_implementation(PACKING_ATTENTION)
    try:
        difference = packing_error(model)
    except (NovaError, RuntimeError, ValueError, TypeError, IndexError) as error:
        obstacle = str(error)
    else:
        obstacle = None if difference <= TOLERANCE else f"packing changes the hidden states by {difference:.1g}"
    if obstacle is not None:
        model.set_attn_implementation(own)
    return obstacle


def packing_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_sequences: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers: packed if `packed_sequences` is given, otherwise SDPA. NovaError for any
    argument that packed attention does not implement (sliding window, soft cap, sinks, position bias, dropout, or an
    unknown one), because ignoring it would silently change the model."""
    if packed_sequences is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise NovaError(f"{type(module).__name__} does not pass packed_sequences to its attention")
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    unknown = {name: value for name, value in kwargs.items() if name not in PASSED_ALONG} | {"dropout": dropout or None}
    refused = sorted(name for name, value in unknown.items() if value is not None and value is not False)
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        refused.append("is_causal=False")
    if refused:
        raise NovaError(
            f"packed attention does not implement {', '.join(refused)}, which {type(module).__name__} uses",
            fix="use layout=padded",
        )
    return packed_attention(query, key, value, packed_sequences, scale=scaling).transpose(1, 2).contiguous(), None


def _register() -> None:
    """Register `packing_sdpa` with the masks of SDPA; only once, since `keep_attention_uncompiled` may replace it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if PACKING_ATTENTION in AttentionInterface().valid_keys():
        return
    AttentionInterface.register(PACKING_ATTENTION, packing_sdpa)
    AttentionMaskInterface.register(PACKING_ATTENTION, sdpa_mask)


def keep_attention_uncompiled() -> None:
    """End the compiled graphs of a model's layers before attention. The result is copied to a fixed memory layout,
    because every other layout would trigger a recompilation."""
    from transformers import AttentionInterface

    def outside(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        mixed, _ = packing_sdpa(*arguments, **options)
        return mixed.clone(memory_format=torch.contiguous_format), None

    AttentionInterface.register(PACKING_ATTENTION, torch.compiler.disable(outside))
