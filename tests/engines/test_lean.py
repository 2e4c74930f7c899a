"""The lean forward pass against the model's own, and prefills that share their beginnings."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

from novarl.engines.local.decode import LeanDecoder, Segment, _Attention
from novarl.engines.local.kv_cache import SLAB, STEP, KVCache, extent, round_up
from novarl.engines.local.matrices import Matrix, PackedMatrix
from novarl.engines.local.runner import ModelRunner, Prefill
from novarl.kernels import products
from novarl.models.load import Policy, load
from novarl.models.lora import LoraSettings, inject, without_adapters
from novarl.models.transformer import Decoder

from .conftest import LETTERS, echo, full_logits

LENGTHS = (230, 101, 40, 21)


@pytest.fixture(autouse=True, params=["as they lie", "packed"])
def weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either form of the weights, on every CPU."""
    monkeypatch.setattr(products, "has_fast_products", lambda: request.param == "packed")
    return str(request.param)


def texts() -> list[list[int]]:
    rng = random.Random(3)
    return [echo(length, rng=rng) for length in LENGTHS]


@torch.no_grad()
def states(lean: LeanDecoder, dtype: torch.dtype, segments: list[Segment] | None = None) -> Tensor:
    """Hidden states [4, D] at the last token of each text: fed alone, after a prefill of those before it in another
    cache."""
    cache = KVCache(4, slots := extent(max(LENGTHS)), dtype=dtype)
    padded = torch.zeros(4, max(LENGTHS), dtype=torch.int64)
    for row, text in enumerate(texts()):
        padded[row, : len(text) - 1] = torch.tensor(text[:-1])
    lean.hidden(padded, torch.arange(max(LENGTHS)).expand(4, -1), cache, [(0, 4, slots)])
    decoding = KVCache(4, slots, dtype=dtype, slab=SLAB if dtype.itemsize > 2 else None)
    for row, text in enumerate(texts()):
        decoding.insert([row], cache, [row], length=len(text) - 1)
    last, at = torch.tensor([[text[-1]] for text in texts()]), torch.tensor(LENGTHS)[:, None] - 1
    return lean.hidden(last, at, decoding, segments or [(0, 4, slots)])[:, 0]


@torch.no_grad()
def true_states(model: Decoder) -> Tensor:
    rows = [
        model(torch.tensor([text]), position_ids=torch.arange(len(text))[None]).last_hidden_state[0, -1]
        for text in texts()
    ]
    return torch.stack(rows)


def test_it_computes_what_the_model_does(policy: Policy) -> None:
    model = policy.model
    for gain in (layer.self_attn.q_norm for layer in model.model.layers):
        assert gain.weight.std() > 0, "norms that have not been trained hide where they are applied"
    torch.testing.assert_close(states(LeanDecoder(model, torch.float32), torch.float32), true_states(model))


def test_in_float64_to_the_last_digits() -> None:
    model = load("tiny", seed=4).model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.3, 2.0, generator=torch.Generator().manual_seed(len(name)))
    ours = states(LeanDecoder(model, torch.float64), torch.float64)
    torch.testing.assert_close(ours, true_states(model), rtol=1e-9, atol=1e-9)


def test_16_bit_layers_attend_in_32_bits_on_a_cpu(policy: Policy) -> None:
    runner = ModelRunner(policy.model, compute_dtype=torch.bfloat16)
    assert runner.cache_dtype == torch.float32
    (prefill,) = runner.prefill([tuple(texts()[3])])
    assert {store.dtype for store in prefill.cache.keys + prefill.cache.values} == {torch.float32}
    lean, true = LeanDecoder(policy.model, torch.bfloat16), true_states(policy.model)
    exact, wide, narrow = (states(lean, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16))
    assert 2 * (wide - exact).norm() < (narrow - exact).norm(), "a cache of 32 bits rounds no less than one of 16"
    for found in (exact, wide, narrow):
        assert 0 < (found - true).norm() < 0.1 * true.norm(), "products with weights round, and not much"


def test_segments_read_less_and_give_the_same_bits(policy: Policy, reproducible: None) -> None:
    lean = LeanDecoder(policy.model, torch.float32)
    cut = [(0, 1, 240), (1, 2, 112), (2, 4, 48)]
    assert torch.equal(states(lean, torch.float32, cut), states(lean, torch.float32))
    short, whole = states(lean, torch.float32, [(0, 4, SLAB)]), states(lean, torch.float32)
    assert not torch.equal(short[0], whole[0]) and torch.equal(short[1:], whole[1:]), "one slab is read, not two"


