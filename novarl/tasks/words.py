"""The vocabulary of the writing tasks (`data/words.json`)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from importlib import resources

WORDS: Mapping[str, Sequence[str]] = json.loads(
    (resources.files("novarl.tasks") / "data" / "words.json").read_text(encoding="utf-8")
)
"""`kinds` and `things` of topics, `words` to write with; `qualities`, `verbs` and `endings` of reviews."""


def topic(rng: random.Random) -> str:
    """A random topic.

    >>> topic(random.Random(0))
    'the grey farm'
    """
    return f"the {rng.choice(WORDS['kinds'])} {rng.choice(WORDS['things'])}"
