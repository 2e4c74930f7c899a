"""What is refused of other people's models, each by name, and that a lost or leaking packing is noticed."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from novarl.core.errors import NovaError
from novarl.engines.local.runner import ModelRunner
from novarl.kernels import fused, products
from novarl.kernels.accumulation import fused_accumulation
from novarl.kernels.attention import causal_attention
from novarl.kernels.packing import packing_of
from novarl.kernels.prefix import Group
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import packs, token_logprobs
from novarl.models.hugging_face import packed, pretrained, probes
from novarl.models.hugging_face.packed import enable_packing, packing_sdpa
from novarl.models.load import load
from novarl.models.transformer import Embedding

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 257,
    "bos_token_id": None,
}

SIX = packing_of([Group(4), Group(2)], torch.device("cpu"))


def llama(**changes: Any) -> transformers.LlamaConfig:
    """One that the built-in decoder runs, unless it has biases."""
    return transformers.LlamaConfig(**{**SHAPE, "max_position_embeddings": 64, **changes})


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What transformers logs, its tables among it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    transformers.utils.logging.add_handler(handler)
    yield lines
    transformers.utils.logging.remove_handler(handler)


def write(directory: Path, config: Any, *, auto: Any = transformers.AutoModelForCausalLM) -> str:
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(directory)
    ByteTokenizer().save_pretrained(directory)
    return str(directory)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), encoding="utf-8")


def test_all_eos_ids_and_the_context_are_read(tmp_path: Path) -> None:
    policy = load(write(tmp_path, llama(eos_token_id=[7, 9])))
    assert policy.eos_ids == (7, 9, 257)
    assert policy.context == 64
    edit(tmp_path / "generation_config.json", eos_token_id=11)
    assert load(str(tmp_path)).eos_ids == (11, 257)


def test_a_missing_pad_token_becomes_eos(tmp_path: Path) -> None:
    name = write(tmp_path, llama())
    assert load(name).tokenizer.pad_token_id == 256
    edit(tmp_path / "tokenizer_config.json", pad_token=None)
    assert load(name).tokenizer.pad_token_id == 257


def test_a_missing_eos_token_is_refused(tmp_path: Path) -> None:
    name = write(tmp_path, llama())
    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    with pytest.raises(NovaError, match="no eos token") as raised:
        load(name)
    assert "tokenizer_config.json" in str(raised.value)


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NovaError, match="262 tokens, the model only 261"):
        load(write(tmp_path, llama(vocab_size=261)))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """transformers would fill them with noise and warn."""
    name = write(tmp_path, llama())
    edit(tmp_path / "config.json", num_hidden_layers=3)
    with pytest.raises(NovaError, match=r"tensor 'model\.layers\.2\.\S+' is missing"):
        load(name)


DAMAGE: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 3}, "num_attention_heads is 3: The hidden size (32) is not a multiple of"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0: "),
    ({"eos_token_id": "x"}, "Field 'eos_token_id' with value 'x' doesn't match any type"),
    ({"rms_norm_eps": "1e-5"}, "Field 'rms_norm_eps' expected float, got str (value: '1e-5') (fix config.json, or"),
    ({"max_position_embeddings": None}, "Field 'max_position_embeddings' expected int, got NoneType"),
    ({"pad_token_id": 9999}, "pad_token_id is 9999: Padding_idx must be within num_embeddings"),
    ({"rope_parameters": {"rope_type": "foo", "rope_theta": 1.0}}, "rope_parameters is {'rope_type': 'foo', 'rope_th"),
    ({"rope_parameters": 3}, "Field 'rope_parameters' with value 3"),
    ({"hidden_act": "nope"}, "hidden_act is 'nope': 'nope' is missing"),
    ({"layer_types": 3}, "layer_types is 3: 'int' object is not iterable"),
    ({"dtype": "nope"}, "dtype is 'nope': "),
    ({"model_type": "telepathy"}, "The checkpoint you are trying to load has model type `telepathy`"),
]


@pytest.mark.parametrize(("changes", "said"), DAMAGE, ids=[str(changes) for changes, _ in DAMAGE])
def test_a_damaged_configuration_is_refused_by_field(
    tmp_path: Path, told: list[str], changes: dict[str, Any], said: str
) -> None:
    """Whatever transformers makes of it, a dozen kinds of errors; and nothing else is said."""
    name = write(tmp_path, llama())
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(NovaError) as raised:
        load(name)
    assert str(raised.value).startswith(f"{name}/config.json: no causal language model could be loaded: {said}")
    assert raised.value.fix and len(str(raised.value)) < 500
    assert told == []


def test_an_odd_head_size_is_refused(tmp_path: Path, told: list[str]) -> None:
    """By transformers itself from 5.18 on, before that by the tensors it does not fit."""
    name = write(tmp_path, llama())
    edit(tmp_path / "config.json", head_dim=7)
    newer = "RoPE requires an even rotary dimension, but got `head_dim`=7"
    older = r"tensor '\S+\.k_proj\.weight' is 32 by 32 in the weights, but 28 by 32 according to config.json"
    with pytest.raises(NovaError, match=f"{newer}|{older}"):
        load(name)
    assert told == []


def test_layers_that_have_no_type_are_refused(tmp_path: Path) -> None:
    name = write(tmp_path, transformers.Qwen2Config(**SHAPE, num_key_value_heads=2))
    edit(tmp_path / "config.json", num_hidden_layers=3)
    with pytest.raises(NovaError, match=r"`num_hidden_layers` \(3\) must be equal to the number of `layer_types`"):
        load(name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"vocab_size": 300},
            "tensor 'lm_head.weight' is 320 by 32 in the weights, but 300 by 32 according to config.json",
        ),
        (
            {"hidden_size": 10**9},
            "tensor 'lm_head.weight' is 320 by 32 in the weights, but 320 by 1000000000 according",
        ),
        ({"num_key_value_heads": 3}, "tensor 'model.layers.0.self_attn.k_proj.weight' is 32 by 32 in the weights, but"),
        ({"num_hidden_layers": 1}, "tensor 'model.layers.1.input_layernorm.weight' in the weights does not exist"),
        ({"num_hidden_layers": -1}, "tensor 'model.layers.0.input_layernorm.weight' in the weights does not exist"),
    ],
)
def test_weights_of_another_configuration_are_refused_by_tensor(
    tmp_path: Path, told: list[str], changes: dict[str, Any], said: str
) -> None:
    """transformers would print a table, and go on where tensors are left over."""
    name = write(tmp_path, llama())
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(NovaError) as raised:
        load(name)
    assert str(raised.value).startswith(f"{name}: {said}") and raised.value.fix
    assert told == []


def test_experts_that_do_not_stack_are_refused(tmp_path: Path) -> None:
    name = write(tmp_path, transformers.MixtralConfig(**SHAPE, num_key_value_heads=4, num_local_experts=2))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"] = torch.ones(5, 32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        NovaError, match=r"weights to be stacked, such as those of experts, are missing or have different shapes"
    ):
        load(name)


def add(directory: Path, *names: str) -> None:
    file = directory / "model.safetensors"
    save_file({**load_file(file), **{name: torch.ones(4) for name in names}}, file, metadata={"format": "pt"})


LAYERS = "model.layers.{}.self_attn.{}"


@pytest.mark.parametrize(
    "name", [LAYERS.format(0, "q_proj.bias"), LAYERS.format(1, "q_norm.weight"), "lm_head.bias", "model.norm.bias"]
)
def test_tensors_that_the_configuration_leaves_out_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, llama())
    add(tmp_path, name)
    with pytest.raises(NovaError, match=f"tensor '{name}' in the weights does not exist"):
        load(str(tmp_path))


def test_tensors_that_serve_something_else_are_left_out(tmp_path: Path, told: list[str]) -> None:
    """Old buffers, heads of other tasks, and layers for tokens after the next."""
    write(tmp_path, llama())
    add(tmp_path, LAYERS.format(0, "rotary_emb.inv_freq"), LAYERS.format(0, "masked_bias"), "score.weight")
    add(tmp_path, "v_head.summary.weight", "mtp.layers.0.fc.weight", "model.mtp_layers.0.norm.weight", "visual.patch")
    add(tmp_path, LAYERS.format(2, "q_proj.weight"))
    with pytest.raises(NovaError, match=r"tensor 'model.layers.2.self_attn.q_proj.weight' in the weights"):
        load(str(tmp_path))
    edit(tmp_path / "config.json", num_nextn_predict_layers=1)
    assert load(str(tmp_path)).context == 64
    assert told == []


@pytest.mark.parametrize("auto", [transformers.AutoModel, transformers.AutoModelForSequenceClassification])
def test_weights_of_something_else_are_no_causal_language_model(tmp_path: Path, auto: Any) -> None:
    name = write(tmp_path, transformers.BertConfig(**{**SHAPE, "bos_token_id": 0}), auto=auto)
    with pytest.raises(NovaError, match=r"Bert\w+ is not a causal language model: tensor 'cls\.\S+' is missing"):
        load(name)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("generation_config.json", "{", "not valid JSON"),
        ("generation_config.json", "[]", "not a JSON object"),
        ("generation_config.json", '{"eos_token_id": [7, "x"]}', "eos_token_id contains 'x', which is not a token id"),
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, file: str, text: str, said: str) -> None:
    name = write(tmp_path, llama())
    (tmp_path / file).write_text(text)
    with pytest.raises(NovaError) as raised:
        load(name)
    assert str(raised.value).startswith(f"{name}/{file}: {said}") and raised.value.fix


SHORT, LONG = [1.0, 1.0, 1.0, 1.0], [4.0, 3.0, 2.0, 1.0]
TURNING: dict[str, Any] = {
    "dynamic": lambda: llama(
        max_position_embeddings=66, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
    ),
    "longrope": lambda: llama(
        max_position_embeddings=264,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": SHORT,
            "long_factor": LONG,
            "factor": 4.0,
            "original_max_position_embeddings": 66,
        },
    ),
    "phi3": lambda: transformers.Phi3Config(
        **SHAPE,
        num_key_value_heads=4,
        pad_token_id=0,
        max_position_embeddings=264,
        original_max_position_embeddings=66,
        rope_scaling={"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
    ),
}


@pytest.mark.parametrize("rotation", TURNING)
def test_rotations_that_change_with_length_limit_the_context(
    tmp_path: Path, flat: Any, oracle: Any, sharpen: Any, rotation: str
) -> None:
    """Up to there each row has the numbers it has alone, whatever is learnt or sampled beside it; beyond, none has."""
    generator = torch.Generator().manual_seed(3)
    lengths = (66, 65, 17, 2, 200 if rotation == "dynamic" else 67)
    *rows, beyond = (torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths)
    torch.manual_seed(0)
    original = transformers.AutoModelForCausalLM.from_config(TURNING[rotation]())
    sharpen(original, rows)
    original.eval().save_pretrained(tmp_path)
    ByteTokenizer().save_pretrained(str(tmp_path))
    policy = load(str(tmp_path))
    assert policy.context == 66
    because = "not the stated 264: with longrope a longer row would change the rotary embeddings of the others"
    assert policy.notes() == ([] if rotation == "dynamic" else [f"model context: 66 tokens ({because})"])
    with torch.no_grad():
        alone = torch.cat([oracle(original, row) for row in rows])
        assert alone.mean() > -0.5, "the model is not sharp"
        batch = flat(rows)
        for layout in ("auto", "padded"):
            logp, _ = token_logprobs(policy.model, batch, layout=layout)
            torch.testing.assert_close(logp[batch.prev >= 0], alone, rtol=0, atol=1e-3)
        prompts = [tuple(rows[0][:65]), tuple(rows[2])]
        for prompt, prefill in zip(prompts, ModelRunner(policy.model).prefill(prompts), strict=True):
            expected = original(torch.tensor([prompt])).logits[0, -1]
            torch.testing.assert_close(prefill.logits, expected, rtol=1e-4, atol=1e-3)
        batch = flat([*rows, beyond])
        logp, _ = token_logprobs(policy.model, batch)
        assert (logp[batch.prev >= 0][: len(alone)] - alone).abs().max() > 0.1


def test_a_prompt_may_end_where_the_table_of_positions_does(tmp_path: Path) -> None:
    """It is padded to a multiple of some tokens, of which none has a place there."""
    policy = load(write(tmp_path, transformers.GPT2Config(**{**SHAPE, "bos_token_id": 257}, n_positions=66)))
    (prefill,) = ModelRunner(policy.model).prefill([prompt := tuple(range(66))])
    with torch.no_grad():
        expected = policy.model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(prefill.logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stated", [0, -4])
def test_a_context_without_room_is_refused(tmp_path: Path, stated: int) -> None:
    name = write(tmp_path, llama())
    edit(tmp_path / "config.json", max_position_embeddings=stated)
    with pytest.raises(NovaError, match=f"config.json: max_position_embeddings is {stated}, but must be positive"):
        load(name)


@pytest.mark.parametrize(
    ("family", "kept", "said"),
    [
        (transformers.LlamaConfig, False, "the directory contains no tokenizer files"),
        (transformers.Qwen2Config, False, "the directory contains no tokenizer files"),
        (transformers.LlamaConfig, True, "no tokenizer could be loaded: Couldn't instantiate the backend tokenizer"),
        (transformers.Qwen2Config, True, "the tokenizer files contain no vocabulary"),
    ],
)
def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, family: Any, kept: bool, said: str) -> None:
    """For some families transformers would make one up, of a single token."""
    name = write(tmp_path, family(**SHAPE, num_key_value_heads=2))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / file).unlink()
    if kept:
        (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(NovaError) as raised:
        load(name)
    assert str(raised.value).startswith(f"{name}: {said}")
    assert raised.value.fix == "copy tokenizer.json and tokenizer_config.json from the original model"


@pytest.mark.parametrize(
    ("config", "attribute"),
    [
        (transformers.Gemma2Config(**SHAPE, head_dim=8, num_key_value_heads=4), "final_logit_softcapping=30.0"),
        (transformers.GraniteConfig(**SHAPE, logits_scaling=4.0), "logits_scaling=4.0"),
        (transformers.CohereConfig(**SHAPE), "logit_scale=0.0625"),
    ],
    ids=["gemma2", "granite", "cohere"],
)
def test_logits_changed_after_the_head_are_refused_by_name(tmp_path: Path, config: Any, attribute: str) -> None:
    with pytest.raises(NovaError) as raised:
        load(write(tmp_path, config))
    assert config.model_type in raised.value.what
    assert attribute in raised.value.what


def test_logits_changed_under_an_unknown_name_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LOGIT_TRANSFORMS", {})
    with pytest.raises(NovaError, match="granite are not the product of its last hidden states and its head"):
        load(write(tmp_path, transformers.GraniteConfig(**SHAPE, logits_scaling=4.0)))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**SHAPE, "bos_token_id": 0})
    with pytest.raises(NovaError, match="bert is not a causal language model"):
        load(write(tmp_path, config))


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=320, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=2)
    with pytest.raises(NovaError, match="no causal language model could be loaded"):
        load(write(tmp_path, config, auto=transformers.AutoModelForSeq2SeqLM))


def test_dropout_and_router_jitter_are_off_even_in_training_mode(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        **SHAPE, num_key_value_heads=4, num_local_experts=2, attention_dropout=0.5, router_jitter_noise=0.5
    )
    model = load(write(tmp_path, config)).model
    assert not model.training
    model.train()
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("sliding_window", 8), ("softcap", 50.0), ("s_aux", torch.ones(4)), ("position_bias", torch.ones(1)),
     ("dropout", 0.1), ("never_heard_of", 1)],
)  # fmt: skip
def test_packed_attention_refuses_by_name_what_it_does_not_implement(argument: str, value: object) -> None:
    query = torch.randn(1, 4, 6, 8)
    module = torch.nn.Module()
    mixed, _ = packing_sdpa(module, query, query, query, None, packed_sequences=SIX, position_ids=None)
    assert mixed.shape == (1, 6, 4, 8)
    arguments = {argument: value}
    with pytest.raises(NovaError, match=f"packed attention does not implement {argument}, which Module uses"):
        packing_sdpa(module, query, query, query, None, packed_sequences=SIX, **arguments)
    module.is_causal = False
    with pytest.raises(NovaError, match="is_causal=False"):
        packing_sdpa(module, query, query, query, None, packed_sequences=SIX)


def test_what_the_configuration_hides_the_attention_call_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pretrained, packed):
        monkeypatch.setattr(module, "packing_obstacle", lambda config: None)
    # Which the built-in decoder would not run without a window either: it has another activation.
    config = transformers.MistralConfig(**SHAPE, num_key_value_heads=4, sliding_window=6, hidden_act="gelu")
    policy = load(write(tmp_path, config))
    assert not packs(policy.model)
    assert policy.padded_because is not None
    assert "packed attention does not implement sliding_window" in policy.padded_because


def test_lost_lengths_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that does not pass keywords on to its attention would attend across sequences."""
    forward = transformers.models.llama.modeling_llama.LlamaAttention.forward

    def forgetful(self: Any, *args: Any, packed_sequences: object = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaAttention, "forward", forgetful)
    policy = load(write(tmp_path, llama(attention_bias=True)))
    assert not packs(policy.model)
    assert policy.padded_because == "LlamaAttention does not pass packed_sequences to its attention"


