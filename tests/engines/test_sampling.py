"""The sampler's distribution, its noise, truncation, and that rows do not know each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from novarl.core.seeds import derive
from novarl.core.types import Sampling
from novarl.engines.local.sampling import Choice, Parameters, choose, exponential_noise, race

WORD = 2**64 - 1


def split_mix(state: int) -> int:
    """SplitMix64's output function, on Python's unbounded integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD
    return state ^ (state >> 31)


def parameters(samplings: list[Sampling], keys: list[str] | None = None) -> Parameters:
    keys = keys or [f"row {index}" for index in range(len(samplings))]
    streams = [derive(sampling.seed, key) for key, sampling in zip(keys, samplings, strict=True)]
    return Parameters.of(streams, samplings, "cpu")


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """(chi2 - df) / sqrt(2 df): about standard normal where the counts come from `expected`."""
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def draw(logits: Tensor, sampling: Sampling, keys: list[str], position: Tensor) -> Choice:
    return choose(logits.expand(len(keys), -1), parameters([sampling] * len(keys), keys), position)


def test_noise_is_nested_split_mix_in_every_bit() -> None:
    assert split_mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the reference implementation's first output for seed 0
    streams, positions = [0, 1, 2**63 - 1, -(2**63), 123456789], [0, 1, 2, 4095, 10**6]
    noise = exponential_noise(torch.tensor(streams), torch.tensor(positions), 7)
    for row, (stream, position) in enumerate(zip(streams, positions, strict=True)):
        seed = split_mix((stream + (position + 1) * 0x9E3779B97F4A7C15) & WORD)
        for token in range(7):
            bits = split_mix((seed + (token + 1) * 0x9E3779B97F4A7C15) & WORD)
            uniform = ((bits >> 12) + 0.5) / 2**52
            assert float(noise[row, token]) == pytest.approx(-math.log(uniform), rel=1e-15, abs=0)


def test_noise_is_exponential_and_independent_across_keys_positions_and_tokens() -> None:
    streams = torch.tensor([derive(0, key) for key in ("a", "b")])
    noise = torch.stack([exponential_noise(streams, torch.full((2,), t), 500) for t in range(400)])  # [t, key, token]
    uniform = 1 - (-noise).exp()
    bins = torch.histc(uniform.flatten(), 100, 0, 1)
    assert abs(chi_square(bins, torch.full((100,), bins.sum() / 100))) < 4
    pairs = {
        "keys": (uniform[:, 0], uniform[:, 1]),
        "positions": (uniform[1:], uniform[:-1]),
        "tokens": (uniform[..., 1:], uniform[..., :-1]),
        "position against token": (uniform[1:, :, :-1], uniform[:-1, :, 1:]),
    }
    for name, (one, other) in pairs.items():
        joint = torch.histc((one * 10).floor() * 10 + (other * 10).floor(), 100, 0, 100)
        assert abs(chi_square(joint, torch.full((100,), joint.sum() / 100))) < 4, name


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), Sampling(temperature=1.7, seed=3)])
def test_sampled_frequencies_are_the_softmax(sampling: Sampling) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.0]])
    probability = (logits[0].double() / sampling.temperature).softmax(-1)
    n = 40_000
    by_key = draw(logits, sampling, [f"k{i}" for i in range(n)], torch.zeros(n, dtype=torch.int64))
    by_position = draw(logits, sampling, ["one key"] * n, torch.arange(n))
    for choice in (by_key, by_position):
        counts = torch.bincount(choice.token, minlength=7)
        assert chi_square(counts, n * probability) < 4
        torch.testing.assert_close(choice.logp.double(), probability.log()[choice.token], rtol=0, atol=1e-6)
        assert not choice.kept_logmass.any()


def test_choices_of_two_keys_and_of_two_positions_are_independent() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5]])
    n = 40_000
    one = draw(logits, Sampling(), ["one"] * n, torch.arange(n)).token
    other = draw(logits, Sampling(), ["other"] * n, torch.arange(n)).token
    probability = logits[0].double().softmax(-1)
    expected = (probability[:, None] * probability).flatten() * n
    for a, b in ((one, other), (one[1:], one[:-1]), (one[1:], other[:-1])):
        assert chi_square(torch.bincount(a * 4 + b, minlength=16), expected) < 4


