"""What both sides are given. It imports nothing of either, and no random generator whose numbers may change.

`random.Random(seed).random()` is promised to stay the same in every version of Python; everything is made of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

JUNK = 97.0
"""What stands where nobody may look: outside the mask."""

# Preferences: beta, labels that are wrong, SimPO's margin, centring of rewards, KTO's weights.
BETA, WRONG, GAMMA, CENTRING, GOOD, BAD = 0.3, 0.1, 0.4, 0.02, 1.4, 0.7
PAIRS, ANSWER = 4, 6
# Credit over time.
DISCOUNT, LAMBDA = 0.9, 0.8
# Surrogates: clips, two-sided clip, weight of the KL; bounds of importance weights.
CLIP, NARROW, CISPO_HIGH, TWO_SIDED, KL = (0.2, 0.28), (0.05, 0.06), 1.2, 1.35, 0.3
TAU_POS, TAU_NEG = 1.0, 1.05
LOW, HIGH = 0.8, 1.25
STD_EPS, GENERATIONS = 1e-4, 4
BINS = 10


def _drawer(seed: str) -> random.Random:
    return random.Random(seed)


def _uniform(source: random.Random, low: float, high: float, *shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    flat = torch.tensor([low + (high - low) * source.random() for _ in range(count)], dtype=torch.float64)
    return flat.reshape(shape)


@dataclass(frozen=True, slots=True)
class Steps:
    """Rows of steps, [S, T], with gaps and padding on either side; `bootstrap` [S] is 0 where a row is over."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    bootstrap: Tensor
    logp: Tensor
    behavior_logp: Tensor


@cache
def steps() -> Steps:
    rows = ["1111111", "1100110", "0010000", "0011111", "1010101", "1111100"]
    mask = torch.tensor([[c == "1" for c in row] for row in rows])
    source = _drawer("steps")
    rewards, values = (_uniform(source, low, 2.0, *mask.shape) for low in (-2.0, -1.0))
    behavior_logp = _uniform(source, -3.0, -0.5, *mask.shape)
    logp = behavior_logp + _uniform(source, -1.2, 1.2, *mask.shape)
    over = torch.tensor([False, True, False, False, True, True])
    return Steps(
        rewards=torch.where(mask, rewards, 0.0),
        values=torch.where(mask, values, JUNK),
        mask=mask,
        bootstrap=torch.where(over, 0.0, _uniform(source, 0.5, 1.5, len(rows))),
        logp=torch.where(mask, logp, JUNK),
        behavior_logp=torch.where(mask, behavior_logp, -JUNK),
    )


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Answers of one to seven tokens, [S, T]: under the policy, the old one, the sampler and the reference."""

    logp: Tensor
    old_logp: Tensor
    behavior_logp: Tensor
    ref_logp: Tensor
    advantage: Tensor
    mask: Tensor
    rewards: Tensor
    group: Tensor


@cache
def rollouts() -> Rollouts:
    """Twelve answers, four to each of three prompts; those to the second are all worth the same."""
    source = _drawer("rollouts")
    lengths = torch.tensor([7, 3, 1, 4, 5, 2, 7, 6, 1, 3, 4, 5])
    mask = torch.arange(7) < lengths[:, None]
    logp = _uniform(source, -3.0, -0.2, *mask.shape)
    old, ref = (logp + _uniform(source, -0.5, 0.5, *mask.shape) for _ in range(2))
    rewards = _uniform(source, 0.0, 3.0, len(lengths))
    rewards[GENERATIONS : 2 * GENERATIONS] = 0.7
    return Rollouts(
        logp=logp,
        old_logp=old,
        behavior_logp=old + _uniform(source, -0.4, 0.4, *mask.shape),
        ref_logp=ref,
        advantage=_uniform(source, -1.5, 1.5, len(lengths)),
        mask=mask,
        rewards=rewards,
        group=torch.arange(len(lengths)) // GENERATIONS,
    )


@dataclass(frozen=True, slots=True)
class Preferences:
    """Token log-probabilities [2 pairs, T] of answers, chosen ones before rejected ones; sums under the reference;
    the same of answers to other prompts, for KTO; labels, rewards and margins for reward models."""

    logp: Tensor
    mask: Tensor
    ref: Tensor
    strangers: Tensor
    stranger_ref: Tensor
    label: Tensor
    reward: Tensor
    margin: Tensor


@cache
def preferences() -> Preferences:
    source = _drawer("preferences")
    lengths = torch.tensor([6, 3, 1, 5, 2, 4, 6, 1])
    mask = torch.arange(ANSWER) < lengths[:, None]
    logp = torch.where(mask, _uniform(source, -3.0, 0.0, *mask.shape), 0.0)
    ref = torch.where(mask, logp + _uniform(source, -0.5, 0.5, *mask.shape), 0.0)
    stranger_ref = _uniform(source, -10.0, 0.0, 2 * PAIRS)
    return Preferences(
        logp=logp,
        mask=mask,
        ref=ref.sum(1),
        strangers=stranger_ref + _uniform(source, -0.5, 1.5, 2 * PAIRS),
        stranger_ref=stranger_ref,
        label=torch.tensor([1, 0, 1, 1, 0, 0, 1, 0]),
        reward=_uniform(source, -2.0, 2.0, 2 * PAIRS),
        margin=_uniform(source, 0.0, 1.0, PAIRS),
    )


@dataclass(frozen=True, slots=True)
class Judgements:
    """Scores with ties, probabilities that leave a bin empty and meet no inner edge of one, labels, all [n]."""

    score: Tensor
    probability: Tensor
    label: Tensor


@cache
def judgements() -> Judgements:
    source = _drawer("judgements")
    probability = _uniform(source, 0.0, 1.0, 150)
    probability = torch.where((probability > 0.4) & (probability < 0.5), probability + 0.2, probability)
    probability[0], probability[1] = 0.0, 1.0
    label = (_uniform(source, 0.0, 1.0, 150) < 0.2 + 0.5 * probability).long()
    score = ((probability + _uniform(source, -0.3, 0.3, 150)) * 8).round() / 8
    return Judgements(score=score, probability=probability, label=label)
