"""Evaluate a policy on held-out rows: greedy score and pass@k, with confidence intervals."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from statistics import fmean, pvariance

from torch import Tensor

from novarl.core.errors import NovaError
from novarl.core.types import Batch, Prompt, Rollout, Scored, Sequence as TokenSequence
from novarl.data.pack import pack_sequences
from novarl.distributed.ranks import Ranks
from novarl.learn.plan import per_trajectory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`score` is the mean greedy reward over `n` rows and `interval` its 95 % interval; `pass_at` maps k to the
    probability that at least one of k samples is right (Chen et al. 2021, https://arxiv.org/abs/2107.03374)."""

    score: float
    interval: tuple[float, float]
    n: int
    pass_at: dict[int, float]
    failed: int
    rows: tuple[Scored, ...]
    pass_interval: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """The 95 % confidence interval of each `pass_at`, over rows."""
    best: tuple[float, tuple[float, float]] | None = None
    """Best-of-k: the mean reward of the samples selected by one of the rewards, and its 95 % interval."""
    samples: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    """The rewards of the k samples of each row, by the row's position."""
    scores: tuple[tuple[str, float], ...] = ()
    """The score of each row by its name, where rows are not answered (`rows` is empty)."""
    hypervolume: float | None = None
    """With several objectives: the hypervolume dominated by all evaluations so far."""

    def __repr__(self) -> str:
        low, high = self.interval
        others = "".join(f", pass@{k}={value:.3f}" for k, value in self.pass_at.items())
        return f"Evaluation(score={self.score:.3f}, interval=({low:.3f}, {high:.3f}), n={self.n}{others})"

    def measures(self) -> dict[str, float]:
        """Additional metrics of an evaluation, by glossary name without `eval/`."""
        return {} if self.hypervolume is None else {"hypervolume": self.hypervolume}

    def summary(self) -> dict[str, object]:
        """The entry in summary.json."""
        found: dict[str, object] = {"score": self.score, "interval": list(self.interval), "n": self.n}
        if self.failed:
            found["failed"] = self.failed
        found |= {f"pass@{k}": value for k, value in self.pass_at.items()}
        found |= {f"pass@{k}_interval": list(ends) for k, ends in self.pass_interval.items()}
        if self.best is not None:
            found |= {"best_of": self.best[0], "best_of_interval": list(self.best[1])}
        return found | self.measures()


def wilson(successes: float, n: float, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion (1927), which is accurate near 0 and 1. A tie is half a success."""
    if n == 0:
        return (0.0, 1.0)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return (max(0.0, centre - half), min(1.0, centre + half))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the mean: Wilson's for values in [0, 1], otherwise the normal approximation.

    Between 0 and 1 the effective sample size is n p (1 - p) / v, with p the mean and v the variance of the values.
    """
    n = len(values)
    if all(value in (0.0, 1.0) for value in values):
        return wilson(round(sum(values)), n)
    if n < 2:
        return (-math.inf, math.inf)
    mean, variance = fmean(values), pvariance(values)
    if variance == 0.0 or not all(0.0 <= value <= 1.0 for value in values):
        half = 1.959964 * math.sqrt(variance / (n - 1))
        return (mean - half, mean + half)
    rows = n * mean * (1.0 - mean) / variance
    return wilson(mean * rows, rows)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): an unbiased estimate from n samples, c of them right.

    >>> pass_at_k(2, 1, 1), pass_at_k(4, 1, 2)
    (0.5, 0.5)
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def evaluate(
    prompts: Sequence[Prompt],
    sample: Callable[[Sequence[tuple[int, Prompt]], int, float], list[Rollout]],
    score: Callable[[list[Rollout]], list[Scored]],
    *,
    ranks: Ranks,
    k: int = 0,
    temperature: float = 1.0,
    right: float = 1.0,
    best_of: str | None = None,
) -> Evaluation:
    """Answer every prompt greedily, and k more times at `temperature` where `k > 0`.

    `sample(asked, samples, temperature)` returns scored rollouts; a sample is right if its reward is at least `right`.
    Rows whose reward failed are counted separately and excluded from the mean. `best_of`: the name of the reward that
    selects one of a row's samples. Raises NovaError if it is not a reward or has several parts.
    """
    asked = ranks.share(list(enumerate(prompts)))
    greedy = _together(ranks, score(sample(asked, 1, 0.0)))
    rewards = [item.reward for item in greedy if item.reward is not None]
    passed: dict[int, list[float]] = {}
    picked: dict[int, Scored] = {}
    by_prompt: dict[int, list[float]] = defaultdict(list)
    if k > 0:
        for item in _together(ranks, score(sample(asked, k, temperature))):
            if item.reward is not None:
                by_prompt[item.rollout.group].append(item.reward)
                if best_of is not None:
                    if best_of not in item.rewards:
                        what, fix = f"no single-valued reward named {best_of!r}", f"one of {', '.join(item.rewards)}"
                        raise NovaError(what, where="best_of", fix=fix)
                    group = item.rollout.group
                    picked[group] = max(picked.get(group, item), item, key=lambda one: one.rewards[best_of])
        for size in [size for size in (1, 2, 4, 8, 16, 32, 64) if size < k] + [k]:
            full = [values for values in by_prompt.values() if len(values) >= size]
            if full:
                passed[size] = [pass_at_k(len(v), sum(reward >= right for reward in v), size) for v in full]
    chosen = [item.reward for item in picked.values() if item.reward is not None]
    return Evaluation(
        score=fmean(rewards) if rewards else math.nan,
        interval=mean_interval(rewards) if rewards else (-math.inf, math.inf),
        n=len(rewards),
        pass_at={size: fmean(shares) for size, shares in passed.items()},
        failed=len(greedy) - len(rewards),
        rows=tuple(greedy),
        pass_interval={size: mean_interval(shares) for size, shares in passed.items()},
        best=(fmean(chosen), mean_interval(chosen)) if chosen else None,
        samples={group: tuple(values) for group, values in by_prompt.items()},
    )


def _together(ranks: Ranks, mine: list[Scored]) -> list[Scored]:
    merged = [item for part in ranks.gather(mine) for item in part]
    return sorted(merged, key=lambda item: (item.rollout.group, item.rollout.index))


def evaluate_likelihood(
    rows: Sequence[TokenSequence], logprobs: Callable[[Batch], Tensor], *, batch_size: int = 64
) -> Evaluation:
    """The likelihood of held-out rows: `score` is the mean of each row's mean log-probability per trained token, in
    nats."""
    means: list[float] = []
    for begin in range(0, len(rows), batch_size):
        batch = pack_sequences(rows[begin : begin + batch_size])
        total, tokens = per_trajectory(batch, logprobs(batch).double()), per_trajectory(batch, batch.mask.double())
        means += (total / tokens).tolist()
    return Evaluation(
        score=fmean(means),
        interval=mean_interval(means),
        n=len(means),
        pass_at={},
        failed=0,
        rows=(),
        scores=tuple(zip(names_of([row.tokens for row in rows]), means, strict=True)),
    )


def names_of(rows: Sequence[Sequence[int]]) -> list[str]:
    """A name for each row of tokens that has none: the first 12 hex digits of its SHA-256, numbered if it repeats."""
    names: list[str] = []
    seen: Counter[str] = Counter()
    for tokens in rows:
        digest = sha256(",".join(map(str, tokens)).encode()).hexdigest()[:12]
        seen[digest] += 1
        names.append(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}")
    return names
