"""Rewards of an answer's tokens, as TRL has them under these names: penalties for long and for repetitive answers."""

from __future__ import annotations

from collections.abc import Sequence

from novarl.core.errors import NovaError
from novarl.rewards.per_rollout import PerRollout
from novarl.rewards.signature import sampled


def soft_overlong(length: int, *, longest: int, cache: int) -> float:
    """DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, equation 13) of an answer of `length` tokens:

        0                                     length <= longest - cache
        (longest - cache - length) / cache    up to longest
        -1                                    beyond

    >>> [soft_overlong(length, longest=100, cache=20) for length in (80, 90, 100, 101)]
    [0.0, -0.5, -1.0, -1.0]
    """
    if length <= longest - cache:
        return 0.0
    return (longest - cache - length) / cache if length <= longest else -1.0


def repeated(tokens: Sequence[int], *, size: int) -> float:
    """The share of an answer's n-grams of `size` tokens that are repetitions (https://arxiv.org/abs/2502.03373, C.2):
    1 - distinct / all; 0 for an answer of fewer tokens.

    >>> repeated([1, 2, 3, 4], size=2), repeated([5, 5, 5, 5, 5], size=2), repeated([5], size=2)
    (0.0, 0.75, 0.0)
    """
    found = [tuple(tokens[begin : begin + size]) for begin in range(len(tokens) - size + 1)]
    return 1.0 - len(set(found)) / len(found) if found else 0.0


def overlong(*, max_completion_len: int | None = None, soft_punish_cache: int | None = None) -> PerRollout:
    """TRL's `get_soft_overlong_punishment`. NovaError: a limit is not given, or the second exceeds the first."""
    name = "get_soft_overlong_punishment"
    if max_completion_len is None or soft_punish_cache is None:
        fix = f"set reward.{name}.max_completion_len and reward.{name}.soft_punish_cache, in tokens"
        raise NovaError("max_completion_len and soft_punish_cache are required", where=f"reward={name}", fix=fix)
    if soft_punish_cache > max_completion_len:
        what = f"soft_punish_cache={soft_punish_cache} exceeds max_completion_len={max_completion_len}"
        raise NovaError(
            what, where=f"reward.{name}", fix="the penalty begins soft_punish_cache tokens before the limit"
        )
    longest, cache = max_completion_len, soft_punish_cache
    return PerRollout(lambda rollout: soft_overlong(len(sampled(rollout)), longest=longest, cache=cache))


def repetition(*, ngram_size: int = 3, max_penalty: float = -1.0) -> PerRollout:
    """TRL's `get_repetition_penalty_reward`: `max_penalty` times the share of repeated n-grams."""
    return PerRollout(lambda rollout: 0.0 + max_penalty * repeated(sampled(rollout), size=ngram_size))
