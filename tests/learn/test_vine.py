"""VinePPO's values: boundaries on tokens, each state asked once, values and segments by hand, unbiased estimates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, product
from statistics import fmean
from typing import Any

import pytest
import torch

from novarl.core.types import Prompt, Rollout, Scored, Scores, Sequence as TokenSequence
from novarl.data.pack import pack
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.vine import Continuations, Estimate, State, boundaries
from novarl.models.byte_tokenizer import ByteTokenizer
from tests.distributed.fork import run

PIECES = {1: "a", 2: "b", 3: "\n", 4: "b\n\na", 5: " .", 6: "\n\n", 7: ""}
"""A vocabulary with tokens that hold a split and more, and one that holds nothing."""


def decode(tokens: list[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def stripping(tokens: list[int]) -> str:
    """As decoders do that take the space from the beginning of a text."""
    return decode(tokens).removeprefix(" ")


@pytest.mark.parametrize(
    ("answer", "split", "wanted"),
    [
        ([1, 3, 2, 3, 1], "\n", [0, 2, 4]),
        ([1, 3, 2, 3], "\n", [0, 2]),  # a split at the very end begins nothing
        ([1, 4, 1, 2], "\n", [0, 2]),  # a token that holds more belongs whole to the step it ends
        ([1, 3, 3, 1, 6, 2], "\n\n", [0, 3, 5]),  # a split of two tokens, and of one
        ([3, 7, 3, 1], "\n\n", [0, 3]),  # with a token of no text between
        ([3, 3, 3, 1], "\n\n", [0, 2]),  # a step's end is not the next one's beginning
        ([1, 5, 2, 1], " .", [0, 2]),
        ([1, 2, 1], "", [0, 1, 2]),
        ([1, 2, 1], "x", [0]),
        ([], "\n", [0]),
    ],
)
def test_boundaries(answer: list[int], split: str, wanted: list[int]) -> None:
    assert boundaries(answer, decode, split=split, most=9) == wanted
    assert boundaries(answer, decode, split=split, most=2) == wanted[:2]


def test_a_decoder_that_strips_spaces_hides_no_split() -> None:
    assert boundaries([1, 5, 2, 1], stripping, split=" .", most=9) == [0, 2]


@pytest.mark.parametrize("split", ["。", "é", "\n", "。\n"])
def test_characters_of_several_tokens(split: str) -> None:
    """The byte tokenizer has a token for each byte: the step ends with the last byte of the split."""
    tokenizer, parts = ByteTokenizer(), ["一é", "二", "x三"]
    answer = tokenizer.encode(split.join(parts), add_special_tokens=False)
    begins = boundaries(answer, tokenizer.decode, split=split, most=9)
    steps = [tokenizer.decode(answer[a:b]) for a, b in zip(begins, [*begins[1:], len(answer)], strict=True)]
    assert "".join(steps) == split.join(parts)
    assert all(step.endswith(split) and step.count(split) == 1 for step in steps[:-1]) and split not in steps[-1]


def rollout(prompt: str, answer: Sequence[int], index: int = 0, *, group: int = 0, role: Any = "train") -> Rollout:
    tokens, mask = (9, 9, *answer), (False, False, *(True for _ in answer))
    zeros = (0.0,) * len(tokens)
    sequence = TokenSequence(tokens, mask, zeros, zeros, (0,) * len(tokens))
    return Rollout(Prompt(prompt, (9, 9), ()), group, index, (sequence,), (), decode(list(answer)), role=role)


KEPT = [
    Scored(rollout("p", [1, 3, 2, 3, 1], 0), {}, 1.0),
    Scored(rollout("p", [1, 3, 1], 1), {}, 0.0),
    Scored(rollout("p", [2, 2], 2), {}, 0.0),
    Scored(rollout("q", [1, 3, 1], 0, group=1), {}, 0.5),
    Scored(rollout("q", [1, 3], 1, group=1), {}, 0.25),
    Scored(rollout("q", [3, 3], 0, group=1, role="baseline"), {}, 0.0),
]
VALUES = {("p", ()): 0.4, ("p", (1, 3)): 0.6, ("p", (1, 3, 2, 3)): 0.9, ("q", ()): 0.3, ("q", (1, 3)): 0.7}


class Asked:
    """An estimator that knows, and remembers what it was asked."""

    def __init__(self) -> None:
        self.states: list[tuple[str, tuple[int, ...]]] = []
        self.steps: list[int] = []

    def __call__(self, states: Sequence[State], step: int) -> list[Estimate]:
        mine = [(state.prompt.id, state.answer) for state in states]
        self.states += mine
        self.steps.append(step)
        return [Estimate(VALUES[state], 0.5, 10) for state in mine]


def supply(ranks: Ranks | None = None) -> tuple[Scores, dict[str, float], Asked]:
    asked = Asked()
    vine = Continuations(asked, decode, split="\n", most=9, ranks=ranks or Ranks())
    scores, record = vine.supply(KEPT, pack(KEPT, dtype=torch.float64), Scores(), 7)
    return scores, dict(record), asked


def test_values_and_segments_by_hand() -> None:
    scores, record, asked = supply()
    assert scores.values is not None and scores.segment is not None
    mask = pack(KEPT).mask
    assert scores.values[mask].tolist() == pytest.approx(
        [0.4, 0.4, 0.6, 0.6, 0.9, 0.4, 0.4, 0.6, 0.4, 0.4, 0.3, 0.3, 0.7, 0.3, 0.3]
    )
    assert scores.segment[mask].tolist() == [0, 0, 1, 1, 2, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert not bool(scores.values[~mask].any() or scores.segment[~mask].any())
    assert sorted(asked.states) == sorted(VALUES) and asked.steps == [7], "each state once, of each prompt its own"
    assert record["value_states"] == 5 and record["value_tokens"] == 50 and record["value_std"] == 0.5
    assert record["value_cost"] == pytest.approx(50 / 15)


def test_advantages_are_differences_of_values() -> None:
    """A_i = V_{i+1} - V_i, and the reward less the last value: VinePPO's, by hand."""
    scores, _, _ = supply()
    batch = pack(KEPT, dtype=torch.float64)
    credit, _, _ = CreditRule("gae", options={"gamma": 1.0, "lam": 0.0})(batch, scores, None)
    wanted = [0.2, 0.2, 0.3, 0.3, 0.1, 0.2, 0.2, -0.6, -0.4, -0.4, 0.4, 0.4, -0.2, -0.05, -0.05]
    assert credit.advantage[batch.mask].tolist() == pytest.approx(wanted)


