"""A matrix of the sampler in either form: the same numbers, a row's bits its own, and which form is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from novarl.core.types import Sampling
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.engines.local.matrices import SOON, Matrix, PackedMatrix, as_matrix
from novarl.engines.local.runner import ModelRunner
from novarl.kernels import products
from novarl.kernels.products import give_up_programs
from novarl.models.load import load

HAS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"

PACKED = [torch.float32, torch.bfloat16] if HAS_AVX512 else [torch.float32]
"""What oneDNN multiplies here: without AVX-512 it refuses bfloat16."""


@pytest.fixture(autouse=True)
def through_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU that gains nothing by it."""
    monkeypatch.setattr(products, "has_fast_products", lambda: True)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(Matrix, torch.float32), (Matrix, torch.bfloat16), *[(PackedMatrix, dtype) for dtype in PACKED]],
)
def test_each_product_is_what_it_says(form: type[Matrix], dtype: torch.dtype) -> None:
    weight, x, other = drawn(96, 48).to(dtype), drawn(32, 48).to(dtype), drawn(32, 96)
    matrix, plain = form(weight), x.double() @ weight.double().t()
    found = {
        "times": (matrix.times(x), plain),
        "opened": (matrix.opened(x), F.silu(plain)),
        "gated": (matrix.gated(x, other.to(dtype)), plain * other.to(dtype).double()),
        "added": (matrix.added(x, other.to(dtype).clone()), plain + other.to(dtype).double()),
        "added, wide": (matrix.added(x, other.clone()), plain + other.double()),
    }
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}
    for name, (ours, true) in found.items():
        assert ours.dtype == (torch.float32 if name == "added, wide" else dtype)
        torch.testing.assert_close(ours.double(), true, **tolerance)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize(("width", "size"), [(128, 512), (512, 128), (320, 160)])
def test_a_row_has_its_bits_however_many_are_beside_it(width: int, size: int, dtype: torch.dtype) -> None:
    matrix = PackedMatrix(drawn(size, width).to(dtype))
    x, other = drawn(600, width).to(dtype), drawn(600, size).to(dtype)

    def run(count: int) -> tuple[Tensor, ...]:
        rows, beside = x[:count], other[:count]
        total = matrix.added(rows, beside)
        return matrix.times(rows), matrix.opened(rows), matrix.gated(rows, beside), total

    whole = run(600)
    for count in sorted({matrix.rows(asked) for asked in range(1, 600)} - {matrix.rows(600)}):
        for part, every in zip(run(count), whole, strict=True):
            unused = dtype == torch.float32 and not products.onednn_keeps_bits()
            assert torch.equal(part, every[:count]) or unused, f"{count} rows"


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("width", "dtype"), [(60, torch.float32), (250, torch.float32), (60, torch.bfloat16)])
def test_activations_have_their_bits_however_many_are_beside_them(width: int, dtype: torch.dtype, threads: int) -> None:
    """PyTorch takes the last numbers of each thread's part one by one. A product with the identity is exact."""
    matrix, x = Matrix(torch.eye(width, dtype=dtype)), 3 * drawn(1400, width).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = matrix.opened(x)
        torch.testing.assert_close(whole, F.silu(x))
        for count in [*range(4, 64, 4), *range(64, 1400, 4 if width == 250 else 92)]:
            assert torch.equal(matrix.opened(x[:count]), whole[:count]), f"{count} rows"
    finally:
        torch.set_num_threads(before)


def test_few_numbers_of_rows_are_asked_for() -> None:
    matrix = PackedMatrix(drawn(8, 8))
    steps = [matrix.rows(count) for count in range(1, 2049)]
    assert all(count <= rows <= max(16, 1.13 * count + 15) for count, rows in enumerate(steps, 1))
    assert len(set(steps)) <= 40 and all(rows % 16 == 0 for rows in steps)


def test_what_cannot_be_packed_stays_as_it_lies() -> None:
    weight = drawn(8, 16)
    assert type(as_matrix(weight)) is PackedMatrix
    assert type(as_matrix(weight.bfloat16())) is (PackedMatrix if HAS_AVX512 else Matrix)
    assert type(as_matrix(weight.double())) is Matrix and type(as_matrix(weight.half())) is Matrix
    give_up_programs()
    assert type(as_matrix(weight)) is Matrix


def test_an_idle_engine_holds_no_copies_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load("tiny", seed=1)
    engine = LocalEngine(policy.model, policy.tokenizer, eos_ids=[0], context=64)
    lean, held = engine._runner._lean, []
    assert lean is not None and not lean._layers
    decode = ModelRunner.decode

    def seen(runner: ModelRunner, *given: Any) -> Tensor:
        logits = decode(runner, *given)
        held.append(bool(lean._layers) and runner._head is not None)
        return logits

    monkeypatch.setattr(ModelRunner, "decode", seen)
    sample_all(engine, [((1, 2, 3), Sampling(max_tokens=8), "0")])
    assert held and all(held), "copies are made for a forward pass"
    assert not lean._layers and engine._runner._head is None


def test_a_small_weight_is_packed_when_it_has_been_read_often() -> None:
    weight, x = drawn(64, 64), drawn(32, 64)
    matrix, often = PackedMatrix(weight), SOON // weight.numel()
    found = [matrix.times(x) for _ in range(often)]
    assert matrix._weight.data_ptr() == weight.data_ptr()
    found += [matrix.times(x)]
    assert matrix._weight.is_mkldnn
    assert all(torch.equal(product, found[0]) for product in found)
    large = PackedMatrix(drawn(2048, 640))
    large.times(drawn(16, 640))
    assert large._weight.is_mkldnn, "at its first product"
