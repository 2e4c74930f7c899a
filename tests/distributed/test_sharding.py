"""Two ranks, each of which holds half of every weight, learn what one process learns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp  # both before forking, so that no rank spends seconds on it
from torch import Tensor, nn

from novarl.algos.surrogates import gspo, ppo_clip
from novarl.core.types import Record
from novarl.data.pack import pack, pack_sequences
from novarl.distributed.ranks import Ranks
from novarl.distributed.shard import full, is_sharded, shard
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Objective
from novarl.learn.optim import Optimizer, OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.models.load import Policy
from tests.distributed.fork import run
from tests.invariance.gradients import objective
from tests.invariance.sharp import fresh, lessons, perturbed, recorded, sharp_policy

LR = 1e-3
UPDATES = 4
BUDGET = 90
"""Tokens: most ranks then have several micro-batches, and not all as many."""
Weights = dict[str, Tensor]
Learnt = tuple[Weights, Weights, list[Record]]
"""The gradient of the first update, the weights after the last one, and the records."""


def spread_out(policy: Policy, ranks: Ranks) -> None:
    """Shard the model, where there are ranks to shard it over."""
    if ranks.size > 1:
        shard(policy.model, list(policy.model.model.layers), ranks)
        assert all(is_sharded(parameter) for parameter in policy.model.parameters())


def weights(model: nn.Module) -> Weights:
    return {name: full(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def caught(optimizer: Optimizer) -> Weights:
    """The gradient of the next update will be in the result."""
    found: Weights = {}
    step = optimizer.step

    def look() -> tuple[float, float]:
        optimizer.gradients()
        if not found:
            found.update({name: full(p.grad).clone() for name, p in optimizer.parameters.items() if p.grad is not None})
        return step()

    optimizer.step = look  # type: ignore[method-assign]
    return found


def imitate(ranks: Ranks, seed: int = 0) -> Learnt:
    """Supervised fine-tuning, on an odd number of rows."""
    policy = fresh(seed)
    spread_out(policy, ranks)
    learner = SupervisedLearner(
        policy.model, Scorer(policy.model, chunk=64), optim=OptimSettings(lr=LR), ranks=ranks, budget=BUDGET
    )
    gradient = caught(learner.optimizer)
    records = [learner.update(pack_sequences(lessons()[update % 2 :: 2][:7])) for update in range(UPDATES)]
    return gradient, weights(policy.model), records


EVERYTHING = objective("token")


def reinforce(ranks: Ranks, seed: int = 0, objective: Objective = EVERYTHING) -> Learnt:
    """Policy gradients on recorded answers of different lengths."""
    policy = sharp_policy()
    reference = perturbed(policy.model, 0.1)
    spread_out(policy, ranks)
    scorer = Scorer(policy.model, chunk=64)
    learner = PolicyLearner(
        policy.model,
        scorer,
        objective=objective,
        optim=OptimSettings(lr=LR),
        ranks=ranks,
        budget=BUDGET,
        reference=replace(scorer, model=reference),
        needs_old_logp=True,
    )
    gradient = caught(learner.optimizer)
    batches = [pack(recorded(step=step + 2 * seed)) for step in range(2)]
    scores = [learner.score(batch) for batch in batches]
    records = []
    for update in range(UPDATES):
        batch, known = batches[update % 2], scores[update % 2]
        credit, _, _ = CreditRule("group", norm_std=True)(batch, known, None)
        records.append(learner.update(batch, known, credit))
    return gradient, weights(policy.model), records


def largest(mine: Weights, theirs: Weights) -> float:
    return max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)


GRPO = Objective(
    surrogate=partial(ppo_clip, clip_low=0.2, clip_high=0.2), aggregation="token", constant=1.0, proportional=True
)
GSPO = Objective(
    surrogate=partial(gspo, clip_low=0.2, clip_high=0.2),
    aggregation="sequence",
    constant=1.0,
    by_sequence=frozenset({"surrogate"}),
)
KINDS = {
    "sft": imitate,
    "everything": reinforce,
    "grpo": partial(reinforce, objective=GRPO),
    "gspo": partial(reinforce, objective=GSPO),
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_weights_are_those_of_one_process(kind: str) -> None:
    learn = KINDS[kind]
    gradient, alone, records = learn(Ranks())
    (first, mine, said), (second, theirs, said_too) = run(learn)
    start = weights((fresh() if kind == "sft" else sharp_policy()).model)
    assert all(largest({name: alone[name]}, {name: start[name]}) > 0.1 * LR for name in alone), "the weights must move"
    other = learn(Ranks(), seed=1)
    assert largest(other[0], gradient) > 1e-4 and largest(other[1], alone) > LR, "another seed must give other weights"
    assert all(torch.equal(first[name], second[name]) and torch.equal(mine[name], theirs[name]) for name in alone)
    assert largest(first, gradient) < 1e-6, largest(first, gradient)
    assert largest(mine, alone) <= 0.05 * LR, largest(mine, alone)
    assert said == said_too
    for one, two in zip(records, said, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {"kl", "micro_batches"}:
            assert two[name] == pytest.approx(one[name], rel=2e-3, abs=2e-5), name
