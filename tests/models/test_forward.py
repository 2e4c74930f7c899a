"""One gradient, whatever the layout: packed and padded against one plain forward pass per sequence.

On sharpened models, in float64 (the sharp one) and float32; every family is saved and loaded back as a user's would be.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
import transformers
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.core.types import Sampling
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.kernels.products import FULL, has_fast_products
from novarl.models import forward, transformer
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.compiled import compile_layers
from novarl.models.forward import Layout, attention_of, backbone, hidden_states, packs, token_logprobs
from novarl.models.hugging_face.pretrained import load_pretrained
from novarl.models.load import Policy, load, save
from novarl.models.transformer import Decoder, DecoderConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 257,
}
HEADS = {**SHAPE, "head_dim": 16}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**HEADS),
    "llama": lambda: transformers.LlamaConfig(**SHAPE, bos_token_id=None),
    "biased": lambda: transformers.LlamaConfig(**SHAPE, bos_token_id=None, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, bos_token_id=None),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=320, n_embd=48, n_layer=2, n_head=4, n_positions=512, eos_token_id=257, bos_token_id=None
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, bos_token_id=None, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(
        **HEADS, pad_token_id=0, bos_token_id=None, sliding_window=6, final_logit_softcapping=None
    ),
}
PACKED = ("decoder", "qwen3", "llama", "biased", "qwen2", "gpt2", "qwen3_moe")
PADDED = {"mistral": "sliding_window=6", "gemma2": "layer_types=['sliding_attention']"}
LENGTHS = (9, 1, 0, 17, 24, 2, 0)


@pytest.fixture(scope="module")
def batch(flat: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """Seven sequences, some of one token or none, the last one empty; a weight for every token."""
    generator = torch.Generator().manual_seed(3)
    columns = flat([torch.randint(0, 256, (n,), generator=generator).tolist() for n in LENGTHS])
    columns.weight = torch.randn(len(columns.tokens), generator=generator, dtype=torch.float64)
    return columns


@pytest.fixture(scope="module")
def loaded(
    tmp_path_factory: pytest.TempPathFactory, batch: SimpleNamespace, sharpen: Callable[..., None]
) -> Callable[..., Policy]:
    """A family's tiny model that knows the rows of `batch` nearly by heart, saved and loaded back in a dtype."""
    directories: dict[str, Path] = {}

    def make(family: str, dtype: str = "float32", **options: Any) -> Policy:
        if family not in directories:
            torch.manual_seed(0)
            built = Decoder(DecoderConfig(**HEADS, initializer_range=0.15)) if family == "decoder" else None
            model = built or transformers.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
            sharpen(model, batch.rows)
            directories[family] = tmp_path_factory.mktemp(family)
            save(Policy(model, ByteTokenizer(), family, eos_ids=(257,), context=512), directories[family])
        if family == "qwen3":  # `load` would read it without transformers, since the tokenizer is the built-in one
            stored = {"float32": torch.float32, "float64": torch.float64}[dtype]
            model, tokenizer, why = load_pretrained(
                str(directories[family]), dtype=stored, device=torch.device("cpu"), **options
            )
            return Policy(model, tokenizer, family, eos_ids=(257,), context=512, padded_because=why)
        return load(str(directories[family]), dtype=dtype, **options)

    return make


