"""Unmodified transformers families through our cache, against their own `generate` and their own full forward pass."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from novarl.core.errors import NovaError
from novarl.core.types import Sampling
from novarl.engines.local.engine import LocalEngine, sample_all

from .conftest import LAG, echo, full_logits, train

EOS, PAD = 30, 31
WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}
GPT2: dict[str, Any] = {
    "vocab_size": 32,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,  # as so often: nothing may be masked by looking for the pad id
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", SIZES | {"head_dim": 32}),
    "llama": ("Llama", SIZES),
    "gpt2": ("GPT2", GPT2),
    "mistral, a window in every layer": ("Mistral", SIZES | {"sliding_window": WINDOW}),
    "qwen3 moe": ("Qwen3Moe", SIZES | EXPERTS | {"head_dim": 32}),
    "gemma3, windows in some layers": (
        "Gemma3",
        SIZES | {"head_dim": 32, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
TOKENIZER: Any = SimpleNamespace(
    decode=lambda tokens, skip_special_tokens: "".join(chr(97 + token) for token in tokens)
)


def build(family: str) -> Any:
    import transformers

    name, values = FAMILIES[family]
    config_class = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_class)(**values)
    torch.manual_seed(0)
    return getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Any:
    """Each family, tiny, trained on echoes, with whatever dropout it has switched off meanwhile."""
    model = build(request.param).eval()
    train(model, first=0)
    return model


def prompts(n: int) -> list[list[int]]:
    rng = random.Random(5)
    return [echo(rng.randint(LAG, 30), rng=rng, first=0) for _ in range(n)]


def test_greedy_tokens_are_generates_and_log_probs_the_full_forward_passes(family: Any) -> None:
    wanted = [(p, Sampling(temperature=0.0, max_tokens=12 + 3 * i), f"row {i}") for i, p in enumerate(prompts(9))]
    family.train()  # as a learner would leave it: dropout must not show
    engine = LocalEngine(family, TOKENIZER, eos_ids=[EOS], context=128, max_batch=4)
    completions = sample_all(engine, wanted)
    assert family.training
    family.eval()
    errors, logps = [], []
    for (prompt, sampling, _), completion in zip(wanted, completions, strict=True):
        ids = torch.tensor([prompt])
        generated = family.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_tokens, do_sample=False
        )
        assert list(completion.tokens) == generated[0, len(prompt) :].tolist()
        with torch.no_grad():
            logits = full_logits(family, [*prompt, *completion.tokens])[len(prompt) - 1 : -1]
        true = logits.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        errors.append((torch.tensor(completion.logp) - true).abs())
        logps.append(true)
    assert torch.cat(logps).mean() > -0.5
    assert torch.cat(errors).max() < 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_group_of_samples_is_right_whichever_attention_runs(family: Any, attention: str) -> None:
    prompt = prompts(1)[0]
    wanted = [(prompt, Sampling(max_tokens=20), f"sample {i}") for i in range(6)]
    family.set_attn_implementation(attention)
    engine = LocalEngine(family, TOKENIZER, eos_ids=[EOS], context=128)
    for completion in sample_all(engine, wanted):
        with torch.no_grad():
            logits = full_logits(family.eval(), [*prompt, *completion.tokens])[len(prompt) - 1 : -1]
        true = logits.log_softmax(-1).gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0]
        assert (torch.tensor(completion.logp) - true).abs().max() < 1e-4
    family.set_attn_implementation("sdpa")


def test_families_without_a_plain_cache_are_refused_by_name() -> None:
    import transformers

    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1))
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=2))
    hybrid = build("qwen3")
    hybrid.config.layer_types = ["full_attention", "chunked_attention"]
    flash = build("qwen3")
    flash.config._attn_implementation = "flash_attention_2"
    for model, words in (
        (mamba, "mamba model: it does not keep one key"),
        (bloom, "bloom model"),
        (hybrid, "qwen3 model: it has layers of type chunked_attention"),
        (flash, "attention is 'flash_attention_2'"),
    ):
        with pytest.raises(NovaError, match=words):
            LocalEngine(model, TOKENIZER, eos_ids=[EOS], context=128)


def test_a_model_that_disagrees_with_itself_through_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen3").eval()
    forward = model.model.forward
    monkeypatch.setattr(
        model.model,
        "forward",
        lambda ids, *, position_ids, **kwargs: forward(ids, position_ids=position_ids * 0, **kwargs),
    )
    LocalEngine(model, TOKENIZER, eos_ids=[EOS], context=128)  # wrong alike with and without the cache: not our matter
    monkeypatch.setattr(model.model, "forward", lambda ids, *, position_ids, **kwargs: forward(ids, **kwargs))
    with pytest.raises(NovaError, match="logits have a relative error of"):
        LocalEngine(model, TOKENIZER, eos_ids=[EOS], context=128)
