"""The built-in decoder on the weights of other families, against transformers' own modules: what is computed, sampled,
learnt and saved; and what it must not take for its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from novarl.engines.local.kv_cache import KVCache, extent
from novarl.engines.local.runner import ROWS, ModelRunner
from novarl.models import adopt
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import modules_of, token_logprobs
from novarl.models.hugging_face import pretrained
from novarl.models.load import Policy, load, save
from novarl.models.lora import LoraSettings, adapter_weights, inject
from novarl.models.transformer import Decoder

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 257,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ADOPTED: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE),
    "llama tied": lambda: transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, pad_token_id=0),
    "llama 3": lambda: transformers.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "linear": lambda: transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    ),
    "wide heads": lambda: transformers.MistralConfig(**SHAPE, head_dim=32, sliding_window=None),
    "qwen 2": lambda: transformers.Qwen2Config(**SHAPE),
    "qwen 3": lambda: transformers.Qwen3Config(**SHAPE, head_dim=16, rms_norm_eps=1e-5),
}
LEFT: dict[str, Callable[[], Any]] = {
    "window": lambda: transformers.MistralConfig(**SHAPE, sliding_window=6),
    "some windows": lambda: transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "biases": lambda: transformers.LlamaConfig(**SHAPE, attention_bias=True),
    "biases in the MLP": lambda: transformers.LlamaConfig(**SHAPE, mlp_bias=True),
    "gelu": lambda: transformers.LlamaConfig(**SHAPE, hidden_act="gelu"),
    "yarn": lambda: transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "dynamic": lambda: transformers.LlamaConfig(
        **SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "another family": lambda: transformers.OlmoConfig(**SHAPE),
}


@pytest.fixture(scope="module")
def batch(flat: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(3)
    first = torch.randint(0, 256, (90,), generator=generator).tolist()
    rows = [first, [*first[:70], 7, 8, 9], torch.randint(0, 256, (17,), generator=generator).tolist(), [4]]
    columns = flat(rows)
    columns.weight = torch.randn(len(columns.tokens), generator=generator, dtype=torch.float64)
    return columns


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, batch: SimpleNamespace, sharpen: Callable[..., None]
) -> Callable[[str], str]:
    """Where a family's model lies, which knows the rows of `batch` nearly by heart."""
    made: dict[str, str] = {}

    def find(family: str) -> str:
        if family not in made:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config((ADOPTED | LEFT)[family]())
            for parameter in model.parameters():  # biases and norms as none is at first
                if parameter.ndim == 1:
                    parameter.data += 0.1 * torch.randn(parameter.shape)
            sharpen(model, batch.rows)
            path = tmp_path_factory.mktemp("model")
            model.save_pretrained(path, max_shard_size="50KB")  # in one file, Qwen 3 would be a model of ours
            ByteTokenizer().save_pretrained(str(path))
            made[family] = str(path)
        return made[family]

    return find


