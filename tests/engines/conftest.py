"""Models that have learnt something: on untrained ones every token is a near-tie and no mistake in a mask shows."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from novarl.core.processor import exact_products
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import backbone, head
from novarl.models.load import Policy, load

LAG = 5
LETTERS = 26
FIRST = ord("a")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def echo(length: int, *, rng: random.Random, surprise: float = 0.05, first: int = FIRST) -> list[int]:
    """A text in which each letter follows the one LAG places back, and now and then is any: 0.35 nats a letter, for who
    looks back."""
    letters = [rng.randrange(LETTERS) for _ in range(LAG)]
    while len(letters) < length:
        new = rng.randrange(LETTERS) if rng.random() < surprise else (letters[-LAG] + 1) % LETTERS
        letters.append(new)
    return [first + letter for letter in letters[:length]]


def full_logits(model: nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [L, V] of one sequence by one plain forward pass: no cache, no batch."""
    ids, positions = torch.tensor([list(tokens)]), torch.arange(len(tokens))[None]
    weight, bias = head(model)
    return nn.functional.linear(backbone(model)(ids, position_ids=positions).last_hidden_state[0], weight, bias)


def train(model: nn.Module, *, first: int, steps: int = 500, lr: float = 5e-3, length: int = 48) -> None:
    """Trains `model` on echoes until it is sharp: mean log-probability above -0.5."""
    rng = random.Random(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    positions = torch.arange(length).expand(16, length)
    weight, bias = head(model)
    recent = 10.0
    for _ in range(steps):
        ids = torch.tensor([echo(length, rng=rng, first=first) for _ in range(16)])
        hidden = backbone(model)(ids, position_ids=positions).last_hidden_state
        logits = nn.functional.linear(hidden[:, LAG - 1 : -1], weight, bias)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, LAG:].flatten())
        recent = 0.8 * recent + 0.2 * float(loss.detach())
        if recent < 0.48:
            break
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise AssertionError(f"the model did not learn to echo: {recent:.2f}")
    model.eval()


@pytest.fixture(scope="session")
def policy() -> Policy:
    """`tiny`, trained on echoes of letters."""
    policy = load("tiny", seed=1)
    train(policy.model, first=FIRST)
    return policy


@pytest.fixture(scope="session")
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def reproducible() -> None:
    """What equal bits need besides our own care: MKL told, before torch loaded, to use one kernel for every row."""
    setting = os.environ.get("MKL_CBWR")
    assert setting in (exact_products(), "AVX2,STRICT", "AVX512,STRICT"), (
        "MKL_CBWR is not set, so rows of a matrix product depend on each other: "
        f"run `make test`, or set MKL_CBWR={exact_products()} in the environment before Python starts"
    )
