"""Supports in their compact form, and probabilities renormalised over them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from novarl.algos.support import LARGEST_VOCABULARY, Support, impossible, pack_support, support_of
from novarl.kernels import products
from novarl.kernels.logprobs import chunked_scores, logits_logprobs


def random_supports(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    """possible [rows, V]: sparse, dense, nearly full and full rows."""
    generator = torch.Generator().manual_seed(seed)
    share = torch.tensor([0.02, 0.4, 0.98, 2.0])[torch.arange(rows) % 4]
    possible = torch.rand(rows, vocabulary, generator=generator) < share[:, None]
    possible[torch.arange(rows), torch.randint(vocabulary, (rows,), generator=generator)] = True
    return possible


@pytest.mark.parametrize("vocabulary", [2, 15, 16, 17, 300, 70_000, LARGEST_VOCABULARY])
def test_a_support_comes_back_as_it_was(vocabulary: int) -> None:
    possible = random_supports(4, vocabulary)
    possible[0, -1] = True  # the last id, whose word has its sign bit set in the largest vocabulary
    support = pack_support(possible)
    assert torch.equal(impossible(support, 0, 4, vocabulary), ~possible)
    assert torch.equal(impossible(support, 1, 3, vocabulary), ~possible[1:3])
    again = support_of(support, torch.tensor([2, 0, 2]))
    assert torch.equal(impossible(again, 0, 3, vocabulary), ~possible[[2, 0, 2]])
    assert support.words.dtype == torch.int32


def test_its_size_is_bounded() -> None:
    """4 bytes a possible token at most, V/4 bytes in any case, nothing for a full row."""
    vocabulary = 1600
    possible = torch.zeros(4, vocabulary, dtype=torch.bool)
    possible[0, [3, 700, 1599]] = True
    possible[1, ::2] = True
    possible[2, 1:] = True
    possible[3] = True
    assert pack_support(possible).cu_words.diff().tolist() == [3, 100, 100, 0]


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="1048576 token ids, not 1048577"):
        pack_support(torch.ones(1, LARGEST_VOCABULARY + 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="no possible token"):
        pack_support(torch.zeros(1, 8, dtype=torch.bool))


def case(rows: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Support, Tensor]:
    """(hidden, weight, bias, targets, support, possible) in float64."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, 8, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    possible = random_supports(rows, vocabulary)
    targets = torch.multinomial(possible.double(), 1, generator=generator)[:, 0]
    return hidden, weight, bias, targets, pack_support(possible), possible


@pytest.mark.parametrize("vocabulary", [40, 9000, 100_000])
@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_probabilities_and_gradients_are_those_within_the_support(chunk: int, vocabulary: int) -> None:
    """Against the sum over the possible tokens alone, row by row; the definition agrees."""
    hidden, weight, bias, targets, support, possible = case(11, vocabulary)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    rows = []
    for row in range(len(hidden)):
        ids = possible[row].nonzero()[:, 0]
        z = (weight[ids] @ hidden[row] + bias[ids]) / 0.7
        log_p = z - z.exp().sum().log()
        own = log_p[(ids == targets[row]).nonzero()[0, 0]]
        rows.append(torch.stack([own, -(log_p.exp() * log_p).sum(), log_p.max()]))
    exact = torch.stack(rows).unbind(1)
    found = chunked_scores(hidden, weight, targets, temperature=0.7, chunk=chunk, bias=bias, support=support)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-11)
    plain = logits_logprobs(hidden @ weight.T + bias, targets, 0.7, support=support)
    torch.testing.assert_close(plain, exact[:2], rtol=0, atol=1e-11)
    scale = torch.arange(1.0, 12.0, dtype=torch.float64)
    for ours in (found, plain):
        for one, other in zip(
            torch.autograd.grad(((ours[0] + 0.3 * ours[1]) * scale).sum(), inputs, retain_graph=True),
            torch.autograd.grad(((exact[0] + 0.3 * exact[1]) * scale).sum(), inputs, retain_graph=True),
            strict=True,
        ):
            assert other.abs().max() > 0.1
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    unaware = chunked_scores(hidden, weight, targets, temperature=0.7, chunk=chunk, bias=bias)[0]
    assert (unaware - exact[0]).abs().max() > 0.5, "the supports cut too little for this test to show anything"


def test_full_supports_change_no_bit() -> None:
    hidden, weight, bias, targets, _, possible = case(6, 50)
    full = pack_support(torch.ones_like(possible))
    one = chunked_scores(hidden, weight, targets, bias=bias, support=full)
    other = chunked_scores(hidden, weight, targets, bias=bias)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("chunk", [None, 64, 130])
def test_through_onednn_it_is_the_same(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows are padded to a number that the products like."""
    monkeypatch.setattr(products, "has_fast_products", lambda: True)
    hidden, weight, bias, targets, support, _ = case(150, 3000)
    exact = [x.requires_grad_() for x in (hidden, weight, bias)]
    inputs = [x.detach().float().requires_grad_() for x in exact]
    plain = logits_logprobs(exact[0] @ exact[1].T + exact[2], targets, support=support)
    found = chunked_scores(*inputs[:2], targets, chunk=chunk, bias=inputs[2], support=support)[:2]
    torch.testing.assert_close(found, tuple(x.float() for x in plain), rtol=1e-4, atol=1e-4)
    ours = torch.autograd.grad((found[0] + 0.3 * found[1]).sum(), inputs)
    theirs = torch.autograd.grad((plain[0] + 0.3 * plain[1]).sum(), exact)
    for mine, right in zip(ours, theirs, strict=True):
        assert (mine.double() - right).norm() < 1e-4 * right.norm()
