"""The kernels of packed attention give the same numbers; each is taken where it can run, and refused elsewhere."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

from novarl.core.errors import NovaError
from novarl.kernels import attention, packing
from novarl.kernels.attention import choose_kernel, packed_attention
from novarl.kernels.packing import Alone, Call, Gathered, Kernel, cuts, packing_of, past, past_mask
from novarl.kernels.prefix import Group, Rest

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def group(prefix: int, *lengths: int) -> Group:
    """A group whose rests share nothing among themselves."""
    return Group(prefix, tuple(Rest(*rest) for rest in enumerate(lengths)))


GROUPS = [Group(5), Group(5), group(9, 4, 0, 7, 4), Group(3), group(6, 0, 0)]
LONG = [Group(600), group(30, 620, 7, 600), Group(780), Group(300)]
FORKED = [Group(9, (Rest(1, 4), Rest(0, 7, 4), Rest(2, 7, 7), Rest(4, 5, 2), Rest(3, 2))), group(5, 1, 1)]
"""Of the first group's rests two begin another, one of them being equal to it; one forks off after two tokens."""


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """What PyTorch 2.11 documents, and flash attention of its mask: causal from the end of each piece's keys."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and window_size == (-1, 0)
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    assert query.size(1) == key.size(1) == value.size(1) and query.dtype == key.dtype == value.dtype
    assert len(query) == cu_seq_q[-1] and len(key) == len(value) == cu_seq_k[-1]
    found = []
    for (a, b), (c, d) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
        found.append(attention.plain_attention(q, k, v, mask, scale=scale)[0].transpose(0, 1))
    return torch.cat(found)


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, enable_gqa: bool, **options: Any
) -> Tensor:
    """What later ones document."""
    assert enable_gqa and query.size(1) > key.size(1) == value.size(1)
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return ragged_attention(query, key, value, *rest, **options)


@pytest.fixture(params=[ragged_attention, grouped_attention], ids=["PyTorch 2.11's", "PyTorch 2.13's"])
def flash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU there is no flash attention for ragged sequences."""
    monkeypatch.setattr(varlen, "varlen_attn", request.param)


