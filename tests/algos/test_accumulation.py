"""Gradients that are added where they are summed, against autograd's own: values, precision, and what is never made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from novarl.kernels import logprobs, products
from novarl.kernels.accumulation import fused_accumulation, look_up
from novarl.kernels.logprobs import SLICE, chunked_logprobs

PASSES, TOKENS, WIDTH = 3, 70, 24


@pytest.fixture(params=["mkl", "onednn"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either, whatever this CPU gains by it."""
    name: str = request.param
    monkeypatch.setattr(products, "has_fast_products", lambda: name == "onednn")
    return name


def table(vocabulary: int, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> Parameter:
    """Far from uniform odds, as those of a trained model."""
    generator = torch.Generator().manual_seed(0)
    return Parameter(2.0 * torch.randn(vocabulary, width, generator=generator).to(dtype))


def drawn(vocabulary: int, number: int) -> tuple[Tensor, Tensor]:
    """What goes in, with tokens that come more than once, and what is to come out."""
    generator = torch.Generator().manual_seed(1 + number)
    return tuple(torch.randint(min(vocabulary, top), (TOKENS,), generator=generator) for top in (20, vocabulary))  # type: ignore[return-value]


def pass_(weight: Parameter, number: int) -> None:
    """One backward pass through a lookup and a head of the same weight."""
    ids, targets = drawn(len(weight), number)
    logp, entropy = chunked_logprobs(look_up(weight, ids).tanh(), weight, targets, chunk=64)
    (logp.sum() + 0.1 * entropy.square().sum()).backward()  # type: ignore[no-untyped-call]


def gradient(weight: Parameter, around: Callable[[], AbstractContextManager[None]]) -> Tensor:
    weight.grad = None
    for number in range(PASSES):
        with around():
            pass_(weight, number)
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("vocabulary", [30, SLICE, 2 * SLICE + 77])
def test_a_tied_weight_has_the_gradient_of_autograd(library: str, vocabulary: int) -> None:
    wide = table(vocabulary, torch.float64)
    exact = gradient(wide, nullcontext)
    torch.testing.assert_close(gradient(wide, fused_accumulation), exact, rtol=1e-13, atol=1e-13)
    turned = Parameter(table(vocabulary).detach().t().contiguous().t())
    single = gradient(turned, fused_accumulation)
    assert not turned.is_contiguous() and single.is_contiguous() and exact.abs().max() > 1.0
    assert (single - exact).norm() < 1e-5 * exact.norm()


def test_passes_may_be_of_either_kind(library: str) -> None:
    """As where another part of a model uses its embedding in a way of its own."""
    weight = table(50)
    expected = gradient(weight, nullcontext).clone()
    kinds = iter([fused_accumulation, nullcontext, fused_accumulation])
    torch.testing.assert_close(gradient(weight, lambda: next(kinds)()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", [None, 3])
def test_a_lookup_is_an_embedding(padding: int | None, dtype: torch.dtype) -> None:
    ids = torch.tensor([[1, 3, 1], [0, 3, 6]])
    coefficients = torch.linspace(-1.0, 2.0, ids.numel() * WIDTH, dtype=dtype).view(2, 3, WIDTH)
    mine, theirs = table(7, dtype), table(7, dtype)
    with fused_accumulation():
        found = look_up(mine, ids, padding)
        (found * coefficients).sum().backward()  # type: ignore[no-untyped-call]
    expected = F.embedding(ids, theirs, padding)
    (expected * coefficients).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(found, expected)
    assert mine.grad is not None and theirs.grad is not None
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert mine.grad[3].any() == (padding is None) and mine.grad[1].any() and not mine.grad[2].any()


def test_outside_gradients_are_autograds() -> None:
    weight = table(30)
    (found,) = torch.autograd.grad(look_up(weight, torch.tensor([1, 1])).sum(), weight)
    assert found[1].eq(2).all() and weight.grad is None


def test_what_is_frozen_or_not_asked_for_has_none() -> None:
    frozen = table(30).requires_grad_(False)
    hidden = torch.ones(1, WIDTH, requires_grad=True)
    with fused_accumulation():
        logp, _ = chunked_logprobs(hidden + look_up(frozen, torch.tensor([1])), frozen, torch.tensor([2]))
        logp.sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            assert not look_up(table(30), torch.tensor([1])).requires_grad
    assert frozen.grad is None and hidden.grad is not None and hidden.grad.any()


def test_16_bits_are_not_added_up_in_16_bits() -> None:
    weight = table(30, torch.bfloat16)
    plain = gradient(weight, nullcontext).clone()
    assert torch.equal(gradient(weight, fused_accumulation), plain)


def losses(weight: Parameter, rows: int, number: int) -> Tensor:
    ids, targets = (column[:rows] for column in drawn(len(weight), number))
    logp, entropy = chunked_logprobs(look_up(weight, ids).tanh(), weight, targets)
    return logp.sum() + 0.1 * entropy.square().sum()


def in_turn(weight: Parameter) -> None:
    for number, rows in enumerate((50, 70, 40, 70)):
        losses(weight, rows, number).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            losses(weight, 60, number)


def both_at_once(weight: Parameter) -> None:
    """Passes that wait for their gradients, of which none may write where another's numbers are."""
    losses(weight, 70, 0).backward()  # type: ignore[no-untyped-call]
    for waiting in [losses(weight, rows, number) for number, rows in enumerate((50, 60), 1)]:
        waiting.backward()  # type: ignore[no-untyped-call]


def test_gradients_arrive_where_activations_are_recomputed(library: str) -> None:
    found = []
    for around in (fused_accumulation, nullcontext):
        weight = table(30)
        with around():
            ids, targets = drawn(len(weight), 0)
            hidden = checkpoint(partial(look_up, weight), ids, use_reentrant=False).tanh()
            read = partial(chunked_logprobs, weight=weight, targets=targets)
            checkpoint(read, hidden, use_reentrant=False)[0].sum().backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("passes", [in_turn, both_at_once])
def test_memory_that_serves_again_changes_no_gradient(
    passes: Callable[[Parameter], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "has_fast_products", lambda: False)
    served: list[bool] = []
    room = logprobs._Head._room

    def watched(head: logprobs._Head) -> Tensor:
        left = {place.data_ptr() for place in head._spare}
        found = room(head)
        served.append(found.data_ptr() in left)
        return found

    monkeypatch.setattr(logprobs._Head, "_room", watched)
    again, apart = table(300, torch.float64), table(300, torch.float64)
    with fused_accumulation():
        passes(again)
    assert any(served) and not all(served)
    served.clear()
    passes(apart)
    assert not any(served), "outside nobody leaves any"
    assert again.grad is not None and apart.grad is not None
    torch.testing.assert_close(again.grad, apart.grad, rtol=1e-13, atol=1e-13)


class Made(TorchDispatchMode):
    """The most numbers of any tensor that an operation made, leaving out those that were there before."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known, self.most = {x.untyped_storage().data_ptr() for x in known}, 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.known:
                self.most = max(self.most, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def test_no_tensor_of_the_weights_size_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest are a micro-batch's logits, of its 64 tokens, fewer numbers than those of the weight [V, 96]."""
    monkeypatch.setattr(products, "has_fast_products", lambda: True)
    weight = table(2 * SLICE, width=96)
    weight.grad = torch.zeros_like(weight)

    def most(around: Callable[[], AbstractContextManager[None]]) -> int:
        with Made(weight, weight.grad) as made, around():  # type: ignore[arg-type]
            ids, targets = (column[:64] for column in drawn(len(weight), 0))
            logp, _ = chunked_logprobs(look_up(weight, ids), weight, targets)
            logp.sum().backward()  # type: ignore[no-untyped-call]
        return made.most

    assert most(fused_accumulation) == 64 * len(weight) < weight.numel()
    assert most(nullcontext) == weight.numel(), "the probe did not see autograd's"
