"""Write about a topic without repeating words: NanoRL's task and reward, with a length for tiny models.

    Write ~12 words: the quiet river   ->   stone stone tree bird bird bird fish ...

The teacher goes through a list of words from a random start, but repeats the last word 60 % of the time. The most
likely text of an imitator repeats one word forever, and the reward teaches it to move on. The reward is the type-token
ratio minus a brevity penalty (`rewards.lexical`) whose target is 0.8 of the requested words: `words=100` gives NanoRL's
prompt and its target of 80. With a penalty scale of 0 the reward can be exploited: one word scores 1.0.
"""

from __future__ import annotations

import random

from novarl.core.errors import NovaError
from novarl.rewards.lexical import lexical
from novarl.tasks.task import Problem, Task, whole
from novarl.tasks.words import WORDS, topic

REPEAT_SHARE = 0.6


def task(*, words: int = 12, brevity_penalty_scale: float = 0.5) -> Task:
    """Writing about `words` (5 to 100) words."""
    count = whole(words, "words", lowest=5, highest=100)
    if not 0.0 <= brevity_penalty_scale <= 100.0:
        what = f"must be from 0 to 100, not {brevity_penalty_scale}"
        raise NovaError(what, where="task_options.brevity_penalty_scale", fix="the default is 0.5")

    def draw(rng: random.Random) -> Problem:
        return Problem(f"Write ~{count} words: {topic(rng)}")

    def teach(rng: random.Random, problem: Problem) -> str:
        vocabulary, length = WORDS["words"], count + rng.randint(-2, 2)
        place = rng.randrange(len(vocabulary))
        written = [vocabulary[place]]
        while len(written) < length:
            place += rng.random() >= REPEAT_SHARE
            written.append(vocabulary[place % len(vocabulary)])
        return " ".join(written)

    target = max(1, round(0.8 * count))
    return Task(
        name="lexical" if count == 12 else f"lexical-{count}",
        summary=f"write about {count} words and repeat few",
        draw=draw,
        teach=teach,
        rewards=lambda: {"lexical": lexical(brevity_penalty_scale=brevity_penalty_scale, target_words=target)},
        max_tokens=6 * count + 12,
        warmup=200,
        warmup_lr=3e-3,
        rl_lr=3e-4,
        split=" ",
        held_out_share=0.4,
        train_rows=800,
    )