@pytest.mark.parametrize("kernel", ["flash", "eager"])
@pytest.mark.parametrize("groups", [GROUPS, LONG, FORKED])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("short", [0, packing.SHORT])
def test_every_kernel_gives_the_same(
    kernel: Kernel, scale: float | None, groups: list[Group], short: int, flash: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SHORT", short)
    generator = torch.Generator().manual_seed(0)
    tokens = sum(group.tokens for group in groups)
    shapes = ((1, 4, tokens, 8), (1, 2, tokens, 8), (1, 2, tokens, 8))
    query, key, value = states = [
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    ]
    upstream = torch.randn(shapes[0], generator=generator, dtype=torch.float64)

    def through(kernel: Kernel) -> tuple[Tensor, ...]:
        mixed = packed_attention(query, key, value, packing_of(groups, CPU, kernel), scale=scale)
        return mixed, *torch.autograd.grad(mixed, states, upstream)

    for ours, sdpa in zip(through(kernel), through("sdpa"), strict=True):
        torch.testing.assert_close(ours, sdpa, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("groups", [GROUPS, LONG])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_cpu_16_bit_states_are_attended_to_in_32_bits(groups: list[Group], autocast: bool) -> None:
    """As under autocast, where norms leave queries and keys in float32; and what only pads gets 0."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(group.tokens for group in groups)
    query, key, value = (3.0 * torch.randn(1, heads, tokens, 8, generator=generator) for heads in (4, 2, 2))
    packed, padding = packing_of(groups, CPU), 13
    leaves = [state.requires_grad_() for state in (query, key, value.bfloat16())]
    upstream = torch.randn(1, 4, tokens, 8, generator=generator).bfloat16()
    exact = packed_attention(query, key, leaves[2].float(), packed)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mixed = packed_attention(*(F.pad(leaf, (0, 0, 0, padding), value=1.0) for leaf in leaves), packed)
    assert torch.equal(mixed[:, :, :tokens], exact.bfloat16()) and not mixed[:, :, tokens:].any()
    assert not torch.equal(exact, packed_attention(query.bfloat16(), key.bfloat16(), leaves[2], packed).float())
    found = torch.autograd.grad(mixed[:, :, :tokens], leaves, upstream)
    for ours, expected in zip(found, torch.autograd.grad(exact, leaves, upstream.float()), strict=True):
        assert ours.abs().max() > 0
        torch.testing.assert_close(ours, expected)


def test_short_neighbours_are_one_call() -> None:
    (only,) = packing_of(GROUPS, CPU).steps
    assert isinstance(only, Gathered) and only.calls == (Call(7, 16, 16),) and only.tokens == 43
    kinds = [type(step) for step in packing_of([Group(5), Group(600), *GROUPS[2:], group(600, 4)], CPU).steps]
    assert kinds == [Alone, Alone, Gathered, Gathered]
    assert [type(step) for step in packing_of([Group(5), Group(5)], CPU).steps] == [Alone], "equally long: as they lie"


def test_what_auto_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_kernel("auto", CPU, torch.bfloat16) == "sdpa"
    assert choose_kernel("eager", CPU, torch.float64) == "eager"
    monkeypatch.setattr(attention, "_fault_of_flash", lambda device, dtype, size: None)
    assert choose_kernel("auto", CUDA, torch.bfloat16) == "flash"
    monkeypatch.setattr(attention, "_fault_of_flash", lambda device, dtype, size: "too wide" if size > 256 else None)
    assert choose_kernel("auto", CUDA, torch.bfloat16, head_size=64) == "flash"
    assert choose_kernel("auto", CUDA, torch.bfloat16, head_size=320) == "sdpa"
    assert choose_kernel("auto", CUDA, torch.float32) == "sdpa", "flash attention knows 16-bit types alone"
    monkeypatch.setattr(attention, "_fault_of_flash", lambda device, dtype, size: "no kernel image")
    assert choose_kernel("auto", CUDA, torch.bfloat16) == "sdpa"


def test_flash_is_believed_once_it_gives_what_a_softmax_does(flash: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = attention._fault_of_flash.__wrapped__
    assert tried(CPU, torch.bfloat16, 96) is None
    right = varlen.varlen_attn

    def raising(*arguments: Any, **options: Any) -> Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore")

    def from_the_start(query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        """The other way to read "causal" where there are fewer queries than keys."""
        places = torch.cat([torch.arange(c, c + b - a) for (a, b), c in zip(pairwise(queries), keys, strict=False)])
        return ragged_attention(
            query, key[places], value[places], queries, queries, rest[0], rest[0], window_size=(-1, 0)
        )

    def without_gradients(*arguments: Any, **options: Any) -> Tensor:
        return right(*arguments, **options).detach().requires_grad_()

    monkeypatch.setattr(varlen, "varlen_attn", raising)
    assert tried(CPU, torch.bfloat16, 96) == "FlashAttention only supports Ampere GPUs or newer."
    monkeypatch.setattr(varlen, "varlen_attn", lambda *a, scale, window_size: from_the_start(*a))
    said = tried(CPU, torch.bfloat16, 96)
    assert said is not None and said.startswith("its relative error is ")
    monkeypatch.setattr(varlen, "varlen_attn", without_gradients)
    assert tried(CPU, torch.bfloat16, 96) is not None


def test_flash_gives_0_for_what_only_pads(flash: None) -> None:
    tokens = sum(each.tokens for each in GROUPS)
    drawn = [torch.randn(1, heads, tokens + 5, 8, generator=torch.Generator().manual_seed(1)) for heads in (4, 2, 2)]
    found = packed_attention(*drawn, packing_of(GROUPS, CPU, "flash"))
    assert found.shape == drawn[0].shape and not found[:, :, tokens:].any() and found[:, :, :tokens].any()


def test_flash_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NovaError, match="requires CUDA and bfloat16, not cpu and float32"):
        choose_kernel("flash", CPU, torch.float32)
    monkeypatch.setattr(attention, "_fault_of_flash", lambda device, dtype, size: "no kernel image")
    with pytest.raises(NovaError, match="flash attention does not work on this GPU: no kernel image"):
        choose_kernel("flash", CUDA, torch.bfloat16)
    monkeypatch.setattr(attention, "_fault_of_flash", lambda device, dtype, size: f"heads of {size}")
    with pytest.raises(NovaError, match="flash attention does not work on this GPU: heads of 12"):
        choose_kernel("flash", CUDA, torch.bfloat16, head_size=12)
    with pytest.raises(NovaError, match="unknown attention 'fast'"):
        choose_kernel("fast", CPU, torch.float32)


def test_calls_are_cut_where_padding_would_cost_more_than_a_call() -> None:
    (alike,) = packing_of([group(20, 60, 58, 64, 61)], CPU).steps
    (apart,) = packing_of([group(256, 4, 5, 128)], CPU).steps
    assert isinstance(alike, Gathered) and isinstance(apart, Gathered)
    assert alike.calls == (Call(1, 20, 20), Call(4, 64, 84))
    assert apart.calls == (Call(1, 256, 256), Call(2, 5, 261), Call(1, 128, 384))


def test_groups_share_calls_where_they_see_as_much() -> None:
    """Prefixes of 70, 70 and 72 tokens see themselves; behind 70 tokens there are rests of two groups."""
    (step,) = packing_of([group(70, 9, 40, 9), group(72, 9, 9), group(70, 9, 38)], CPU).steps
    assert isinstance(step, Gathered)
    assert step.calls == (Call(3, 72, 72), Call(3, 9, 79), Call(2, 40, 110), Call(2, 9, 81))


def test_long_queries_are_cut_and_see_no_future(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 256 queries over the keys up to their end; a last one of less than a third goes with the one before."""
    shapes = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda q, k, *rest, **kw: shapes.append((q.size(2), k.size(2))) or plain(q, k, *rest, **kw),  # type: ignore[func-returns-value]
    )
    tokens = sum(group.tokens for group in LONG)
    query, key = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, tokens, 8)
    packed_attention(query, key, key, packing_of(LONG, CPU))
    alone = [(256, 256), (256, 512), (88, 600)]
    rests = [(256, 286), (256, 542), (88, 630), (256, 286), (256, 542), (108, 650)]
    assert shapes == [*alone, (30, 30), (7, 37), *rests, (780, 780), (300, 300)]
    assert cuts(341, CPU, causal=True) == [0, 341]
    assert cuts(342, CPU, causal=True) == [0, 256, 342]
    assert cuts(5000, CUDA, causal=False) == [0, 5000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mask_of_a_cpu_is_the_plain_one_and_made_once(dtype: torch.dtype) -> None:
    """Whatever its view begins and ends with: one query, the widest piece, keys up to and past a power of two."""
    query = torch.randn(1, 1, 1, 8, dtype=dtype)
    for queries, before in [(1, 0), (1, 1), (256, 0), (341, 3), (341, 4), (30, 255), (7, 256), (256, 257)]:
        found = past_mask(queries, before + queries, query)
        hidden = ~past(queries, before + queries, CPU)
        assert torch.equal(found, torch.zeros(queries, before + queries, dtype=dtype).masked_fill(hidden, -torch.inf))
    assert found.untyped_storage().data_ptr() == past_mask(3, 303, query).untyped_storage().data_ptr()
    with torch.inference_mode():
        assert not past_mask(2, 5000, query).is_inference()


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_what_nobody_reads_is_left_out_of_the_last_layer(kernel: Kernel) -> None:
    """Of sequences alone, equally long and not, and of groups: what is read is the same, and so is its gradient."""
    groups = [Group(100), Group(100), Group(30), Group(400), group(90, 300, 12), group(200, 5), Group(70)]
    begins = [0, 100, 200, 230, 630, 1032, 1237]
    read = torch.tensor([
        *range(80, 100), *range(165, 200), 205, *range(550, 630), 719, *range(720, 1032), *range(1232, 1237),
    ])  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tokens = sum(group.tokens for group in groups)
    states = [
        torch.randn(1, heads, tokens, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]
    upstream = torch.randn(1, 4, len(read), 8, generator=generator, dtype=torch.float64)

    def through(*, last: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        mixed = packed_attention(*states, packing_of(groups, CPU, kernel, read=read), last=last)
        return mixed, torch.autograd.grad(mixed[:, :, read], states, upstream)

    (every, wanted), (some, found) = through(last=False), through(last=True)
    torch.testing.assert_close(some[:, :, read], every[:, :, read], rtol=1e-10, atol=1e-12)
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)
    left_out = (some == 0).all(dim=(0, 1, 3))
    unread = {begin: packing._unread(groups, read)[number] for number, begin in enumerate(begins)}
    assert unread == {0: 80, 100: 65, 200: 5, 230: 320, 630: 89, 1032: 200, 1237: 70}
    assert left_out.sum() == sum(count for count in unread.values() if count >= attention.UNREAD)
    assert not left_out[read].any()
