"""The built-in decoder against Hugging Face's Qwen3, against itself with a cache, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from novarl.core.errors import NovaError
from novarl.models.load import Policy
from novarl.models.tiny import build
from novarl.models.transformer import Decoder, DecoderConfig

SMALLEST = DecoderConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.3,
)


def logits(model: nn.Module, ids: torch.Tensor, **kwargs) -> torch.Tensor:
    positions = kwargs.pop("position_ids", torch.arange(ids.size(1)).expand(ids.shape))
    return model.lm_head(model(ids, position_ids=positions, **kwargs).last_hidden_state)


def test_sizes_are_as_promised() -> None:
    for size, parameters in {"tiny": 1_025_408, "small": 5_983_872}.items():
        model, tokenizer = build(size, 0)
        assert sum(p.numel() for p in model.parameters()) == parameters
        assert model.config.head_dim >= 32
        assert model.config.max_position_embeddings >= 2048
        assert model.config.vocab_size > len(tokenizer)
        assert model.lm_head.weight is model.model.embed_tokens.weight
    untied, _ = build("tiny", 0, tied=False)
    assert sum(p.numel() for p in untied.parameters()) == 1_025_408 + 320 * 128
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, third = (build("tiny", seed)[0] for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected), "building a model must leave the global generator alone"
    pairs = zip(first.parameters(), second.parameters(), third.parameters(), strict=True)
    for one, same, other in pairs:
        assert torch.equal(one, same)
        assert one.dim() == 1 or not torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_logits_equal_hugging_faces(
    trained: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float
) -> None:
    if dtype == torch.float64:  # Hugging Face's norm rounds to float32 whatever the dtype, ours does not
        monkeypatch.setattr(
            Qwen3RMSNorm,
            "forward",
            lambda norm, x: norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon),
        )
    trained.model.save(tmp_path)
    ours = Decoder.load(tmp_path).to(dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    ids = torch.tensor([trained.tokenizer.encode("<|user|>sort: dcab<eos><|assistant|>abcd<eos>")])
    with torch.no_grad():
        expected = theirs(ids).logits
        difference = (logits(ours, ids) - expected).abs().max()
    assert difference <= tolerance * expected.abs().max()


@pytest.mark.parametrize("prefill", [1, 7])
def test_decoding_with_a_cache_equals_the_full_forward(trained: Policy, prefill: int) -> None:
    """Hugging Face's own cache fits; rows of the mask say which slots a query sees."""
    ids = torch.tensor([trained.tokenizer.encode("<|user|>sort: dcab<eos>"), [7] * 12])
    cache, parts = DynamicCache(), []
    with torch.no_grad():
        full = logits(trained.model, ids)
        for start, end in [(0, prefill), *((t, t + 1) for t in range(prefill, 12))]:
            positions = torch.arange(start, end).expand(2, -1)
            mask = (torch.arange(end) <= positions[:, :, None])[:, None]
            step = ids[:, start:end]
            parts.append(
                logits(trained.model, step, position_ids=positions, attention_mask=mask, past_key_values=cache)
            )
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-5, atol=1e-5)


def test_a_mask_always_selects_the_masked_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels differ in their last bits: which one runs must not depend on what a mask happens to contain."""
    masks = []
    attend = nn.functional.scaled_dot_product_attention

    def recorded(query, key, value, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return attend(query, key, value, attn_mask, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recorded)
    for length in (1, 5):
        logits(Decoder(SMALLEST), torch.ones(2, length, dtype=torch.int64),
               attention_mask=torch.ones(2, 1, length, length, dtype=torch.bool).tril())  # fmt: skip
    assert len(masks) == 4
    assert all(mask is not None for mask in masks)


def test_keys_beyond_the_queries_need_a_mask() -> None:
    model, cache = Decoder(SMALLEST), DynamicCache()
    logits(model, torch.ones(1, 3, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(ValueError, match="1 queries with 4 keys require an attention_mask"):
        logits(model, torch.ones(1, 1, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(ValueError, match="use_cache=True requires past_key_values"):
        logits(model, torch.ones(1, 1, dtype=torch.int64), use_cache=True)


def test_gradient_checkpointing_recomputes_and_changes_nothing() -> None:
    model = Decoder(SMALLEST).eval()
    ids = torch.arange(12).reshape(2, 6)
    calls, gradients = [], []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for model.model.gradient_checkpointing in (False, True):
        model.zero_grad()
        logits(model, ids).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert len(calls) == 1 + 2, "nothing was recomputed"
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_save_and_load_keep_every_bit(trained: Policy, tmp_path: Path) -> None:
    trained.model.save(tmp_path)
    again = Decoder.load(tmp_path)
    assert again.config == trained.model.config
    pairs = zip(again.named_parameters(), trained.model.named_parameters(), strict=True)
    assert all(name == other and torch.equal(p, q) for (name, p), (other, q) in pairs)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "llama"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layer_types", 3),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("rope_parameters", 3),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ],
)
def test_what_the_decoder_does_not_implement_is_refused_by_name(key: str, value: object) -> None:
    values = SMALLEST.to_dict()
    assert DecoderConfig.from_dict(values) == SMALLEST
    with pytest.raises(NovaError, match=f"does not implement {key}"):
        DecoderConfig.from_dict({**values, key: value})


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_attention_heads", "4", "num_attention_heads is '4' (it must be a positive integer: copy"),
        ("hidden_size", None, "hidden_size is None (it must be a positive integer"),
        ("max_position_embeddings", 0, "max_position_embeddings is 0 (it must be a positive integer"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5' (it must be a number of at least 0: "),
        ("tie_word_embeddings", "yes", "tie_word_embeddings is 'yes' (it must be true or false: "),
        ("eos_token_id", "x", "eos_token_id is 'x' (it must be a token id: "),
        ("rope_parameters", {"rope_theta": "x"}, "rope_theta is 'x' (it must be a number"),
    ],
)
def test_a_damaged_field_is_refused_by_name(key: str, value: object, said: str) -> None:
    with pytest.raises(NovaError) as raised:
        DecoderConfig.from_dict({**SMALLEST.to_dict(), key: value}, where="a file")
    assert str(raised.value).startswith(f"a file: {said}")


def test_a_missing_field_is_refused_by_name() -> None:
    values = SMALLEST.to_dict()
    del values["head_dim"]
    with pytest.raises(NovaError, match="head_dim is missing"):
        DecoderConfig.from_dict(values)


@pytest.mark.parametrize(
    ("key", "value", "tensor"), [("num_hidden_layers", 3, "model.layers.2"), ("head_dim", 10, "q_")]
)
def test_weights_of_another_shape_are_refused(tmp_path: Path, key: str, value: int, tensor: str) -> None:
    Decoder(SMALLEST).save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**SMALLEST.to_dict(), key: value}), encoding="utf-8")
    with pytest.raises(NovaError, match=f"tensor '.*{tensor}.*' does not match config.json"):
        Decoder.load(tmp_path)
