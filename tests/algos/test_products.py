"""Products by oneDNN: numbers and gradients of a plain product, a row's bits its own, and only where it is meant."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from novarl.kernels import products
from novarl.kernels.accumulation import fused_accumulation
from novarl.kernels.fused import Linear, swiglu
from novarl.kernels.products import (
    _whole,
    adds_to,
    full_rows,
    give_up_programs,
    has_fast_products,
    is_fast,
    onednn_keeps_bits,
    pack,
    product,
    times,
    weight_gradient,
)

FAST = has_fast_products.__wrapped__
"""As it is, for the test of it: the others set it."""


@pytest.fixture(autouse=True)
def through_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU that gains nothing by it, and for all there is."""
    monkeypatch.setattr(products, "has_fast_products", lambda: True)
    monkeypatch.setattr(products, "mkl_keeps_up", lambda: False)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(64, 48), (1, 7, 48), (2, 3, 5, 48), (1, 48)])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_values_and_gradients(shape: tuple[int, ...], wanted: tuple[bool, bool]) -> None:
    leaves = [leaf.requires_grad_(want) for leaf, want in zip((drawn(*shape), drawn(32, 48)), wanted, strict=True)]
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    ours, plain = product(*leaves), F.linear(*leaves)
    assert is_fast(*leaves) and "Product" in type(ours.grad_fn).__name__
    torch.testing.assert_close(ours, plain)
    upstream = drawn(*plain.shape)
    found, expected = (torch.autograd.grad(value, asked, upstream) for value in (ours, plain))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("width", "size"), [(128, 512), (512, 128), (320, 160), (1024, 256)])
def test_a_row_has_its_bits_whoever_is_beside_it(width: int, size: int) -> None:
    x, weight = drawn(256, width), drawn(size, width)
    whole = times(x, weight)
    parts = (slice(0, 4), slice(0, 60), slice(100, 228), slice(3, 254))
    same = [torch.equal(times(x[rows].contiguous(), weight), whole[rows]) for rows in parts]
    assert all(same) == onednn_keeps_bits()


def test_products_whose_rows_change_each_other_are_left_to_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_has_operators", lambda: True)
    monkeypatch.setattr(products, "mkl_has_avx512", lambda: False)
    for exact in (True, False):
        monkeypatch.setattr(products, "onednn_keeps_bits", lambda exact=exact: exact)
        assert FAST() == exact


def test_a_transposed_view_of_the_weights_is_read_as_it_lies() -> None:
    grad, weight = drawn(2, 30, 32), drawn(32, 48)
    torch.testing.assert_close(times(grad, weight.t()), grad @ weight)


