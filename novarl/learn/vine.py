"""VinePPO's values (https://arxiv.org/abs/2410.01679): the mean reward of new continuations instead of a critic.

The value of the state at the beginning of each step of an answer is estimated from continuations by the policy, which
are scored like any answer and never trained on. Equal states are estimated once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from novarl.core.types import Batch, Prompt, Record, Rollout, Scored, Scores
from novarl.distributed.ranks import Ranks
from novarl.learn.plan import trajectory_of_tokens
from novarl.learn.supplier import Supplier

Answer = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class State:
    """A prompt and the tokens of an answer so far."""

    prompt: Prompt
    answer: Answer


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean and standard deviation of a state's rewards, and the number of sampled tokens."""

    value: float
    std: float
    tokens: int


Estimator = Callable[[Sequence[State], int], list[Estimate]]
"""(states, step) -> estimates from new continuations."""


def boundaries(answer: Sequence[int], decode: Callable[[list[int]], str], *, split: str, most: int) -> list[int]:
    """The token positions at which the steps of an answer begin, starting with 0; at most `most`.

    A step ends with the token that completes an occurrence of `split`, or with every token if `split` is empty. Text is
    never re-tokenized, so a token that extends beyond the split belongs to the step it ends.
    """
    begins, longest = [0], len(split.encode()) + 1
    for position in range(1, len(answer)):
        # Decoded together, because a token may be part of a character; an occurrence has at least a byte of each token,
        # and one preceding token protects it from decoders that strip a leading space.
        recent = answer[max(begins[-1], position - longest) : position]
        if split in decode(list(recent)):
            begins.append(position)
    return begins[:most]


class Continuations(Supplier):
    """A supplier of values and their segments."""

    def __init__(
        self, estimate: Estimator, decode: Callable[[list[int]], str], *, split: str, most: int, ranks: Ranks
    ) -> None:
        self.estimate, self.decode, self.split, self.most, self.ranks = estimate, decode, split, most, ranks

    def supply(self, kept: Sequence[Scored], batch: Batch, scores: Scores, step: int) -> tuple[Scores, Record]:
        """The scores with the value at the beginning of each trained token's step, and the step's index."""
        values, segment = torch.zeros_like(batch.behavior_logp), torch.zeros_like(batch.tokens)
        flat, owner = batch.mask.nonzero().flatten(), trajectory_of_tokens(batch)[batch.mask]
        begins: dict[int, list[int]] = {}
        places: dict[tuple[str, Answer], int] = {}
        states: list[State] = []
        for trajectory, item in enumerate(kept):
            if item.rollout.role == "baseline":
                continue
            answer = answer_of(item.rollout)
            begins[trajectory] = boundaries(answer, self.decode, split=self.split, most=self.most)
            for begin in begins[trajectory]:
                state = State(item.rollout.prompt, answer[:begin])
                if places.setdefault((state.prompt.id, state.answer), len(states)) == len(states):
                    states.append(state)
        found = self._estimates(states, step)
        for trajectory, positions in begins.items():
            mine = flat[owner == trajectory]
            answer = tuple(batch.tokens[mine].tolist())
            for number, begin in enumerate(positions):
                values[mine[begin:]] = found[places[kept[trajectory].rollout.prompt.id, answer[:begin]]].value
                segment[mine[begin:]] = number
        spent = sum(estimate.tokens for estimate in found)
        record: Record = {
            "value_states": float(len(states)),
            "value_tokens": float(spent),
            "value_cost": spent / max(1, flat.numel()),
            "value_std": fmean(estimate.std for estimate in found),
            "value_mean": values[batch.mask].mean().item(),
        }
        return replace(scores, values=values, segment=segment), record

    def _estimates(self, states: list[State], step: int) -> list[Estimate]:
        """Divide the states over the ranks; every rank gets all estimates, in the order of the states."""
        numbered = self.ranks.share(list(enumerate(states)))
        mine = self.estimate([state for _, state in numbered], step)
        pairs = [(number, found) for (number, _), found in zip(numbered, mine, strict=True)]
        merged = {number: found for part in self.ranks.gather(pairs) for number, found in part}
        return [merged[number] for number in range(len(states))]


def answer_of(rollout: Rollout) -> Answer:
    """The tokens that the policy chose in a single-turn episode, which has one sequence."""
    (sequence,) = rollout.sequences
    return tuple(token for token, chosen in zip(sequence.tokens, sequence.mask, strict=True) if chosen)