def test_packing_that_leaks_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(query: Any, key: Any, value: Any, lengths: object, *, scale: float | None) -> torch.Tensor:
        return causal_attention(query, key, value, scale=scale)

    monkeypatch.setattr(packed, "packed_attention", leaking)
    policy = load(write(tmp_path, llama(attention_bias=True)))
    assert policy.padded_because is not None
    assert policy.padded_because.startswith("packing changes the hidden states by")
    assert not packs(policy.model)
    monkeypatch.undo()
    assert enable_packing(policy.model) is None
    assert packs(policy.model)


@pytest.mark.parametrize(
    "config",
    [
        llama(attention_bias=True, tie_word_embeddings=True, pad_token_id=5),
        llama(attention_bias=True, tie_word_embeddings=False),
        llama(tie_word_embeddings=True, pad_token_id=5),
        transformers.Gemma3TextConfig(
            **SHAPE, head_dim=8, num_key_value_heads=4, tie_word_embeddings=True, pad_token_id=5, sliding_window=64
        ),
    ],
    ids=["tied", "untied", "adopted", "gemma3"],
)
def test_a_vocabularys_gradient_is_that_of_autograd(tmp_path: Path, config: Any) -> None:
    """Added where it belongs, by our own embedding in place of a plain one: its row of padding stays without the
    lookup's gradient, and one that scales is left alone."""
    name = write(tmp_path, config)
    tokens = torch.tensor([5, 60, 61, 60, 7, 8])
    batch = SimpleNamespace(
        tokens=tokens,
        position_ids=torch.arange(6),
        prev=torch.arange(6) - 1,
        cu_seqlens=torch.tensor([0, 6]),
    )
    found: list[list[torch.Tensor]] = []
    for around in (fused_accumulation, nullcontext):
        model = load(name, dtype="float64").model
        for _ in range(2):
            with around():
                token_logprobs(model, batch)[0].sum().backward()
        table = model.model.embed_tokens
        found.append([weight.grad for weight in {id(w): w for w in (table.weight, model.lm_head.weight)}.values()])
    assert isinstance(table, Embedding) == (config.model_type == "llama")
    for mine, autograds in zip(*found, strict=True):
        assert autograds.abs().max() > 0.1
        torch.testing.assert_close(mine, autograds, rtol=1e-12, atol=1e-12)


