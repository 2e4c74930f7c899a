"""A language model so small that all it can say is listed: vocabulary of 3 with an end token, answers of 1 to 3 tokens.

A state is a prefix of the answer. The policy is linear, logits = embed[state] @ head.T / temperature, so states share
parameters and no shift, mask or sign error can cancel. Nothing here knows the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

VOCABULARY = 3
END = 2
WIDTH = 4
PROMPT = (0, 1)
"""What precedes every answer; its tokens are in the batch and must never be trained on."""

Answer = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """embed [states + 2, WIDTH] and head [VOCABULARY, WIDTH], float64. The two extra rows are of positions that predict
    no token of an answer: the prompt's first, and the last of a finished answer."""

    embed: Tensor
    head: Tensor
    temperature: float = 1.0

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.embed, self.head


@dataclass(frozen=True, slots=True)
class World:
    """All answers of up to `longest` tokens, their rewards, and four policies: `policy` is the one being trained, and
    `old`, `behavior` and `reference` lie round it, near enough for ratios to stay moderate."""

    longest: int
    answers: tuple[Answer, ...]
    states: dict[Answer, int]
    reward: Tensor
    policy: Policy
    old: Policy
    behavior: Policy
    reference: Policy

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([float(len(answer)) for answer in self.answers], dtype=torch.float64)


def make_world(longest: int, *, binary: bool = False, temperature: float = 1.0, seed: int = 0) -> World:
    """A world of random rewards (0 or 1 if `binary`, about half each) and random, clearly uneven policies."""
    bodies = [body for length in range(longest) for body in product(range(END), repeat=length)]
    finished = [(*body, END) for body in bodies]
    cut = list(product(range(END), repeat=longest))
    answers = tuple(finished + cut)
    states = {body: row for row, body in enumerate(bodies)}
    generator = torch.Generator().manual_seed(seed + longest)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    embed, head = 0.7 * normal(len(states) + 2, WIDTH), normal(VOCABULARY, WIDTH)

    def near(distance: float) -> Policy:
        return Policy(embed + distance * normal(*embed.shape), head + distance * normal(*head.shape), temperature)

    reward = normal(len(answers))
    return World(
        longest=longest,
        answers=answers,
        states=states,
        reward=(reward > reward.median()).double() if binary else reward,
        policy=Policy(embed.clone().requires_grad_(), head.clone().requires_grad_(), temperature),
        old=near(0.25),
        behavior=near(0.25),
        reference=near(0.3),
    )
