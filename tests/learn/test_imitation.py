"""Behaviour cloning is policy gradient with advantage 1: the same loss, gradient and weights, through both learners."""

from __future__ import annotations

import pytest
import torch

from novarl.algos.surrogates import reinforce
from novarl.core.types import Batch, Credit, Scores
from novarl.data.pack import pack_sequences
from novarl.distributed.ranks import Ranks
from novarl.learn.objective import Objective
from novarl.learn.optim import OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.models.transformer import Decoder
from tests.invariance.gradients import Gradients, distance
from tests.invariance.sharp import lessons
from tests.learn.pairs import WHOLE, model


def supervised(of: Decoder, budget: int) -> SupervisedLearner:
    return SupervisedLearner(of, Scorer(of, chunk=50), optim=OptimSettings(), ranks=Ranks(), budget=budget)


def policy(of: Decoder, budget: int, aggregation: str = "token") -> PolicyLearner:
    objective = Objective(surrogate=reinforce, aggregation=aggregation, constant=1.0)
    return PolicyLearner(
        of, Scorer(of, chunk=50), objective=objective, optim=OptimSettings(), ranks=Ranks(), budget=budget
    )


def watched(learner: SupervisedLearner | PolicyLearner) -> Gradients:
    """The gradient of the next update, which is made nevertheless."""
    found: Gradients = {}
    step = learner.optimizer.step

    def watch() -> tuple[float, float]:
        found.update({name: p.grad.clone() for name, p in learner.optimizer.parameters.items() if p.grad is not None})
        return step()

    learner.optimizer.step = watch  # type: ignore[method-assign]
    return found


def updates(
    budget: int, *, advantage: float = 1.0, aggregation: str = "token"
) -> tuple[dict[str, float], dict[str, float], Gradients, Gradients, float]:
    """One update of each kind: both records, both gradients, and how far apart the weights end."""
    whole: Batch = pack_sequences(lessons()[::2], dtype=torch.float64)
    one, other = model(torch.float64), model(torch.float64)
    imitating, reinforcing = supervised(one, budget), policy(other, 2 * budget, aggregation)
    cloned, rewarded = watched(imitating), watched(reinforcing)
    record = imitating.update(whole)
    credit = Credit(advantage=torch.where(whole.mask, advantage, 0.0).double())
    told = reinforcing.update(whole, Scores(), credit)
    apart = max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))
    return record, told, cloned, rewarded, apart


@pytest.mark.parametrize("budget", [60, WHOLE])
def test_cloning_is_policy_gradient_with_advantage_one(budget: int) -> None:
    record, told, cloned, rewarded, apart = updates(budget)
    assert len(cloned) > 10 and distance(rewarded, cloned).whole < 1e-10
    assert told["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-10)
    assert apart < 1e-8


@pytest.mark.parametrize("changed", [{"advantage": -1.0}, {"advantage": 0.9}, {"aggregation": "sequence"}])
def test_with_anything_else_it_is_not(changed: dict[str, float | str]) -> None:
    *_, cloned, rewarded, _ = updates(WHOLE, **changed)  # type: ignore[arg-type]
    assert distance(rewarded, cloned).whole > 0.01
