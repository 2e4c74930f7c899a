"""Two ranks that learn from the same recorded rollouts end where one process ends, and report what it reports."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from novarl.core.types import Record
from novarl.data.pack import pack, pack_sequences
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.optim import OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.observe.glossary import lookup
from tests.distributed.fork import run
from tests.invariance.gradients import measured, objective
from tests.invariance.sharp import fresh, lessons, perturbed, recorded, sharp_policy

LR = 1e-3
UPDATES = 20
BUDGET = 200
Trained = tuple[dict[str, Tensor], list[Record]]


def learn(ranks: Ranks, seed: int = 0) -> Trained:
    """Twenty updates on four recorded rollouts in turn, with everything the objective has."""
    policy = sharp_policy()
    reference = perturbed(policy.model, 0.1)
    scorer = Scorer(policy.model, chunk=64)
    learner = PolicyLearner(
        policy.model,
        scorer,
        objective=objective("token"),
        optim=OptimSettings(lr=LR),
        ranks=ranks,
        budget=BUDGET,
        reference=Scorer(reference, chunk=64),
        needs_old_logp=True,
    )
    batches = [pack(recorded(step=step + 4 * seed)) for step in range(4)]
    scores = [learner.score(batch) for batch in batches]
    records = []
    for update in range(UPDATES):
        batch, known = batches[update % 4], scores[update % 4]
        credit, _, _ = CreditRule("group", {"norm_std": True})(batch, known, None)
        records.append(learner.update(batch, known, credit))
    return {name: parameter.detach() for name, parameter in policy.model.named_parameters()}, records


def largest(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(float((mine[name] - theirs[name]).abs().max()) for name in theirs)


@pytest.fixture(scope="module")
def alone() -> Trained:
    return learn(Ranks())


@pytest.fixture(scope="module")
def together(alone: Trained) -> list[Trained]:
    return run(learn)


def test_the_runs_learn_something(alone: Trained) -> None:
    start = dict(sharp_policy().model.named_parameters())
    for name, value in alone[0].items():
        assert largest({name: value}, {name: start[name].detach()}) > LR, name
    assert 0.0 < alone[1][-1]["clip_fraction"] < 0.5 and alone[1][-1]["ratio_max"] > 1.2
    assert largest(alone[0], learn(Ranks(), seed=1)[0]) > LR, "other rollouts must give other weights"


def test_weights_after_twenty_updates(alone: Trained, together: list[Trained]) -> None:
    (first, _), (second, _) = together
    assert all(torch.equal(first[name], second[name]) for name in first), "the ranks have drifted apart"
    assert largest(first, alone[0]) <= 0.05 * LR, largest(first, alone[0])


def test_the_record_is_the_same_on_all_ranks(together: list[Trained]) -> None:
    (_, first), (_, second) = together
    assert first == second and len(first) == UPDATES


def test_metrics_are_those_of_one_process(alone: Trained, together: list[Trained]) -> None:
    """All but `kl`, which looks at each rank's first micro-batch: two ranks look at more than one does."""
    for one, two in zip(alone[1], together[0][1], strict=True):
        assert one.keys() == two.keys()
        for name, value in one.items():
            assert lookup(name) and math.isfinite(value)
            if name not in ("kl", "micro_batches"):
                assert two[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
    first_one, first_two = alone[1][0], together[0][1][0]
    assert 1 == first_one["micro_batches"] < first_two["micro_batches"]
    for name in first_one.keys() - {"kl", "micro_batches"}:
        assert first_two[name] == pytest.approx(first_one[name], rel=1e-5, abs=1e-6), name
    assert first_one["kl"] > 0.0 and first_two["kl"] > 0.0


class Deaf(Ranks):
    """Ranks that do not add their gradients up, but scale up their own."""

    def sum_(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            tensor *= self.size


def learn_deaf(ranks: Ranks) -> Trained:
    return learn(Deaf(ranks.rank, ranks.size))


def test_gradients_that_are_not_added_up_are_caught(alone: Trained) -> None:
    (first, _), (second, _) = run(learn_deaf)
    assert largest(first, second) > LR and largest(first, alone[0]) > LR


def imitate(ranks: Ranks) -> Trained:
    policy = fresh()
    learner = SupervisedLearner(
        policy.model, Scorer(policy.model, chunk=64), optim=OptimSettings(lr=LR), ranks=ranks, budget=60
    )
    records = [learner.update(pack_sequences(lessons()[update % 2 :: 2])) for update in range(UPDATES)]
    return {name: parameter.detach() for name, parameter in policy.model.named_parameters()}, records


def test_supervised_learning_too() -> None:
    (weights, records), (first, mine), (second, theirs) = imitate(Ranks()), *run(imitate)
    assert records[-1]["loss"] < records[0]["loss"] - 1.0
    assert mine == theirs and all(torch.equal(first[name], second[name]) for name in first)
    assert largest(first, weights) <= 0.05 * LR, largest(first, weights)
    for one, two in zip(records, mine, strict=True):
        assert measured(two) == pytest.approx(measured(one), rel=1e-4)
