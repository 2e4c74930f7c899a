"""The library's side: the expectation, over every minibatch that can be drawn, of the gradient of its loss.

All answers lie on one packed token axis, each after its prompt, as in a `Batch`; a minibatch of k answers is k pieces
of it. Its loss is computed by the library's functions as a learner would call them, weighted by the minibatch's
probability, and differentiated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from novarl.kernels import logprobs
from tests.certificates import exact
from tests.certificates.world import PROMPT, Policy, World


@dataclass(frozen=True, slots=True)
class Minibatch:
    """k answers: per-token columns [N], per-answer ones [k]. `state` is the row of `embed` that a token came from."""

    logp: Tensor
    entropy: Tensor
    old_logp: Tensor
    behavior_logp: Tensor
    ref_logp: Tensor
    mask: Tensor
    state: Tensor
    traj: Tensor
    reward: Tensor
    greedy: Tensor
    group: Tensor


Loss = Callable[[Minibatch], Tensor]


@dataclass(frozen=True, slots=True)
class Packed:
    """All answers of a world, one after the other, each after its prompt."""

    tokens: Tensor
    row: Tensor
    prev: Tensor
    mask: Tensor
    spans: tuple[range, ...]

    @property
    def state(self) -> Tensor:
        """The row of `embed` that each token was chosen from; of a prompt's first, which none was, any."""
        return self.row[self.prev]


def pack(world: World) -> Packed:
    """`row` is the row of `embed` that a position's output comes from."""
    start, end = len(world.states), len(world.states) + 1
    tokens: list[int] = []
    row: list[int] = []
    prev: list[int] = []
    mask: list[bool] = []
    spans = []
    for answer in world.answers:
        first = len(tokens)
        tokens += [*PROMPT, *answer]
        row += [start] * (len(PROMPT) - 1) + [world.states.get(answer[:t], end) for t in range(len(answer) + 1)]
        prev += [-1, *range(first, len(tokens) - 1)]
        mask += [False] * len(PROMPT) + [True] * len(answer)
        spans.append(range(first, len(tokens)))
    return Packed(torch.tensor(tokens), torch.tensor(row), torch.tensor(prev), torch.tensor(mask), tuple(spans))


def token_logp(packed: Packed, policy: Policy) -> tuple[Tensor, Tensor]:
    """(logp, entropy) of every token [N] under a policy, 0 where nothing predicts it; in chunks of 7, so in several."""
    logp, entropy = logprobs.chunked_logprobs(*_predicted(packed, policy), temperature=policy.temperature, chunk=7)
    return _every(packed, logp), _every(packed, entropy)


def likeliest_logp(packed: Packed, policy: Policy) -> Tensor:
    """max_j log p_j at every token [N], 0 where nothing predicts it."""
    return _every(
        packed, logprobs.chunked_scores(*_predicted(packed, policy), temperature=policy.temperature, chunk=7)[2]
    )


def _predicted(packed: Packed, policy: Policy) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, targets) of the tokens that have one before them."""
    known = packed.prev >= 0
    return policy.embed[packed.row][packed.prev[known]], policy.head, packed.tokens[known]


def _every(packed: Packed, known: Tensor) -> Tensor:
    """All tokens' numbers from those of the tokens that have one before them."""
    return torch.zeros(len(packed.tokens), dtype=torch.float64).masked_scatter(packed.prev >= 0, known)


def greedy_reward(world: World) -> Tensor:
    """The reward of the answer that takes the likeliest token at every step."""
    answer: tuple[int, ...] = ()
    while answer not in world.answers:
        answer = (*answer, int(exact.state_distribution(world, world.policy, answer).argmax()))
    return world.reward[world.answers.index(answer)]


def minibatches(
    world: World, k: int, *, sampler: Policy | None = None, groups: Sequence[int] | None = None
) -> Iterator[tuple[tuple[int, ...], Tensor, Minibatch]]:
    """(the answers' numbers, the probability, the minibatch) of all k answers that `sampler` (default: the policy) can
    draw. `groups` are their group ids (default: one group)."""
    packed = pack(world)
    logp, entropy = token_logp(packed, world.policy)
    frozen = [token_logp(packed, policy)[0].detach() for policy in (world.old, world.behavior, world.reference)]
    chance = exact.fixed(world, sampler or world.policy)
    greedy = greedy_reward(world).expand(k)
    ids = torch.tensor(groups or [41] * k)
    for drawn in product(range(len(world.answers)), repeat=k):
        index = torch.cat([torch.tensor(packed.spans[y]) for y in drawn])
        sizes = torch.tensor([len(packed.spans[y]) for y in drawn])
        columns = [column[index] for column in (logp, entropy, *frozen, packed.mask, packed.state)]
        owner = torch.arange(k).repeat_interleave(sizes)
        probability = chance[list(drawn)].prod()
        yield drawn, probability, Minibatch(*columns, owner, world.reward[list(drawn)], greedy, ids)


def expectation(
    world: World,
    k: int,
    loss: Loss,
    *,
    sampler: Policy | None = None,
    groups: Sequence[int] | None = None,
    admitted: Callable[[Minibatch], bool] | None = None,
) -> Tensor:
    """E[loss] over `minibatches`, differentiable; only `admitted` ones count, as if the others were drawn again."""
    total, mass = torch.zeros(2, dtype=torch.float64)
    for _, probability, minibatch in minibatches(world, k, sampler=sampler, groups=groups):
        if admitted is None or admitted(minibatch):
            total, mass = total + probability * loss(minibatch), mass + probability
    return total / mass


def ascent(
    world: World,
    k: int,
    loss: Loss,
    *,
    sampler: Policy | None = None,
    groups: Sequence[int] | None = None,
    admitted: Callable[[Minibatch], bool] | None = None,
) -> Tensor:
    """The expected direction of the update: minus the gradient of the expected loss, one flat vector."""
    value = expectation(world, k, loss, sampler=sampler, groups=groups, admitted=admitted)
    return -torch.cat([part.flatten() for part in torch.autograd.grad(value, world.policy.parameters)])
