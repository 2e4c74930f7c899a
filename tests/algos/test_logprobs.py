"""Chunked log-probabilities against the plain ones: values, gradients, dtypes; golden numbers for both."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from novarl.kernels import products
from novarl.kernels.logprobs import WIDE, _FastHead, _row_stride, chunked_logprobs, chunked_scores, logits_logprobs

LOGITS = torch.tensor([[0.0, math.log(2.0), math.log(3.0)]], dtype=torch.float64)
"""Probabilities 1/6, 1/3, 1/2; at temperature 1/2 the odds are squared: 1/14, 4/14, 9/14."""
ENTROPY = math.log(6) / 6 + math.log(3) / 3 + math.log(2) / 2
COLD_ENTROPY = -(math.log(1 / 14) + 4 * math.log(4 / 14) + 9 * math.log(9 / 14)) / 14


def sharpened(n: int = 13, width: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """hidden, weight, bias and targets of a trained model: nearly all the likeliest token, mean log-prob above -0.5."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, width, generator=generator, dtype=torch.float64)
    weight = 2.5 * torch.randn(vocabulary, width, generator=generator, dtype=torch.float64)
    bias = 0.1 * torch.randn(vocabulary, generator=generator, dtype=torch.float64)
    likely = (hidden @ weight.T + bias).topk(2).indices
    targets = likely[:, 0].index_copy(0, torch.tensor([3]), likely[3, 1:])
    return [hidden.to(dtype), weight.to(dtype), bias.to(dtype), targets]


