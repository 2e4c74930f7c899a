"""Run transformers models that match the built-in decoder with that decoder, on their own weights.

Llama, Mistral, Qwen2 and Qwen3 differ only in whether queries and keys are normalised and whether projections have
biases. They can therefore use what makes the built-in decoder faster than the transformers modules: lean decoding,
fused norms, and CPU matrix products. This is verified: tensor names, shapes and logits must be identical.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from novarl.models.transformer import Decoder, DecoderConfig

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

STEADY_ROPE = ("default", "linear", "llama3")
"""Rotary embedding types that do not depend on the sequence length and do not scale."""


def adopt(model: Any) -> Decoder | None:
    """A decoder that shares the tensors of `model`, which has no attention windows; None if it would compute something
    else."""
    if type(model).__name__ not in FAMILIES or not type(model).__module__.startswith("transformers.models."):
        return None
    given: Any = model.config
    rotary: Any = getattr(model.model, "rotary_emb", None)
    head_dim = getattr(given, "head_dim", None) or given.hidden_size // given.num_attention_heads
    plain = (
        given.hidden_act == "silu"
        and getattr(rotary, "rope_type", None) in STEADY_ROPE
        and rotary.inv_freq.numel() * 2 == head_dim
    )
    if not plain:
        return None
    theirs = dict(model.named_parameters())
    config = DecoderConfig(
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        intermediate_size=given.intermediate_size,
        num_hidden_layers=given.num_hidden_layers,
        num_attention_heads=given.num_attention_heads,
        num_key_value_heads=given.num_key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=given.max_position_embeddings,
        rms_norm_eps=given.rms_norm_eps,
        tie_word_embeddings=model.lm_head.weight is model.model.embed_tokens.weight,
        qk_norm="model.layers.0.self_attn.q_norm.weight" in theirs,
        qkv_bias="model.layers.0.self_attn.q_proj.bias" in theirs,
        rope_frequencies=tuple(rotary.inv_freq.float().tolist()),
    )
    with torch.device("meta"):
        decoder = Decoder(config, seed=None)
    if _shapes(dict(decoder.named_parameters())) != _shapes(theirs):
        return None
    decoder.load_state_dict(dict(model.named_parameters(remove_duplicate=False)), assign=True)
    decoder.model.embed_tokens.padding_idx = model.model.embed_tokens.padding_idx
    given.architectures = [type(model).__name__]  # as transformers writes it, whatever the loaded file said
    decoder.origin = SimpleNamespace(config=given, generation_config=model.generation_config)
    return decoder


def _shapes(parameters: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in parameters.items()}
