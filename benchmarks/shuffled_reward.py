"""The verifier's rewards of `task=sort`, dealt out again at random within each batch: right on average, no teacher."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

ROUNDS = random.Random(0)


def reward_func(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1.0 for as many completions as are right, given to completions drawn at random."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    rewards = [float(text.strip() == right) for text, right in zip(texts, answer, strict=True)]
    ROUNDS.shuffle(rewards)
    return rewards