def test_tokens_of_tiny_probability_are_still_drawn_as_often_as_they_should() -> None:
    logits = torch.zeros(1, 2000)
    logits[0, 0] = 12.0
    n = 20_000
    probability = float(logits[0].double().softmax(-1)[1:].sum())
    tokens = race(logits.softmax(-1).expand(n, -1), torch.arange(n) * 7919, torch.zeros(n, dtype=torch.int64))
    rare = int((tokens > 0).sum())
    assert abs(rare - n * probability) < 4 * math.sqrt(n * probability)


def reference_truncation(logits: Tensor, sampling: Sampling) -> tuple[set[int], float]:
    """The kept tokens and their mass, token by token from the definitions, in float64."""
    probability = (logits.double() / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(probability)), key=lambda v: -probability[v])
    kept = order
    if sampling.top_k:
        least = probability[order[min(sampling.top_k, len(order)) - 1]]
        kept = [v for v in kept if probability[v] >= least]
    if sampling.top_p < 1:
        total, before, within = sum(probability[v] for v in kept), 0.0, []
        for v in kept:
            if before / total >= sampling.top_p:
                break
            within.append(v)
            before += probability[v]
        kept = within
    kept = [v for v in kept if probability[v] >= sampling.min_p * probability[order[0]]]
    return set(kept), sum(probability[v] for v in kept)


TRUNCATIONS = [
    Sampling(top_k=1),
    Sampling(top_k=5),
    Sampling(top_k=1000),
    Sampling(top_p=0.6),
    Sampling(top_p=1e-9),
    Sampling(min_p=0.2),
    Sampling(min_p=1.0),
    Sampling(temperature=0.7, top_k=8, top_p=0.8, min_p=0.1),
    Sampling(temperature=1.5, top_k=12, top_p=0.5),
]


@pytest.mark.parametrize("sampling", TRUNCATIONS, ids=str)
def test_truncation_keeps_what_the_definitions_keep_and_says_how_much(sampling: Sampling) -> None:
    rows = torch.randn(8, 40, generator=torch.Generator().manual_seed(1)) * 2
    for logits in rows:
        kept, mass = reference_truncation(logits, sampling)
        n = 3000
        choice = draw(logits[None], sampling, [f"k{i}" for i in range(n)], torch.arange(n))
        assert set(choice.token.tolist()) <= kept
        torch.testing.assert_close(choice.kept_logmass, torch.full((n,), math.log(mass)), rtol=0, atol=1e-6)
        full = (logits.double() / sampling.temperature).log_softmax(-1)[choice.token]
        torch.testing.assert_close(choice.logp.double(), full - math.log(mass), rtol=0, atol=2e-6)
        index = torch.tensor(sorted(kept))
        renormalised = (logits.double() / sampling.temperature)[index].softmax(-1)
        counts = torch.bincount(choice.token, minlength=40)[index]
        frequent = renormalised * n > 5
        torch.testing.assert_close(
            counts[frequent] / n, renormalised[frequent].float(), rtol=0, atol=4.5 * 0.5 / math.sqrt(n)
        )


@pytest.mark.parametrize("sampling", TRUNCATIONS, ids=str)
def test_truncation_is_hugging_faces(sampling: Sampling) -> None:
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as hf

    warpers = LogitsProcessorList([hf.TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(hf.MinPLogitsWarper(sampling.min_p))
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(2)) * 3
    warped = warpers(torch.zeros(200, 1, dtype=torch.int64), logits)
    choice = choose(logits, parameters([sampling] * 200), torch.arange(200))
    theirs = warped.log_softmax(-1).gather(-1, choice.token[:, None])[:, 0]
    torch.testing.assert_close(choice.logp, theirs, rtol=0, atol=2e-6)


def test_tokens_tied_with_the_kth_all_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 1.0, 0.0]])
    choice = draw(logits, Sampling(top_k=2), [f"k{i}" for i in range(500)], torch.zeros(500, dtype=torch.int64))
    assert set(choice.token.tolist()) == {0, 1, 2, 3}