def gradients(model: nn.Module, batch: SimpleNamespace, layout: str = "auto") -> dict[str, Tensor]:
    model.zero_grad()
    logp, _ = token_logprobs(model, batch, layout=layout)
    (logp * batch.weight.to(logp.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def oracle_gradients(oracle: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    def compute(model: nn.Module, batch: SimpleNamespace) -> dict[str, Tensor]:
        model.zero_grad()
        logp = [oracle(model, row) for row in batch.rows if len(row) > 1]
        assert torch.cat(logp).mean() > -0.5, "the model is not sharp"
        (torch.cat(logp) * batch.weight[batch.prev >= 0].to(logp[0].dtype)).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    return compute


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, total: float, each: float) -> None:
    assert all(gradient.norm() > 0 for gradient in theirs.values())
    error = {name: (ours[name] - theirs[name]).norm() for name in theirs}
    worst = max(error, key=lambda name: float(error[name] / theirs[name].norm()))
    assert error[worst] <= each * theirs[worst].norm(), f"{worst}: {error[worst] / theirs[worst].norm():.1e}"
    whole = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    assert torch.stack(list(error.values())).norm() <= total * whole


PRECISION = pytest.mark.parametrize(
    ("dtype", "total", "each"), [("float32", 5e-6, 2e-5), ("float64", 1e-6, 1e-6)], ids=["fp32", "fp64"]
)


@PRECISION
@pytest.mark.parametrize("family", PACKED)
def test_packed_and_padded_gradients_equal_those_of_single_sequences(
    loaded, batch, oracle_gradients, family: str, dtype: str, total: float, each: float
) -> None:
    policy = loaded(family, dtype)
    assert packs(policy.model)
    assert policy.padded_because is None
    expected = oracle_gradients(policy.model, batch)
    for layout in ("packed", "padded"):
        assert_equal(gradients(policy.model, batch, layout), expected, total=total, each=each)


@PRECISION
@pytest.mark.parametrize("family", PADDED)
def test_sliding_windows_are_padded_and_refused_by_name(
    loaded, batch, oracle_gradients, family: str, dtype: str, total: float, each: float
) -> None:
    policy = loaded(family, dtype)
    assert policy.padded_because == PADDED[family]
    policy.model.packed_kernel = "flash"  # which only packed sequences would take
    assert attention_of(policy.model) == policy.model.config._attn_implementation != "flash"
    assert_equal(gradients(policy.model, batch), oracle_gradients(policy.model, batch), total=total, each=each)
    with pytest.raises(NovaError, match=f"{type(policy.model).__name__} does not support packed sequences"):
        gradients(policy.model, batch, "packed")


def test_positions_that_are_not_reset_are_caught(loaded, batch, oracle_gradients) -> None:
    """GPT-2's positions are absolute; rotary ones would hide a shift of a whole sequence."""
    model = loaded("gpt2", "float64").model
    shifted = SimpleNamespace(**{**vars(batch), "position_ids": torch.arange(len(batch.tokens))})
    with pytest.raises(AssertionError):
        assert_equal(gradients(model, shifted), oracle_gradients(model, batch), total=1e-6, each=1e-6)


def test_attention_across_sequences_is_caught(loaded, batch, oracle_gradients, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaking(query: Tensor, key: Tensor, value: Tensor, lengths: object, *, last: bool) -> Tensor:
        return transformer.causal_attention(query, key, value)

    model = loaded("decoder", "float64").model
    monkeypatch.setattr(transformer.Attention, "attend_packed", staticmethod(leaking))
    with pytest.raises(AssertionError):
        assert_equal(gradients(model, batch), oracle_gradients(model, batch), total=1e-6, each=1e-6)


@pytest.mark.parametrize("family", ["decoder", "llama", "biased", "gpt2"])
def test_gradient_checkpointing_changes_nothing(loaded, batch, family: str) -> None:
    """Recomputed during the backward pass, the attention must still know where sequences end; GPT-2 has dropout."""
    plain, checkpointed = loaded(family, "float64"), loaded(family, "float64", gradient_checkpointing=True)
    calls = []
    layer = next(m for name, m in checkpointed.model.named_modules() if name.endswith((".layers.0", ".h.0")))
    attention = getattr(layer, "self_attn", None) or layer.attn
    attention.register_forward_pre_hook(lambda *_: calls.append(1))
    ours = gradients(checkpointed.model, batch, "packed")
    assert len(calls) == 2, "nothing was recomputed"
    assert_equal(ours, gradients(plain.model, batch, "packed"), total=1e-12, each=1e-12)


@pytest.mark.usefixtures("traced_only")
@pytest.mark.parametrize(("family", "total"), [("decoder", 1e-12), ("biased", 1e-5)])
def test_compiled_layers_learn_the_same_from_graphs_for_all_lengths(
    loaded, batch, flat, family: str, total: float
) -> None:
    """And sampling compiles nothing. Llama's norms and angles are float32 in any model, so their rounding shows."""
    compiled = loaded(family, "float64")
    compile_layers(compiled.model)
    plain = loaded(family, "float64")  # as a reference is, after the policy
    before = graphs()
    made = []
    doubled, alike = [row + row[::-1] for row in batch.rows], [batch.rows[4]] * 3
    for rows in (batch.rows, doubled, batch.rows[3:], doubled[3:5], alike, alike[:2]):
        columns = flat(rows)
        columns.weight = torch.ones(len(columns.tokens), dtype=torch.float64)
        ours, theirs = gradients(compiled.model, columns), gradients(plain.model, columns)
        assert_equal(ours, theirs, total=total, each=10 * total)
        made.append(graphs())
    assert made[0] > before, "nothing was compiled"
    assert made[1] == made[-1], "each length is compiled anew"

    drawn = [sample(policy, batch.rows[3]) for policy in (compiled, plain)]
    assert drawn[0] == drawn[1] and graphs() == made[-1]


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def sample(policy: Policy, prompt: list[int]) -> tuple[int, ...]:
    engine = LocalEngine(policy.model, policy.tokenizer, eos_ids=policy.eos_ids, context=policy.context)
    return sample_all(engine, [(prompt, Sampling(max_tokens=6), "0")])[0].tokens


def test_what_cannot_be_compiled_is_refused(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NovaError, match="the layers of Linear cannot be identified"):
        compile_layers(nn.Linear(2, 2))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NovaError, match=r"compile=true: there is no C\+\+ compiler"):
        compile_layers(loaded("decoder").model)


@pytest.mark.parametrize("family", ["decoder", "gpt2", "mistral"])
def test_bfloat16_computes_in_bfloat16_over_float32_weights(loaded, batch, family: str) -> None:
    model = loaded(family).model
    exact, _ = token_logprobs(model, batch)
    logp, entropy = token_logprobs(model, batch, compute_dtype=torch.bfloat16)
    assert logp.dtype == entropy.dtype == torch.float32
    difference = (logp - exact).abs()
    assert 1e-4 < difference.max() < 0.3, "neither float32 nor wrong"
    logp.sum().backward()
    assert all(p.grad.dtype == p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("family", ["decoder", "llama", "biased"])
def test_products_that_are_compiled_have_full_rows(loaded, batch, family: str) -> None:
    """Or programs would be made for every number of tokens: in bfloat16, and in float32 where oneDNN multiplies."""
    model = loaded(family).model
    multiplied: dict[torch.dtype, set[int]] = {torch.float32: set(), torch.bfloat16: set()}
    dtypes = list(multiplied)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            module.register_forward_hook(lambda _, __, out: multiplied[dtypes[-1]].add(out.shape[-2]))
    wanted = torch.zeros_like(batch.tokens, dtype=torch.bool)
    wanted[::3] = True
    for _ in range(2):
        dtypes.reverse()
        logp, _ = token_logprobs(model, batch, wanted=wanted, compute_dtype=dtypes[-1])
        model.zero_grad()
        logp.sum().backward()
        assert logp[wanted & (batch.prev >= 0)].all() and all(p.grad.isfinite().all() for p in model.parameters())
    assert all(rows % FULL == 0 for rows in multiplied[torch.bfloat16])
    assert any(rows % FULL for rows in multiplied[torch.float32]) != has_fast_products()


def test_columns_are_aligned_with_their_tokens(loaded, batch, oracle) -> None:
    model = loaded("decoder", "float64").model
    with torch.no_grad():
        logp, entropy = token_logprobs(model, batch, chunk=7)
        expected = torch.cat([oracle(model, row) for row in batch.rows if len(row) > 1])
    predicted = batch.prev >= 0
    torch.testing.assert_close(logp[predicted], expected)
    assert torch.equal(logp[~predicted], torch.zeros(5, dtype=torch.float64))
    assert torch.equal(entropy[~predicted], torch.zeros(5, dtype=torch.float64))
    assert (entropy[predicted] > 0).all()


def test_temperature_divides_the_logits(loaded, batch) -> None:
    model = loaded("decoder", "float64").model
    with torch.no_grad():
        logp, entropy = token_logprobs(model, batch, temperature=2.0)
        hidden = hidden_states(model, batch.tokens, batch.position_ids, batch.cu_seqlens)
    expected = (model.lm_head(hidden) / 2.0).log_softmax(-1)
    last = len(batch.tokens) - 1
    torch.testing.assert_close(logp[last], expected[last - 1, batch.tokens[last]])
    torch.testing.assert_close(entropy[last], -(expected.exp() * expected).sum(-1)[last - 1])


def test_unwanted_tokens_cost_no_product_with_the_vocabulary(loaded, batch, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("decoder", "float64").model
    whole, _ = token_logprobs(model, batch)
    rows = []
    chunked = forward.chunked_scores
    monkeypatch.setattr(
        forward,
        "chunked_scores",
        lambda hidden, *args, **kw: rows.append(len(hidden)) or chunked(hidden, *args, **kw),
    )
    wanted = torch.zeros(len(batch.tokens), dtype=torch.bool)
    wanted[[0, 3, 4, 20]] = True  # token 0 has no predecessor
    for form in (wanted, wanted.nonzero().flatten()):
        logp, entropy = token_logprobs(model, batch, wanted=form)
        assert torch.equal(logp.nonzero().flatten(), torch.tensor([3, 4, 20]))
        torch.testing.assert_close(logp[[3, 4, 20]], whole[[3, 4, 20]])
        assert entropy[0] == 0
    assert rows == [3, 3]


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
@pytest.mark.parametrize("family", ["decoder", "llama", "biased"])
def test_hidden_states_at_some_places_are_those_of_all(loaded, batch, family: str, layout: Layout) -> None:
    """Values and gradient, of places in any order, some of them twice; the built-in decoder computes no others."""
    model = loaded(family, "float64").model
    places = torch.tensor([20, 3, 7, 3, 12, 20])
    columns = (batch.tokens, batch.position_ids, batch.cu_seqlens)
    rows = []
    seen = getattr(backbone(model), "model", backbone(model)).norm
    handle = seen.register_forward_hook(lambda _module, _inputs, output: rows.append(output[0].size(0)))
    found, gradients = [], []
    for part in (places, None):
        model.zero_grad()
        hidden = hidden_states(model, *columns, places=part, layout=layout)
        found.append(hidden if part is not None else hidden[places])
        (found[-1] * torch.linspace(-1, 1, found[-1].numel()).view_as(found[-1])).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    handle.remove()
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
    assert found[0].abs().max() > 0.1 and gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-10, atol=1e-12)
    if family == "decoder" and layout != "padded":
        assert rows[0] == 4 < rows[1]


@pytest.mark.parametrize("family", ["decoder", "llama", "biased", "mistral"])
def test_a_batch_without_tokens_gives_none(loaded, flat, family: str) -> None:
    """A rank may be left without work: it takes part in the backward pass all the same."""
    model = loaded(family).model
    logp, entropy = token_logprobs(model, flat([[], []]))
    assert logp.shape == entropy.shape == (0,)
    model.zero_grad()
    (logp.sum() + entropy.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("bounds", [[0, 5], [1, 8], [0, 6, 4, 8]])
def test_bounds_that_do_not_cut_the_axis_are_refused(bounds: list[int]) -> None:
    model = Decoder(DecoderConfig(**HEADS))
    tokens = torch.arange(8)
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 8"):
        hidden_states(model, tokens, tokens, torch.tensor(bounds))


def test_a_copy_packs_like_its_original(loaded, batch) -> None:
    model = loaded("biased").model
    again = copy.deepcopy(model)
    assert packs(again)
    with torch.no_grad():
        assert torch.equal(*(token_logprobs(m, batch)[0] for m in (model, again)))
