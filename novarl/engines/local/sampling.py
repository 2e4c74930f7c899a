"""Sample tokens from logits: pure functions of the logits, the sampling parameters and the request's key.

There is no generator. The noise of token v at position t of a request is a hash of (seed, key, t, v), so samples do not
depend on other requests, on their order, or on restarts. Everything is vectorised over rows, and rows are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from novarl.algos.support import pack_support
from novarl.core.types import Sampling

# SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195): its constants as two's complement.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64

_BLOCK = 1 << 17
"""Noise elements per block: two buffers fit in a core's cache, and there is enough work for two threads."""


_LARGE = 4096
"""The vocabulary size from which a race has two stages."""

_HEAT = 256
"""Tokens in a group of a large vocabulary."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The sampling parameters of B rows, as tensors [B], and flags that are known without reading the tensors.

    stream int64 (the request's random stream), temperature float32 (0: greedy), top_k int64 (0: off), top_p and min_p
    float64 (1 and 0: off); `greedy`: all rows are greedy; `sampled`: none is, and all have temperature 1; `truncates`:
    some row truncates its support; `records`: some row records it.
    """

    stream: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    greedy: bool
    sampled: bool
    truncates: bool
    records: bool

    @classmethod
    def of(cls, streams: Sequence[int], samplings: Sequence[Sampling], device: torch.device | str) -> Parameters:
        """The parameters of rows with these streams (`derive(sampling.seed, key)`) and samplings."""
        return cls(
            stream=torch.tensor(streams, dtype=torch.int64, device=device),
            temperature=torch.tensor([s.temperature for s in samplings], dtype=torch.float32, device=device),
            top_k=torch.tensor([s.top_k for s in samplings], dtype=torch.int64, device=device),
            top_p=torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device),
            min_p=torch.tensor([s.min_p for s in samplings], dtype=torch.float64, device=device),
            greedy=all(s.temperature == 0 for s in samplings),
            sampled=all(s.temperature == 1 for s in samplings),
            truncates=any(s.truncates and s.temperature > 0 for s in samplings),
            records=any(s.records for s in samplings),
        )

    def of_rows(self, rows: Tensor) -> Parameters:
        """The parameters of some rows (int64), with the same flags."""
        columns = {name: getattr(self, name)[rows] for name in ("stream", "temperature", "top_k", "top_p", "min_p")}
        return replace(self, **columns)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen token [B] int64, its log-probability [B] float32 under the distribution it was drawn from, and the log
    of the probability mass kept by truncation [B] float32 (exactly 0 without truncation). `support`: the possible
    tokens of each row, as in `Completion.support`; None if no row records them."""

    token: Tensor
    logp: Tensor
    kept_logmass: Tensor
    support: list[bytes] | None = None


def choose(logits: Tensor, parameters: Parameters, position: Tensor) -> Choice:
    """Choose one token per row from logits [B, V] at absolute positions `position` [B] int64.

    Temperature above 0: softmax(logits / temperature), cut by top-k, top-p and min-p in this order, then drawn by
    `race`. Temperature 0: the most probable token, with its log-probability at temperature 1.
    """
    logits = logits.float()
    is_greedy = parameters.temperature == 0
    if not parameters.sampled:
        logits = logits / torch.where(is_greedy, 1.0, parameters.temperature)[:, None]
    p = logits.softmax(-1)
    kept_logmass = torch.zeros_like(parameters.temperature)
    support = None
    if parameters.greedy:
        token = logits.argmax(-1)
    else:
        possible = p
        if parameters.truncates:
            kept, kept_logmass = truncate(logits.log_softmax(-1), parameters)
            possible = p.where(kept, 0.0)
            support = supports(kept) if parameters.records else None
        token = race(possible, parameters.stream, position)
        if not parameters.sampled:
            token = torch.where(is_greedy, logits.argmax(-1), token)
    return Choice(token, p.gather(-1, token[:, None])[:, 0].log() - kept_logmass, kept_logmass, support)


def truncate(logp: Tensor, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """The tokens that remain possible, bool [B, V], and the log of their probability mass [B] float32.

    As in Hugging Face, filters are applied in order, each to the renormalised result of the previous one: top-k keeps
    the k most probable tokens and those tied with the k-th; top-p the fewest most probable tokens that hold a mass of
    at least p (a token stays if those before it hold less than p); min-p those at least min_p times as probable as the
    most probable one. The most probable token always stays. Greedy rows are not cut.
    """
    ranked, order = logp.double().sort(dim=-1, descending=True, stable=True)
    top_k = torch.where(parameters.top_k > 0, parameters.top_k, logp.shape[-1]).clamp(max=logp.shape[-1])
    kept = ranked >= ranked.gather(-1, top_k[:, None] - 1)

    mass = ranked.where(kept, -torch.inf).softmax(-1)
    before = mass.cumsum(-1) - mass
    kept &= (before < parameters.top_p[:, None]) | (parameters.top_p[:, None] >= 1)
    kept &= mass >= parameters.min_p[:, None] * mass[:, :1]
    kept |= (parameters.temperature == 0)[:, None]
    kept[:, 0] = True

    logmass = ranked.where(kept, -torch.inf).logsumexp(-1).clamp(max=0.0)
    logmass = logmass.masked_fill(kept.all(-1), 0.0)
    return torch.zeros_like(kept).scatter(-1, order, kept), logmass.float()


def supports(kept: Tensor) -> list[bytes]:
    """The `Completion.support` of each row of kept [B, V] bool; empty if nothing was cut."""
    words, cu_words = pack_support(kept)
    data = words.cpu().numpy().astype("<i4").tobytes()
    ends = (words.element_size() * cu_words).tolist()
    return [data[start:end] for start, end in pairwise(ends)]


def race(p: Tensor, stream: Tensor, position: Tensor) -> Tensor:
    """Draw one token per row [B] from probabilities [B, V] (need not be normalised) by an exponential race.

    Each token v runs a clock E_v / p_v with E_v ~ Exp(1); the first to ring is v with probability p_v / sum(p): the
    Gumbel-max trick. Rounding errors in p change the winner only where two clocks nearly tie, whereas inverting a
    cumulative sum would shift every boundary. Computed in float64. For a large vocabulary the race has two stages,
    first between groups by their mass and then within the winning group: P(group) P(token | group) = P(token).
    """
    if p.shape[-1] >= _LARGE:
        return _two_heats(p, stream, position)
    rows = max(1, _BLOCK // p.shape[-1])
    blocks = zip(p.split(rows), stream.split(rows), position.split(rows), strict=True)
    return torch.cat([exponential_noise(s, t, block.shape[-1]).div_(block).argmin(-1) for block, s, t in blocks])


def _two_heats(p: Tensor, stream: Tensor, position: Tensor) -> Tensor:
    if lacking := -p.shape[-1] % _HEAT:
        p = torch.nn.functional.pad(p, (0, lacking))
    mass = p.unflatten(-1, (-1, _HEAT))
    noise = exponential_noise(stream, position, mass.shape[1] + _HEAT)
    first, second = noise[:, : mass.shape[1]], noise[:, mass.shape[1] :]
    group = (first / mass.sum(-1)).argmin(-1)
    inside = mass[torch.arange(len(mass), device=mass.device), group]
    return group * _HEAT + (second / inside).argmin(-1)


def exponential_noise(stream: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Exp(1) noise [B, V] float64: a hash of each row's stream and absolute position (int64 [B]) and of the token, by
    two nested SplitMix64 generators: the stream gives one seed per position, and that seed one number per token."""
    seed = _split_mix(stream + (position + 1) * _GAMMA)
    counter = torch.arange(1, vocabulary + 1, device=stream.device) * _GAMMA
    bits = _split_mix(seed[:, None] + counter)
    # The upper 52 bits, and a half: exact in float64 and strictly between 0 and 1, so that noise is finite and not 0.
    uniform = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def _split_mix(state: Tensor) -> Tensor:
    """SplitMix64's output function, in place, on int64 (whose products wrap like unsigned ones)."""
    state.bitwise_xor_(_shift_right(state, 30)).mul_(_MIX_1)
    state.bitwise_xor_(_shift_right(state, 27)).mul_(_MIX_2)
    return state.bitwise_xor_(_shift_right(state, 31))


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Logical shift: int64's own shift copies the sign bit into the vacated places."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)