@pytest.mark.parametrize("queries_per_key_head", [1, 2, 4, 7])
def test_attention_in_slabs_has_the_same_bits_however_many_are_read(
    queries_per_key_head: int, reproducible: None
) -> None:
    generator, rows, key_heads = torch.Generator().manual_seed(0), 8, 2
    heads, capacity = key_heads * queries_per_key_head, 5 * SLAB
    cache, plain = KVCache(rows, capacity, dtype=torch.float32, slab=SLAB), KVCache(rows, capacity, dtype=torch.float32)
    every = torch.arange(capacity).expand(rows, -1)
    for filled in (plain, cache):
        filled.place(every, capacity)
        key, value = (torch.randn(rows, capacity, key_heads, 32, generator=generator.manual_seed(i)) for i in range(2))
        filled.write(key, value, 0)
    query = torch.randn(rows, 1, heads, 32, generator=generator) * 0.5

    def attend(within: KVCache, length: int, segments: list[Segment]) -> Tensor:
        out = torch.empty(rows, heads * 32)
        _Attention(torch.full((rows, 1), length - 1), within, segments, heads, key_heads)(query, 0, out)
        return out

    for length in (1, 17, 100, 128, 129, 200, 300, 513):
        alone = attend(cache, length, [(0, rows, round_up(length, STEP))])
        torch.testing.assert_close(alone, attend(plain, length, [(0, rows, extent(length))]), rtol=1e-5, atol=1e-6)
        only = KVCache(rows, length, dtype=torch.float32, slab=SLAB)
        only.insert(range(rows), plain, range(rows), length=length)
        assert torch.equal(attend(only, length, [(0, rows, round_up(length, STEP))]), alone), "however wide a slab is"
        for more in range(round_up(length, STEP), capacity, 48):
            assert torch.equal(attend(cache, length, [(0, rows, more)]), alone)
            beside = attend(cache, length, [(0, 3, more), (3, rows, round_up(length, STEP))])
            assert torch.equal(beside, alone)


