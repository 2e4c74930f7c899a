"""Adapters: nothing changes when they come in, the base never moves, and merged weights say the same as live ones."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from novarl.core.errors import NovaError
from novarl.core.types import Sampling
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.engines.local.runner import ModelRunner
from novarl.models.forward import token_logprobs
from novarl.models.load import Policy, load, save
from novarl.models.lora import (
    LoraSettings,
    adapted_weight,
    adapter_weights,
    inject,
    merged,
    plain_parameters,
    put_adapter_weights,
    sibling,
    targets,
    without_adapters,
)

RANK8 = LoraSettings(8, 16.0)
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ROWS = [[5, 9, 200, 31, 7, 7, 90], [1, 2, 3], [250, 4, 4, 4, 18]]


def policy_of(kind: str, folder: Path) -> Policy:
    """A model of each family, of float32 weights that were made here."""
    if kind == "tiny":
        return load("tiny", seed=3)
    import transformers

    from novarl.models.byte_tokenizer import ByteTokenizer

    size: dict[str, Any] = {"vocab_size": 300, "bos_token_id": None, "eos_token_id": 0}
    configs = {
        "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **size),
        "llama": lambda: transformers.LlamaConfig(**LAYERS, **size),
        "biased": lambda: transformers.LlamaConfig(**LAYERS, **size, attention_bias=True),
        "qwen2": lambda: transformers.Qwen2Config(**LAYERS, **size, num_key_value_heads=2),
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configs[kind]())
    model.save_pretrained(folder)
    ByteTokenizer().save_pretrained(str(folder))
    return load(str(folder))


@pytest.fixture(params=["tiny", "gpt2", "llama", "biased", "qwen2"])
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Policy:
    return policy_of(request.param, tmp_path / "model")


def scores(model: nn.Module, flat: Any) -> torch.Tensor:
    return token_logprobs(model, flat(ROWS))[0]


def shake(model: nn.Module, size: float = 0.05) -> None:
    """Adapters as training might leave them."""
    generator = torch.Generator().manual_seed(1)
    for weight in adapter_weights(model).values():
        weight.copy_(size * torch.randn(weight.shape, generator=generator))


def test_nothing_changes_when_adapters_come_in_and_only_they_are_trained(policy: Policy, flat: Any) -> None:
    model = policy.model
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        before = scores(model, flat)
    drawn = torch.get_rng_state()
    inject(model, RANK8, seed=0)
    assert torch.equal(torch.get_rng_state(), drawn), "the run's own random stream has moved"
    assert [name for name, _ in plain_parameters(model)] == names
    found = scores(model, flat)
    assert torch.equal(found, before)
    found.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad} == adapter_weights(model).keys()
    assert not any("lm_head" in name or "embed" in name or "wte" in name for name in trained)


def test_one_update_moves_adapters_and_no_bit_of_the_base(policy: Policy, flat: Any) -> None:
    model = policy.model
    inject(model, RANK8, seed=0)
    base = {name: p.detach().clone() for name, p in plain_parameters(model)}
    adapters = {name: p.clone() for name, p in adapter_weights(model).items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (-scores(model, flat).sum()).backward()
        optimizer.step()
    assert all(torch.equal(p, base[name]) for name, p in plain_parameters(model))
    assert all(not torch.equal(p, adapters[name]) for name, p in adapter_weights(model).items())


def test_without_adapters_is_the_base_and_gradients_come_back(policy: Policy, flat: Any) -> None:
    model = policy.model
    with torch.no_grad():
        start = scores(model, flat)
        inject(model, RANK8, seed=0)
        shake(model)
        moved = scores(model, flat)
        assert float((moved - start).abs().max()) > 1e-2
        frozen = next(p for p in model.parameters() if p.requires_grad).requires_grad_(False)
        wanted = [p.requires_grad for p in model.parameters()]
        with pytest.raises(KeyError), without_adapters(model):
            assert torch.equal(scores(model, flat), start)
            raise KeyError
        assert torch.equal(scores(model, flat), moved)
    assert [p.requires_grad for p in model.parameters()] == wanted and not frozen.requires_grad


def test_the_saved_folder_is_plain_and_says_the_same(policy: Policy, flat: Any, tmp_path: Path) -> None:
    model = policy.model
    inject(model, RANK8, seed=0)
    shake(model)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    save(policy, tmp_path / "merged")
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters()), "saving has touched the model"
    again = load(str(tmp_path / "merged"))
    assert [name for name, _ in again.model.named_parameters()] == [name for name, _ in plain_parameters(model)]
    with torch.no_grad():
        assert torch.allclose(scores(again.model, flat), scores(model, flat), atol=1e-5, rtol=0)
    requests = [(tuple(row), Sampling(temperature=0.0, max_tokens=8), str(i)) for i, row in enumerate(ROWS)]

    def said(policy: Policy) -> list[tuple[int, ...]]:
        engine = LocalEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_ids, context=policy.context)
        return [tuple(completion.tokens) for completion in sample_all(engine, requests)]

    assert said(again) == said(policy)


def test_the_saved_folder_loads_with_transformers(flat: Any, tmp_path: Path) -> None:
    import transformers

    policy = policy_of("tiny", tmp_path)
    inject(policy.model, RANK8, seed=0)
    shake(policy.model)
    save(policy, tmp_path / "merged")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    logits = theirs(torch.tensor([ROWS[0]])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(-1, torch.tensor(ROWS[0])[1:, None])[:, 0]
    found = token_logprobs(policy.model, flat(ROWS[:1]))[0][1:]
    assert torch.allclose(found, expected, atol=1e-5, rtol=0)


def test_the_engine_samples_with_the_adapters_and_agrees_with_the_learner(policy: Policy, flat: Any) -> None:
    engine = LocalEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_ids, context=policy.context)
    inject(policy.model, RANK8, seed=0)
    shake(policy.model)
    asked = Sampling(temperature=1.0, max_tokens=6, seed=4)
    alone = [sample_all(engine, [(tuple(row), asked, str(i))])[0] for i, row in enumerate(ROWS)]
    together = sample_all(engine, [(tuple(row), asked, str(i)) for i, row in enumerate(ROWS)])
    assert [(c.tokens, c.logp) for c in alone] == [(c.tokens, c.logp) for c in together]
    for row, completion in zip(ROWS, alone, strict=True):
        whole = [*row, *completion.tokens]
        learner = token_logprobs(policy.model, flat([whole]))[0][len(row) :]
        assert torch.allclose(learner, torch.tensor(completion.logp), atol=1e-4, rtol=0)


def test_the_samplers_weights_lose_no_digit_to_a_large_bias(tmp_path: Path) -> None:
    model = policy_of("qwen2", tmp_path / "model").model
    layer = model.model.layers[0].self_attn
    layer.k_proj.bias.data.fill_(400.0)
    runner, prompts = ModelRunner(model), [tuple(row) for row in ROWS]

    def sampled() -> torch.Tensor:
        runner.refresh()
        return torch.stack([prefill.logits for prefill in runner.prefill(prompts)])

    assert runner.reads_segments, "not the lean forward pass"
    before, base = sampled(), layer.k_proj.weight.detach().clone()
    inject(model, RANK8, seed=0)
    assert torch.equal(adapted_weight(layer.k_proj), base)
    assert torch.equal(sampled(), before)
    shake(model)
    down, up = (part["default"].weight.double() for part in (layer.k_proj.lora_A, layer.k_proj.lora_B))
    exact = base.double() + 2.0 * up @ down
    assert (adapted_weight(layer.k_proj) - exact).abs().max() < 1e-7
    assert (sampled() - before).abs().max() > 1e-2
    with without_adapters(model):
        assert torch.equal(adapted_weight(layer.k_proj), base)
        assert torch.equal(sampled(), before)


def test_the_start_is_drawn_from_the_seed_alone() -> None:
    def drawn(seed: int, noise: int) -> dict[str, torch.Tensor]:
        model = load("tiny").model
        torch.manual_seed(noise)
        inject(model, RANK8, seed=seed)
        return adapter_weights(model)

    one, same, other = drawn(0, 1), drawn(0, 2), drawn(1, 1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    down = {name: weight for name, weight in one.items() if "lora_A" in name}
    assert all(float(weight.std()) > 0 for weight in down.values())
    assert all(not bool(one[name].any()) for name in one.keys() - down.keys())
    first, second = list(down.values())[:2]
    assert first.shape == second.shape and not torch.equal(first, second)


def test_weights_go_out_and_come_back_only_into_the_same_adapters() -> None:
    model, other = load("tiny").model, load("tiny").model
    inject(model, RANK8, seed=0)
    inject(other, RANK8, seed=1)
    shake(model)
    put_adapter_weights(other, adapter_weights(model))
    ours, theirs = adapter_weights(model), adapter_weights(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    narrow = load("tiny").model
    inject(narrow, LoraSettings(4, 16.0), seed=0)
    with pytest.raises(NovaError, match="another rank"):
        put_adapter_weights(narrow, adapter_weights(model))


def test_a_sibling_has_adapters_of_its_own_on_the_same_base() -> None:
    model = load("tiny").model
    whole = sibling(model)
    assert {id(p) for p in whole.parameters()}.isdisjoint(id(p) for p in model.parameters())
    inject(model, RANK8, seed=0)
    other = sibling(model)
    shared = {name for name, p in other.named_parameters() if p is model.get_parameter(name)}
    assert shared == {name for name, p in model.named_parameters() if not p.requires_grad}
    assert {name for name, p in other.named_parameters() if p.requires_grad} == adapter_weights(model).keys()
    with without_adapters(model):
        assert all(layer.disable_adapters is False for layer in other.modules() if hasattr(layer, "lora_A"))


def test_merging_a_model_without_adapters_is_the_model_itself() -> None:
    model = load("tiny").model
    assert merged(model) is model


def test_which_layers() -> None:
    model = load("tiny").model
    names = targets(model, RANK8)
    assert len(names) == 7 * len(model.model.layers) and "lm_head" not in names
    some = targets(model, LoraSettings(8, 16.0, ("q_proj", "mlp.down_proj")))
    assert {name.rpartition(".")[2] for name in some} == {"q_proj", "down_proj"}
    with pytest.raises(NovaError, match=r"no linear layer is named c_attn .*down_proj"):
        targets(model, LoraSettings(8, 16.0, ("q_proj", "c_attn")))
    with pytest.raises(NovaError, match=r"lora.target: is empty"):
        targets(model, LoraSettings(8, 16.0, ()))
    assert len(targets(model, LoraSettings(128, 16.0))) == len(names)
    with pytest.raises(NovaError, match=r"lora.rank: 129 exceeds the rank of every layer's weight \(at most 128"):
        targets(model, LoraSettings(129, 16.0))


def test_a_model_without_linear_layers_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    with pytest.raises(NovaError, match="Bare has no linear layers"):
        inject(Bare(), RANK8, seed=0)


def test_missing_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name == "peft":
            raise ImportError(name)
        return plain(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(NovaError, match=r"requires PEFT.*novarl\[llm\]"):
        inject(load("tiny").model, RANK8, seed=0)