def gradients(outputs: tuple[Tensor, Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a sum with uneven weights, so that no two rows can change places."""
    logp, entropy = outputs
    weight = torch.linspace(-1.0, 2.0, len(logp), dtype=logp.dtype)
    return torch.autograd.grad((weight * logp).sum() + 0.3 * (weight.flip(0) * entropy).sum(), inputs)


@pytest.mark.parametrize("target", range(3))
def test_golden(target: int) -> None:
    probabilities, cold = [1 / 6, 1 / 3, 1 / 2], [1 / 14, 4 / 14, 9 / 14]
    targets = torch.tensor([target])
    # One hidden feature of 1: the weight's only column is the logits.
    hidden, weight = torch.ones(1, 1, dtype=torch.float64), LOGITS.T
    for temperature, p, entropy in ((1.0, probabilities, ENTROPY), (0.5, cold, COLD_ENTROPY)):
        expected = (math.log(p[target]), entropy)
        plain = logits_logprobs(LOGITS, targets, temperature)
        chunked = chunked_logprobs(hidden, weight, targets, temperature=temperature)
        assert [float(x) for x in plain] == pytest.approx(expected, abs=1e-14)
        assert [float(x) for x in chunked] == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 13, 64])
def test_chunked_equals_plain(chunk: int, with_bias: bool, temperature: float) -> None:
    hidden, weight, bias, targets = sharpened()
    inputs = [x.requires_grad_() for x in ((hidden, weight, bias) if with_bias else (hidden, weight))]
    logits = hidden @ weight.T + (bias if with_bias else 0.0)
    plain = logits_logprobs(logits, targets, temperature)
    chunked = chunked_logprobs(
        hidden, weight, targets, temperature=temperature, chunk=chunk, bias=bias if with_bias else None
    )
    assert plain[0].mean() > -0.5
    torch.testing.assert_close(chunked, plain, rtol=0, atol=1e-13)
    for ours, theirs in zip(gradients(chunked, inputs), gradients(plain, inputs), strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize("vocabulary", [WIDE - 1, WIDE, WIDE + 257])
@pytest.mark.parametrize("chunk", [3, 13])
def test_a_wide_vocabulary_has_rows_of_its_own_stride(vocabulary: int, chunk: int) -> None:
    hidden, weight, bias, targets = sharpened(vocabulary=vocabulary)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    plain = logits_logprobs(hidden @ weight.T + bias, targets)
    chunked = chunked_logprobs(hidden, weight, targets, chunk=chunk, bias=bias)
    torch.testing.assert_close(chunked, plain, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(chunked, inputs), gradients(plain, inputs), strict=True):
        assert theirs.abs().max() > 0.01
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_strides_are_whole_lines_and_no_multiple_of_a_page() -> None:
    assert [_row_stride(columns) for columns in (320, 8191)] == [320, 8191]
    assert [_row_stride(columns) for columns in (8192, 32_768, 32_000, 50_257)] == [8208, 32_784, 32_000, 50_272]


@pytest.mark.parametrize("wanted", ["logp", "entropy", "both"])
def test_gradcheck(wanted: str) -> None:
    hidden, weight, bias, targets = sharpened(n=5, vocabulary=6)

    def outputs(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        logp, entropy = chunked_logprobs(h, w, targets, temperature=0.8, chunk=2, bias=b)
        return {"logp": (logp,), "entropy": (entropy,), "both": (logp, entropy)}[wanted]

    assert torch.autograd.gradcheck(outputs, [x.requires_grad_() for x in (hidden, weight, bias)], atol=1e-8)


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, _, targets = sharpened()
    (both, _) = gradients(chunked_logprobs(hidden.requires_grad_(), weight.requires_grad_(), targets), [hidden, weight])
    (frozen_head,) = gradients(chunked_logprobs(hidden, weight.detach(), targets), [hidden])
    torch.testing.assert_close(frozen_head, both, rtol=0, atol=0)
    assert not chunked_logprobs(hidden.detach(), weight.detach(), targets)[0].requires_grad


def test_the_gradient_is_taken_once() -> None:
    hidden, weight, _, targets = sharpened()
    logp, _ = chunked_logprobs(hidden.requires_grad_(), weight, targets)
    (gradient,) = torch.autograd.grad(logp.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_float32_is_as_good_as_plain_float32() -> None:
    hidden, weight, _, targets = sharpened(n=200, width=32, vocabulary=500)
    exact = logits_logprobs(hidden @ weight.T, targets)
    logp, entropy = chunked_logprobs(hidden.float(), weight.float(), targets, chunk=64)
    assert logp.dtype == entropy.dtype == torch.float32
    assert (logp - exact[0]).abs().max() < 2e-5 and (entropy - exact[1]).abs().max() < 2e-5


def test_16_bits_accumulate_in_32() -> None:
    """Two thousand rows, two at a time: added up in bfloat16, which has 8 bits, the sum would stop growing."""
    hidden, weight, bias, targets = sharpened(n=2000, width=8, vocabulary=7, dtype=torch.bfloat16)
    wide = [x.double().requires_grad_() for x in (hidden, weight, bias)]
    narrow = [x.requires_grad_() for x in (hidden, weight, bias)]
    exact = logits_logprobs(wide[0] @ wide[1].T + wide[2], targets)
    logp, entropy = chunked_logprobs(hidden, weight, targets, chunk=2, bias=bias)
    assert logp.dtype == entropy.dtype == torch.float32
    assert (logp - exact[0]).abs().mean() < 0.02
    ours = torch.autograd.grad(logp.sum(), narrow)
    theirs = torch.autograd.grad(exact[0].sum(), wide)
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - right).norm() < 0.02 * right.norm()


def test_the_head_runs_in_the_dtype_of_its_weight() -> None:
    hidden, weight, _, targets = sharpened(dtype=torch.float32)
    rounded = hidden.bfloat16()
    outputs = chunked_logprobs(rounded.requires_grad_(), weight, targets)
    torch.testing.assert_close(outputs, chunked_logprobs(rounded.float(), weight, targets), rtol=0, atol=0)
    assert torch.autograd.grad(outputs[0].sum(), rounded)[0].dtype == torch.bfloat16


def test_extreme_logits_stay_finite() -> None:
    hidden, weight, _, targets = sharpened(dtype=torch.float32)
    logp, entropy = chunked_logprobs(1e4 * hidden.requires_grad_(), weight, targets)
    assert logp.isfinite().all() and (entropy >= 0).all() and entropy.max() < 1e-3
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(logp.sum() + entropy.sum(), hidden))


def test_no_tokens() -> None:
    hidden, weight, _, _ = sharpened()
    inputs = [hidden[:0].detach().requires_grad_(), weight.requires_grad_()]
    logp, entropy = chunked_logprobs(*inputs, torch.empty(0, dtype=torch.int64))
    assert logp.shape == entropy.shape == (0,)
    assert torch.autograd.grad(logp.sum(), weight)[0].eq(0).all()


def test_leading_shapes_of_logits_are_kept() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.randint(5, (2, 3))
    logp, entropy = logits_logprobs(logits, targets)
    torch.testing.assert_close(logp[1, 2], logits[1, 2].log_softmax(-1)[targets[1, 2]])
    assert entropy.shape == (2, 3)
    assert logits_logprobs(logits.bfloat16(), targets)[0].dtype == torch.float32


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    hidden, weight, _, targets = sharpened()
    with pytest.raises(ValueError, match="temperature must be positive"):
        chunked_logprobs(hidden, weight, targets, temperature=temperature)
    with pytest.raises(ValueError, match="temperature must be positive"):
        logits_logprobs(hidden @ weight.T, targets, temperature)


def test_an_empty_chunk_is_refused() -> None:
    hidden, weight, _, targets = sharpened()
    with pytest.raises(ValueError, match="chunk must be at least 1"):
        chunked_logprobs(hidden, weight, targets, chunk=0)


def test_the_likeliest_token_is_told_by_its_log_probability() -> None:
    hidden, weight, bias, targets = sharpened()
    hidden.requires_grad_()
    log_p = (hidden @ weight.T + bias).log_softmax(-1)
    for chunk in (1, 4, 64):
        logp, entropy, best = chunked_scores(hidden, weight, targets, chunk=chunk, bias=bias)
        torch.testing.assert_close(best, log_p.amax(-1).detach(), rtol=0, atol=1e-14)
        assert torch.equal(logp == best, log_p.argmax(-1) == targets)
        assert (logp == best).sum() == len(targets) - 1, "all but one are the likeliest"
        assert logp.requires_grad and entropy.requires_grad and not best.requires_grad


@pytest.fixture
def through_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU that gains nothing by it."""
    monkeypatch.setattr(products, "has_fast_products", lambda: True)


@pytest.mark.parametrize("chunk", [None, 1000, 64, 130])
@pytest.mark.parametrize("tokens", [5, 64, 500])
def test_through_onednn_it_is_the_same(through_onednn: None, tokens: int, chunk: int | None) -> None:
    exact = [x.requires_grad_() for x in sharpened(n=tokens, width=48, vocabulary=5000)[:3]]
    targets = sharpened(n=tokens, width=48, vocabulary=5000)[3]
    inputs = [x.detach().float().requires_grad_() for x in exact]
    plain = logits_logprobs(exact[0] @ exact[1].T + exact[2], targets, 0.7)
    found = chunked_scores(*inputs[:2], targets, temperature=0.7, chunk=chunk, bias=inputs[2])
    assert all(column.shape == (tokens,) for column in found)
    torch.testing.assert_close(found[:2], tuple(x.float() for x in plain), rtol=1e-5, atol=2e-5)
    weights = [torch.linspace(1.0, 2.0, tokens), torch.linspace(-1.0, 0.5, tokens)]
    ours = torch.autograd.grad([x @ w for x, w in zip(found[:2], weights, strict=True)], inputs)
    theirs = torch.autograd.grad([x @ w.double() for x, w in zip(plain, weights, strict=True)], exact)
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.shape == right.shape and (mine.double() - right).norm() < 1e-5 * right.norm()


def test_through_onednn_a_token_has_its_bits_whoever_is_beside_it(through_onednn: None) -> None:
    hidden, weight, _, targets = sharpened(n=500, width=48, vocabulary=5000, dtype=torch.float32)
    whole = chunked_scores(hidden, weight, targets)
    for part in (slice(0, 1), slice(3, 200), slice(17, 500)):
        for chunk in (None, 64, 192):
            alone = chunked_scores(hidden[part], weight, targets[part], chunk=chunk)
            assert all(torch.equal(a, b[part]) for a, b in zip(alone, whole, strict=True))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_through_onednn_only_what_needs_a_gradient_gets_one(through_onednn: None, wanted: tuple[bool, bool]) -> None:
    hidden, weight, _, targets = sharpened(n=100, width=48, vocabulary=500, dtype=torch.float32)
    leaves = [x.requires_grad_(want) for x, want in zip((hidden, weight), wanted, strict=True)]
    logp, _ = chunked_logprobs(*leaves, targets)
    logp.sum().backward()
    assert [x.grad is not None for x in leaves] == list(wanted)


def test_a_chunk_of_few_rows_is_not_made_larger(through_onednn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = sharpened(n=200, width=8, vocabulary=30, dtype=torch.float32)
    asked: list[int] = []
    logits = _FastHead.logits
    monkeypatch.setattr(_FastHead, "logits", lambda head, rows: (asked.append(len(rows)), logits(head, rows))[1])
    for chunk in (32, 100, 190):
        chunked_logprobs(hidden, weight, targets, chunk=chunk)
    assert asked == [64, 64, 64, 64, 128, 128], "of 32 rows at a time, none goes through oneDNN"