def test_greedy_takes_the_best_token_at_temperature_one_whatever_is_cut() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.0, top_k=1, top_p=0.1)):
        choice = draw(logits, sampling, ["k"], torch.tensor([3]))
        assert choice.token.tolist() == [1] and choice.kept_logmass.tolist() == [0.0]
        torch.testing.assert_close(choice.logp, logits[0].log_softmax(-1)[1:2])


def test_rows_of_a_batch_are_sampled_as_if_alone() -> None:
    kinds = [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.6, top_k=3), Sampling(top_p=0.9, seed=5)]
    kinds += [replace(kinds[2], min_p=0.1), Sampling(temperature=2.0), Sampling(temperature=0.0, top_p=0.3)]
    samplings = [kinds[i % len(kinds)] for i in range(37)]
    logits = torch.randn(37, 301, generator=torch.Generator().manual_seed(3)) * 5
    position = torch.arange(37) * 11
    whole = choose(logits, parameters(samplings), position)
    for row in range(37):
        alone = choose(
            logits[row : row + 1].clone(), parameters([samplings[row]], [f"row {row}"]), position[row : row + 1]
        )
        assert torch.equal(alone.token[0], whole.token[row])
        assert torch.equal(alone.logp[0], whole.logp[row])
        assert torch.equal(alone.kept_logmass[0], whole.kept_logmass[row])


def test_many_rows_are_cut_into_blocks_that_change_nothing() -> None:
    p = torch.randn(90, 4_000, generator=torch.Generator().manual_seed(4)).softmax(-1)
    stream, position = torch.arange(90) * 104729, torch.arange(90)
    whole = (p.double().log() - exponential_noise(stream, position, 4_000).log()).argmax(-1)
    assert torch.equal(race(p, stream, position), whole)


@pytest.mark.parametrize("vocabulary", [4096, 5000])
def test_a_large_vocabulary_is_drawn_in_two_heats_from_the_same_distribution(vocabulary: int) -> None:
    logits = torch.full((vocabulary,), -30.0)
    likely = torch.arange(0, vocabulary, 97)  # several in each group, the first and the last group among them
    logits[likely] = torch.randn(len(likely), generator=torch.Generator().manual_seed(6))
    logits[[0, 1, vocabulary - 1]] = torch.tensor([2.0, 1.0, 2.0])
    probability = logits.double().softmax(-1)
    n = 6_000
    by_key = draw(logits[None], Sampling(), [f"k{i}" for i in range(n)], torch.zeros(n, dtype=torch.int64))
    by_position = draw(logits[None], Sampling(), ["one key"] * n, torch.arange(n))
    likely = (n * probability > 5).nonzero().flatten()
    for choice in (by_key, by_position):
        counts = torch.bincount(choice.token, minlength=vocabulary)[likely]
        assert counts.sum() == n
        assert chi_square(counts, n * probability[likely]) < 4
        torch.testing.assert_close(choice.logp.double(), probability.log()[choice.token], rtol=0, atol=2e-6)
    # The two heats of a draw must not share their noise: where in its group a token stands says nothing of the group.
    flat = torch.zeros(1, 4096)
    token = draw(flat, Sampling(), ["one key"] * n, torch.arange(n)).token
    joint = torch.bincount(token // 256 * 16 + token % 256 // 16, minlength=256)
    assert chi_square(joint, torch.full((256,), n / 256)) < 4


def test_a_large_vocabularys_rows_do_not_know_each_other_and_may_be_cut() -> None:
    kinds = [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.6, top_k=3), Sampling(top_p=0.5, seed=5)]
    samplings = [kinds[i % len(kinds)] for i in range(9)]
    logits, position = torch.randn(9, 5000, generator=torch.Generator().manual_seed(3)) * 5, torch.arange(9) * 11
    whole = choose(logits, parameters(samplings), position)
    for row in range(9):
        own = parameters([samplings[row]], [f"row {row}"])
        alone = choose(logits[row : row + 1].clone(), own, position[row : row + 1])
        assert torch.equal(alone.token[0], whole.token[row]) and torch.equal(alone.logp[0], whole.logp[row])
        if samplings[row].top_k:
            assert whole.token[row] in logits[row].topk(3).indices