@pytest.mark.parametrize(("rows", "size", "width"), [(60, 32, 48), (60, 48, 32), (2048, 512, 128), (2048, 128, 512)])
def test_a_gradient_in_the_weight_whatever_is_copied_for_it(
    rows: int, size: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grad, x, weight = drawn(2, rows // 2, size), drawn(2, rows // 2, width), drawn(size, width)
    assert (grad.numel() + x.numel() >= products.MANY) == (rows == 2048)
    found = weight_gradient(grad, x, weight)
    expected = grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    assert found.is_contiguous() and found.dtype == torch.float32
    assert (found - expected).norm() < 1e-6 * expected.norm()
    assert torch.equal(weight_gradient(grad, x, weight), found), "a gradient has its bits again"
    apart = drawn(2, rows // 2, 2 * size)[..., :size].copy_(grad)
    torch.testing.assert_close(weight_gradient(apart, x, weight), found, rtol=1e-5, atol=1e-4)
    monkeypatch.setattr(products, "mkl_keeps_up", lambda: True)
    by_mkl = grad.flatten(0, 1).t() @ x.flatten(0, 1)
    assert torch.equal(weight_gradient(grad, x, weight), by_mkl)
    assert rows == 60 or not torch.equal(found, by_mkl), "long sums tell the two apart"


def test_others_keep_the_product_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = drawn(8, 16), drawn(4, 16)
    assert is_fast(x, weight) and not is_fast(x.double(), weight.double()) and not is_fast(x, weight.bfloat16())
    assert torch.equal(product(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_fast(x, weight) and product(x, weight).dtype == torch.bfloat16
    assert not is_fast(x.to("meta"), weight.to("meta"))
    assert product(x[:0], weight).shape == (0, 4), "of which oneDNN makes an error"

    class OnRanks(Tensor):
        """As a DTensor is."""

    assert not is_fast(x.as_subclass(OnRanks), weight)
    monkeypatch.setattr(products, "has_fast_products", lambda: False)
    assert not is_fast(x, weight) and torch.equal(product(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("beside", [False, True], ids=["mkl alone", "beside onednn"])
def test_gradients_in_a_weight_are_added_where_they_are_summed(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_fast_products", lambda: beside)
    monkeypatch.setattr(products, "mkl_keeps_up", lambda: True)
    weight, plain = (Parameter(drawn(32, 48)) for _ in range(2))
    arrived: list[Tensor | None] = []
    weight.register_hook(arrived.append)
    parts = [(drawn(2, rows, 48), drawn(2, rows, 32)) for rows in (30, 7, 11)]
    for x, upstream in parts:
        F.linear(x, plain).backward(upstream)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        with fused_accumulation():
            assert adds_to(mine, weight) is not None
            product(mine, weight).backward(upstream)
        product(theirs, plain.detach()).backward(upstream)
        assert torch.equal(mine.grad, theirs.grad)
    assert arrived == [None] * len(parts), "autograd has nothing to add"
    torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-5, atol=1e-5)

    x = drawn(8, 48)
    assert adds_to(x, weight) is None
    with fused_accumulation():
        assert adds_to(x.bfloat16(), weight) is None and adds_to(x, weight.detach()) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert adds_to(x, weight) is None
        with torch.no_grad():
            assert adds_to(x, weight) is None
        monkeypatch.setattr(products, "has_fast_products", lambda: True)
        monkeypatch.setattr(products, "mkl_keeps_up", lambda: False)
        assert adds_to(x, weight) is None, "what oneDNN multiplies autograd adds"


def test_added_gradients_arrive_where_activations_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_fast_products", lambda: False)
    x, upstream, weight, plain = drawn(6, 48), drawn(6, 32), Parameter(drawn(32, 48)), Parameter(drawn(32, 48))
    F.linear(x, plain).sin().backward(upstream)
    with fused_accumulation():
        checkpoint(lambda x: product(x, weight).sin(), x, use_reentrant=False).backward(upstream)
    torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-5, atol=1e-5)


def test_a_gated_product_adds_its_gradient_and_changes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_fast_products", lambda: False)
    found = []
    for context in (nullcontext, fused_accumulation):
        layer = Linear(48, 32)
        layer.weight.data.copy_(drawn(32, 48))
        inputs = [drawn(2, 6, 48).requires_grad_(), drawn(2, 48, 6).reshape(2, 6, 48).requires_grad_()]
        arrived: list[Tensor | None] = []
        layer.weight.register_hook(arrived.append)
        for _ in range(2):
            with context():
                swiglu(*inputs, layer).backward(drawn(2, 6, 32))
        assert all((grad is None) == (context is fused_accumulation) for grad in arrived) and len(arrived) == 2
        found.append([layer.weight.grad, *(each.grad for each in inputs)])
    (plain, *before), (added, *after) = found
    torch.testing.assert_close(added, plain, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(one, other) and bool(one.any()) for one, other in zip(before, after, strict=True))


def test_a_product_in_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, room = drawn(2, 6, 48), drawn(32, 48), drawn(2, 6, 32)
    for fast in (True, False):
        monkeypatch.setattr(products, "has_fast_products", lambda fast=fast: fast)
        expected = times(x, weight)
        assert torch.equal(times(x, weight, room), expected)
    assert times(x, weight, room) is room


def test_what_is_given_up_stays_so() -> None:
    x, weight = drawn(8, 16), drawn(4, 16)
    assert is_fast(x, weight)
    give_up_programs()
    assert not is_fast(x, weight) and torch.equal(product(x, weight), F.linear(x, weight))


def test_rows_come_in_few_numbers() -> None:
    counts = [full_rows(count) for count in range(1, 8193)]
    assert all(count <= rows < max(1.125 * count, count + 64) for count, rows in enumerate(counts, 1))
    assert all(rows % 64 == 0 for rows in counts) and len(set(counts)) == 16 + 3 * 8
    assert full_rows(0) == 0


def test_a_weight_with_gaps_is_copied_first() -> None:
    wide, x = drawn(64, 100), drawn(8, 48)
    gaps = wide[:, :48]
    torch.testing.assert_close(times(x, gaps), F.linear(x, gaps))
    assert _whole(gaps).is_contiguous() and torch.equal(_whole(gaps), gaps)
    for dense in (wide, wide.t(), pack(wide)):
        assert _whole(dense) is dense