def on_a_rank(ranks: Ranks) -> tuple[Scores, dict[str, float], list[Any]]:
    scores, record, asked = supply(ranks)
    return scores, record, asked.states


def test_the_ranks_share_the_states_and_know_all() -> None:
    alone, record, _ = supply()
    assert alone.values is not None and alone.segment is not None
    parts = run(on_a_rank)
    for scores, found, _ in parts:
        assert torch.equal(scores.values, alone.values) and torch.equal(scores.segment, alone.segment)
        assert found == record
    first, second = (states for _, _, states in parts)
    assert first and second and sorted(first + second) == sorted(VALUES), "each state on one rank"


CHANCE = {1: 0.5, 2: 0.3, 3: 0.2}
"""A policy over three tokens that looks at nothing."""
LENGTH = 4


def worth(answer: Sequence[int]) -> float:
    """A reward that hangs together: how often a 1 is followed by a 3, and a 2 at the end."""
    return sum(pair == (1, 3) for pair in pairwise(answer)) + 0.5 * (answer[-1] == 2)


def exact(begin: tuple[int, ...]) -> float:
    """V of a state, over all that can follow."""
    total = 0.0
    for rest in product(CHANCE, repeat=LENGTH - len(begin)):
        chance = 1.0
        for token in rest:
            chance *= CHANCE[token]
        total += chance * worth(begin + rest)
    return total


class Sampled:
    """What `samples` continuations say."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.random = samples, random.Random(seed)

    def __call__(self, states: Sequence[State], step: int) -> list[Estimate]:
        return [self._one(state.answer) for state in states]

    def _one(self, begin: tuple[int, ...]) -> Estimate:
        tokens, weights = list(CHANCE), list(CHANCE.values())
        rest = LENGTH - len(begin)
        rewards = [worth((*begin, *self.random.choices(tokens, weights, k=rest))) for _ in range(self.samples)]
        mean = fmean(rewards)
        return Estimate(mean, fmean((reward - mean) ** 2 for reward in rewards) ** 0.5, rest * self.samples)


def errors(samples: int, seed: int) -> list[tuple[float, float]]:
    """(estimate - exact value, its standard error) of every state on the way of three answers."""
    kept = [Scored(rollout("p", answer, index), {}, worth(answer)) for index, answer in enumerate(ANSWERS)]
    vine = Continuations(Sampled(samples, seed), decode, split="", most=9, ranks=Ranks())
    scores, _ = vine.supply(kept, pack(kept, dtype=torch.float64), Scores(), 0)
    assert scores.values is not None
    values = scores.values[pack(kept).mask].view(len(ANSWERS), LENGTH).tolist()
    found = []
    for answer, row in zip(ANSWERS, values, strict=True):
        for place, value in enumerate(row):
            truth = exact(answer[:place])
            square = sum(
                (worth(answer[:place] + rest) - truth) ** 2
                * torch.tensor([CHANCE[token] for token in rest], dtype=torch.float64).prod().item()
                for rest in product(CHANCE, repeat=LENGTH - place)
            )
            found.append((value - truth, (square / samples) ** 0.5))
    return found


ANSWERS = ((1, 3, 2, 2), (2, 1, 1, 3), (3, 1, 3, 1))


def test_many_continuations_give_the_exact_values() -> None:
    few, many = errors(20, 0), errors(4000, 0)
    assert all(abs(error) < 4.5 * deviation for error, deviation in few + many)
    assert max(deviation for _, deviation in many) < 0.02
    spread = fmean((error / deviation) ** 2 for error, deviation in few + many)
    assert 0.3 < spread < 3.0, f"errors are {spread:.2f} times as large as chance makes them"