def theirs(folder: str, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("family", ADOPTED)
def test_log_probabilities_and_gradients_are_transformers_own(folder, batch, oracle, family: str) -> None:
    mine, original = load(folder(family), dtype="float64").model, theirs(folder(family), torch.float64)
    assert isinstance(mine, Decoder) and modules_of(mine) == "built-in"
    logp, _ = token_logprobs(mine, batch)
    expected = torch.cat([oracle(original, row) for row in batch.rows if len(row) > 1])
    assert expected.mean() > -0.5, "the model is not sharp"
    predicted = batch.prev >= 0
    # transformers' norms go through float32, whatever the weights are; all else is the same, the angles to the bit.
    torch.testing.assert_close(logp[predicted], expected, rtol=0, atol=1e-5)
    (logp * batch.weight).sum().backward()
    (expected * batch.weight[predicted]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in original.named_parameters()}
    assert gradients.keys() == dict(mine.named_parameters()).keys()
    for name, parameter in mine.named_parameters():
        assert parameter.grad is not None and gradients[name].abs().max() > 1e-3
        assert (parameter.grad - gradients[name]).norm() < 1e-5 * gradients[name].norm(), name


def last_logits(runner: ModelRunner, rows: list[list[int]]) -> Tensor:
    """The logits after each row, the last two tokens of which come one by one, beside the others."""
    cache = KVCache(ROWS, slots := extent(max(map(len, rows))), dtype=runner.cache_dtype)
    for row, prefill in enumerate(runner.prefill([tuple(row[:-2]) for row in rows])):
        cache.insert([row], prefill.cache, [prefill.row], length=len(prefill.prompt))
    idle = ROWS - len(rows)
    for back in (2, 1):
        fed = torch.tensor([*(row[-back] for row in rows), *[0] * idle])
        at = torch.tensor([*(len(row) - back for row in rows), *[2 - back] * idle])
        logits = runner.decode(fed, at, cache, [(0, ROWS, slots)])
    return logits[: len(rows)]


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", ADOPTED)
def test_sampling_is_lean_and_its_logits_are_transformers_own(folder, batch, family: str, adapted: bool) -> None:
    mine = load(folder(family)).model
    if adapted:
        inject(mine, LoraSettings(4, 8.0), seed=0)
        for weight in adapter_weights(mine).values():
            weight.copy_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        save(Policy(mine, ByteTokenizer(), "adapted", (257,), 512), path := Path(folder(family), "adapted"))
    original = theirs(str(path) if adapted else folder(family), torch.float32)
    runner, rows = ModelRunner(mine), [row for row in batch.rows if len(row) > 3]
    assert runner.reads_segments, "not the lean forward pass"
    with torch.no_grad():
        expected = torch.stack([original(torch.tensor([row])).logits[0, -1] for row in rows])
    torch.testing.assert_close(last_logits(runner, rows), expected, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("family", LEFT)
def test_what_would_be_another_model_is_left_to_transformers(folder, batch, oracle, family: str) -> None:
    mine = load(folder(family)).model
    assert not isinstance(mine, Decoder) and modules_of(mine).endswith("ForCausalLM")
    with torch.no_grad():
        logp, _ = token_logprobs(mine, batch)
        expected = torch.cat([oracle(theirs(folder(family), torch.float32), row) for row in batch.rows if len(row) > 1])
    torch.testing.assert_close(logp[batch.prev >= 0], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("family", [family for family in LEFT if "window" not in family] + ["half rotated"])
def test_another_model_is_not_even_tried(family: str) -> None:
    """`load` would notice by its logits too, so here nothing else is asked."""
    half = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0, "partial_rotary_factor": 0.5}
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=half) if family == "half rotated" else LEFT[family]()
    assert adopt.adopt(transformers.AutoModelForCausalLM.from_config(config)) is None


@pytest.mark.parametrize("fault", ["angles", "norm", "head"])
def test_a_decoder_that_computes_something_else_is_not_taken(folder, monkeypatch, fault: str) -> None:
    """Though every tensor has the right name and shape."""

    def wrongly(model: Any) -> Decoder | None:
        found = adopt.adopt(model)
        assert found is not None
        if fault == "angles":
            object.__setattr__(found.config, "rope_frequencies", tuple(2 * x for x in found.config.rope_frequencies))
        elif fault == "norm":
            found.model.norm.eps = 0.1
        else:
            found.lm_head.weight = nn.Parameter(found.lm_head.weight.roll(1, 0))
        return found

    monkeypatch.setattr(pretrained, "adopt", wrongly)
    assert type(load(folder("llama")).model).__name__ == "LlamaForCausalLM"


def test_code_from_elsewhere_is_not_taken_by_its_name(folder) -> None:
    original = theirs(folder("llama"), torch.float32)
    assert adopt.adopt(original) is not None
    original.__class__ = type("LlamaForCausalLM", (type(original),), {})
    assert adopt.adopt(original) is None


def test_weights_are_shared_and_not_copied(folder) -> None:
    original = theirs(folder("llama tied"), torch.float32)
    decoder = adopt.adopt(original)
    assert decoder is not None and decoder.lm_head.weight is decoder.model.embed_tokens.weight
    places = {name: parameter.data_ptr() for name, parameter in original.named_parameters()}
    assert {name: parameter.data_ptr() for name, parameter in decoder.named_parameters()} == places


@pytest.mark.parametrize("stated", [["LlamaForCausalLM"], ["LlamaModel"], None])
@pytest.mark.parametrize("family", ["llama tied", "llama 3", "qwen 2", "qwen 3"])
def test_it_is_saved_as_what_it_was(folder, tmp_path: Path, family: str, stated: list[str] | None) -> None:
    """Under the name of its class too, whatever its configuration calls it."""
    name = shutil.copytree(folder(family), tmp_path / "given")
    config = json.loads((name / "config.json").read_text())
    config |= {"architectures": stated}
    (name / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    policy, original = load(str(name)), theirs(str(name), torch.float32)
    with torch.no_grad():
        for both in zip(policy.model.parameters(), original.parameters(), strict=True):
            for parameter in both:
                parameter += 0.01
    save(policy, tmp_path / "mine")
    original.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        mine, expected = (json.loads((tmp_path / who / name).read_text()) for who in ("mine", "theirs"))
        assert mine == expected, name
    again = theirs(str(tmp_path / "mine"), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), original.parameters(), strict=True))
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["architectures"] == [type(original).__name__]
    back = load(str(tmp_path / "mine"))
    assert isinstance(back.model, Decoder) and (back.eos_ids, back.context) == (policy.eos_ids, policy.context)


def test_checkpointed_layers_have_the_same_gradient(folder, batch) -> None:
    found = []
    for checkpointed in (False, True):
        model = load(folder("qwen 2"), gradient_checkpointing=checkpointed).model
        assert isinstance(model, Decoder) and model.model.gradient_checkpointing == checkpointed
        token_logprobs(model, batch)[0].sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(recomputed, plain)