def test_linear_layers_learn_through_onednn_and_sample_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning brings full rows; sampling any number of them, of which each must have the same bits."""
    monkeypatch.setattr(products, "has_fast_products", lambda: True)
    seen: list[int] = []
    product = fused.product
    monkeypatch.setattr(fused, "product", lambda x, weight: (seen.append(x.shape[-2]), product(x, weight))[1])
    name = write(tmp_path, llama(attention_bias=True, initializer_range=0.3))
    original = transformers.AutoModelForCausalLM.from_pretrained(name)
    for layer in original.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.o_proj):
            torch.nn.init.normal_(projection.bias)
    original.save_pretrained(name)
    model = load(name).model
    tokens = torch.arange(70) % 50
    batch = SimpleNamespace(
        tokens=tokens,
        position_ids=torch.arange(70) % 35,
        prev=torch.arange(70) - 1,
        cu_seqlens=torch.tensor([0, 35, 70]),
    )
    batch.prev[35] = -1
    seen.clear()
    logp, _ = token_logprobs(model, batch)
    assert seen == [128] * 14, "seven layers in each of two blocks"
    logp.sum().backward()
    logits = original(tokens.view(2, 35)).logits[:, :-1].log_softmax(-1)
    expected = logits.gather(-1, tokens.view(2, 35)[:, 1:, None])[..., 0]
    torch.testing.assert_close(logp[batch.prev >= 0], expected.flatten(), rtol=1e-4, atol=1e-4)
    expected.sum().backward()
    for mine, theirs in zip(model.parameters(), original.parameters(), strict=True):
        assert theirs.grad.norm() > 0 and (mine.grad - theirs.grad).norm() < 1e-4 * theirs.grad.norm()
    seen.clear()
    ModelRunner(model).prefill([tuple(range(64))] * 2)
    assert not seen


def test_generate_still_works_with_left_padding(tmp_path: Path) -> None:
    """Outside of packed calls the model is transformers' own, masks included."""
    policy = load(write(tmp_path, llama(attention_bias=True, initializer_range=0.3)))
    assert packs(policy.model)
    alone = policy.model.generate(torch.tensor([[5, 6]]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    padded, mask = torch.tensor([[256, 256, 5, 6], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    both = policy.model.generate(
        padded, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=256
    )
    assert torch.equal(both[0, 2:], alone[0])
