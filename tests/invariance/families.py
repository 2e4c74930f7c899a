"""Models of other families, made from a configuration, loaded through transformers, and taught the same answers."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.load import Policy, load
from tests.invariance.sharp import teach

EOS = ByteTokenizer.eos_token_id


def config(family: str) -> Any:
    """gpt2: learned absolute positions. moe: four experts, two of them for each token, as in Qwen3."""
    import transformers

    if family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=272, n_positions=512, n_embd=48, n_layer=2, n_head=4, eos_token_id=EOS, bos_token_id=None
        )
    return transformers.Qwen3MoeConfig(
        vocab_size=272,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=EOS,
        bos_token_id=None,
    )


def _load(family: str, dtype: str) -> Policy:
    """The untrained model, by way of a directory; its tokenizer has no pad token, so that pad becomes eos."""
    import transformers

    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config(family)).save_pretrained(name)
        ByteTokenizer().save_pretrained(name)
        settings = Path(name, "tokenizer_config.json")
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token": None}))
        return replace(load(name, dtype=dtype), name=family)


@cache
def _weights(family: str) -> dict[str, Tensor]:
    return teach(_load(family, "float32").model)


@cache
def _empty(family: str, dtype: str) -> Policy:
    return _load(family, dtype)


def family_policy(family: str, dtype: torch.dtype = torch.float32) -> Policy:
    """The trained model. The same object each time, with the trained weights put back."""
    policy, weights = _empty(family, {torch.float32: "float32", torch.float64: "float64"}[dtype]), _weights(family)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            parameter.copy_(weights[name])
            parameter.grad = None
    return policy
