"""What the sampler records under top-k, top-p and min-p, against float64 computed from the model's own logits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from novarl.algos.support import Support, impossible
from novarl.core.errors import NovaError
from novarl.core.types import Completion, Sampling
from novarl.engines.local.engine import LocalEngine, sample_all
from novarl.engines.local.requests import checked_limit
from novarl.models.load import Policy

from .conftest import echo, full_logits
from .test_sampling import reference_truncation

SAMPLINGS = [
    Sampling(top_p=0.9),
    Sampling(top_p=0.97, temperature=1.8),
    Sampling(top_k=3, temperature=0.7),
    Sampling(min_p=0.05, temperature=1.5),
    Sampling(top_k=20, top_p=0.95, min_p=0.02, temperature=1.4),
]


def ids(words: bytes) -> set[int]:
    """The recorded ids of one token, read by hand."""
    numbers = [int.from_bytes(words[at : at + 4], "little") for at in range(0, len(words), 4)]
    return {(number >> 16) * 16 + bit for number in numbers for bit in range(16) if number >> bit & 1}


def sampled(policy: Policy, sampling: Sampling) -> list[tuple[list[int], Completion]]:
    rng = random.Random(3)
    wanted = [(echo(rng.randint(6, 20), rng=rng), replace(sampling, max_tokens=12), f"row {i}") for i in range(12)]
    engine = LocalEngine(policy.model, policy.tokenizer, eos_ids=[], context=256, max_batch=5)
    return [(one[0], completion) for one, completion in zip(wanted, sample_all(engine, wanted), strict=True)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_support_and_log_probability_are_those_of_the_truncated_distribution(
    policy: Policy, sampling: Sampling
) -> None:
    checked = 0
    for prompt, completion in sampled(policy, replace(sampling, supports=True)):
        assert completion.support is not None and len(completion.support) == len(completion.tokens)
        with torch.no_grad():
            logits = full_logits(policy.model, [*prompt, *completion.tokens])[len(prompt) - 1 : -1].double()
        for row, token, logp, words in zip(logits, completion.tokens, completion.logp, completion.support, strict=True):
            kept = ids(words) or set(range(len(row)))
            assert token in kept
            z = row / sampling.temperature
            exact = z[token] - z[sorted(kept)].exp().sum().log()
            assert logp == pytest.approx(float(exact), abs=2e-4)
            right, _ = reference_truncation(row, sampling)
            if kept == right:
                checked += 1
            else:  # a token on the border, where float32 and float64 may differ
                assert len(kept ^ right) == 1
    assert checked >= 0.95 * 12 * 12
    assert any(completion.support for _, completion in sampled(policy, replace(sampling, supports=True)))


def test_nothing_is_recorded_where_nothing_is_cut_or_nobody_asked(policy: Policy) -> None:
    for sampling in (Sampling(supports=True), Sampling(top_p=0.9), Sampling(0.0, top_p=0.5, supports=True)):
        assert all(completion.support is None for _, completion in sampled(policy, sampling))


def test_recording_changes_no_token(policy: Policy) -> None:
    """And a request that records is not disturbed by others beside it that do not."""
    rng = random.Random(5)
    kinds = [
        SAMPLINGS[0],
        Sampling(),
        Sampling(0.0),
        replace(SAMPLINGS[4], supports=True),
        Sampling(0.0, top_k=2, supports=True),
    ]
    wanted = [(echo(9, rng=rng), replace(kinds[i % 5], max_tokens=4 + i), f"row {i}") for i in range(15)]
    engine = LocalEngine(policy.model, policy.tokenizer, eos_ids=[], context=256, max_batch=4)
    got = sample_all(engine, wanted)
    plain = sample_all(engine, [(prompt, replace(sampling, supports=False), key) for prompt, sampling, key in wanted])
    for (_, sampling, _), one, other in zip(wanted, got, plain, strict=True):
        assert replace(one, support=None) == other
        assert (one.support is not None) == sampling.records
        if one.support is not None:
            assert all(token in (ids(words) or {token}) for token, words in zip(one.tokens, one.support, strict=True))
            assert len(one.support) == len(one.tokens)


def test_the_bytes_are_the_words_of_a_support() -> None:
    words = (0x0001_8001).to_bytes(4, "little")
    support = Support(torch.tensor([int.from_bytes(words, "little")], dtype=torch.int32), torch.tensor([0, 1]))
    assert (~impossible(support, 0, 1, 40)[0]).nonzero()[:, 0].tolist() == sorted(ids(words)) == [16, 31]


def test_a_vocabulary_too_large_to_record_is_refused() -> None:
    asked = Sampling(top_p=0.9, supports=True)
    with pytest.raises(NovaError, match="at most 1048576 token ids"):
        checked_limit([1], asked, context=9, vocabulary=2**20 + 1)
    assert checked_limit([1], replace(asked, supports=False), context=9, vocabulary=2**20 + 1) == 8