@torch.no_grad()
def test_the_last_token_alone_is_computed_to_the_same_bits_whoever_is_beside_it(
    policy: Policy, weights: str, reproducible: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lean, slots = LeanDecoder(policy.model, torch.float32), extent(max(LENGTHS))
    padded, positions = torch.zeros(4, max(LENGTHS), dtype=torch.int64), torch.arange(max(LENGTHS)).expand(4, -1)
    for row, text in enumerate(texts()):
        padded[row, : len(text)] = torch.tensor(text)
    last = torch.tensor(LENGTHS) - 1
    multiplied: list[int] = []
    form = PackedMatrix if weights == "packed" else Matrix
    opened = form.opened
    monkeypatch.setattr(form, "opened", lambda *a: (multiplied.append(len(a[1])), opened(*a))[1])

    def run(rows: list[int]) -> Tensor:
        picked = padded[rows]
        padding = [*range(len(rows)), *[0] * (-len(rows) % 4)]
        cache = KVCache(len(padding), slots, dtype=torch.float32)
        read = torch.tensor(padding), last[rows][padding]
        return lean.hidden(picked, positions[rows], cache, [(0, len(rows), slots)], read)[: len(rows), 0]

    whole = run([0, 1, 2, 3])
    assert multiplied[-2:] == ([960, 16] if weights == "packed" else [920, 4]), (
        "the last layer ran its MLP for tokens that nobody reads"
    )
    torch.testing.assert_close(whole, true_states(policy.model))
    assert torch.equal(run([2, 0, 3])[[1, 0, 2]], whole[[0, 2, 3]])


def test_weights_that_change_are_taken_over_at_a_refresh() -> None:
    model = load("tiny", seed=5).model
    for dtype in (torch.float32, torch.bfloat16):
        lean = LeanDecoder(model, dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        lean.refresh()
        assert torch.equal(states(lean, dtype), states(LeanDecoder(model, dtype), dtype))


def test_a_decoder_with_foreign_parts_is_run_as_it_is() -> None:
    model = load("tiny", seed=8).model
    runner, prompt = ModelRunner(model), tuple(echo(30, rng=random.Random(2)))
    assert runner.reads_segments
    mlp = model.model.layers[1].mlp
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Tanh(), nn.Dropout(0.5))
    runner.refresh()
    assert not runner.reads_segments
    handle = model.model.layers[2].register_forward_hook(lambda *a: a[2] * 0.5)
    (prefill,) = runner.prefill([prompt])
    torch.testing.assert_close(prefill.logits, full_logits(model.eval(), prompt)[-1], rtol=1e-4, atol=1e-4)
    mlp.down_proj = mlp.down_proj[0]
    runner.refresh()
    assert not runner.reads_segments, "a hook changes what a layer computes"
    handle.remove()
    runner.refresh()
    assert runner.reads_segments


def test_adapters_are_part_of_the_weights() -> None:
    model = load("tiny", seed=6).model
    inject(model, LoraSettings(rank=4, alpha=8.0), seed=0)
    lean = LeanDecoder(model, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    lean.refresh()
    adapted = true_states(model)
    torch.testing.assert_close(states(lean, torch.float32), adapted, rtol=1e-4, atol=1e-4)
    with without_adapters(model):
        assert (true_states(model) - adapted).abs().max() > 0.1
        lean.refresh()
        torch.testing.assert_close(states(lean, torch.float32), true_states(model), rtol=1e-4, atol=1e-4)


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens, padding included, each forward pass ran."""
    counts: list[int] = []
    hidden = ModelRunner._hidden
    monkeypatch.setattr(ModelRunner, "_hidden", lambda *a, **k: (counts.append(a[1].numel()), hidden(*a, **k))[1])
    return counts


def held(prefill: Prefill) -> list[Tensor]:
    """The keys and values of a prompt in every layer."""
    stores = prefill.cache.keys + prefill.cache.values
    return [store[0, prefill.row, :, : len(prefill.prompt)] for store in stores]


def test_prompts_that_begin_alike_are_run_once_to_the_same_bits(
    policy: Policy, fed: list[int], weights: str, reproducible: None
) -> None:
    runner, rng = ModelRunner(policy.model), random.Random(0)
    unused = weights == "packed" and not products.onednn_keeps_bits()
    base = echo(400, rng=rng)
    cut = [tuple(base[:length]) for length in (400, 399, 396, 203, 90, 17, 16, 8)]
    forks = [tuple(base[:length] + echo(more, rng=rng)) for length, more in ((210, 12), (100, 60), (64, 5), (30, 200))]
    prompts = [*cut, *forks, tuple(echo(33, rng=rng))]
    fed.clear()
    together = runner.prefill(prompts)
    assert sum(fed) < 400 + 33 + 5 + 250 + 400, "the base is run once, and of the others what they add"
    later = runner.prefill(prompts[3:9], together)
    for prompt, prefill in zip([*prompts, *prompts[3:9]], [*together, *later], strict=True):
        (alone,) = runner.prefill([prompt])
        same = all(torch.equal(shared, own) for shared, own in zip(held(prefill), held(alone), strict=True))
        assert (same and torch.equal(prefill.logits, alone.logits)) or unused
        torch.testing.assert_close(prefill.logits, full_logits(policy.model, prompt)[-1], rtol=0, atol=1e-3)


def test_states_of_several_prompts_share_more_than_their_template(
    policy: Policy, fed: list[int], weights: str, reproducible: None
) -> None:
    """As VinePPO's do, each of whose prompts begins with the chat template's words."""
    runner, rng = ModelRunner(policy.model), random.Random(2)
    template = echo(20, rng=rng)
    answers = [template + echo(100, rng=rng) for _ in range(4)]
    prompts = [tuple(answer[:length]) for length in (60, 120, 80, 100) for answer in answers]
    fed.clear()
    together = runner.prefill(prompts)
    assert sum(fed) < 20 + 4 * 100 + 12 * 20, "each answer once, and a few tokens more of each state"
    for prompt, prefill in zip(prompts, together, strict=True):
        torch.testing.assert_close(prefill.logits, full_logits(policy.model, prompt)[-1], rtol=0, atol=1e-3)
        if weights != "packed" or products.onednn_keeps_bits():
            assert torch.equal(prefill.logits, runner.prefill([prompt])[0].logits)


def test_a_prompt_that_goes_on_pays_for_what_is_new(policy: Policy, fed: list[int]) -> None:
    runner, rng = ModelRunner(policy.model), random.Random(1)
    first = tuple(echo(200, rng=rng))
    (known,) = runner.prefill([first])
    fed.clear()
    runner.prefill([first + tuple(range(97, 97 + LETTERS))], [known])
    assert fed == [28]
