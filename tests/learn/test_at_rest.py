"""Answers whose advantage is 0 are looked at without a backward pass: the same gradient and the same metrics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from novarl.algos import surrogates
from novarl.core.types import Batch, Credit, Record
from novarl.data.pack import select
from novarl.distributed.ranks import Ranks
from novarl.learn import plan as planning
from novarl.learn.objective import Surrogate
from novarl.learn.plan import plan, trajectory_of_tokens
from novarl.learn.scorer import Scorer
from tests.invariance.gradients import Gradients, make_learner, measured, sharp_case, weights_of

RESTS = 3
"""One trajectory in so many has no advantage."""
BUDGET = 200


@pytest.fixture(autouse=True)
def even_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """These batches are small: one token at rest is enough."""
    monkeypatch.setattr(planning, "FEW", 1)


def settled(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which trajectories are at rest [R], and advantages [N] that say so."""
    rests = torch.arange(batch.reward.numel()) % RESTS == 0
    drawn = torch.randn(batch.tokens.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return rests, torch.where(batch.mask & ~rests[trajectory_of_tokens(batch)], drawn, 0.0)


def update(
    monkeypatch: pytest.MonkeyPatch, surrogate: Surrogate, *, scale: float = 1.0, **terms: Any
) -> tuple[Gradients, Record, int]:
    """Gradient and record of an update, and how many tokens went through it with a gradient."""
    case = sharp_case(torch.float64)
    learner = make_learner(case, budget=BUDGET)
    plain = {"kl_loss_coef": 0.0, "entropy_coef": 0.0, "surrogate": surrogate, "proportional": True}
    learner.objective = replace(learner.objective, **{**plain, **terms})
    with weights_of(case.model, case.old):
        scores = learner.score(case.batch)
    hidden, followed, caught = Scorer.hidden, [0], {}

    def count(self: Scorer, part: Batch) -> Tensor:
        followed[0] += part.tokens.numel() * torch.is_grad_enabled()
        return hidden(self, part)

    def catch() -> tuple[float, float]:
        caught.update({name: grad.clone() for name, grad in named()})
        learner.optimizer.drop_gradients()
        return 0.0, 0.0

    def named() -> list[tuple[str, Tensor]]:
        return list(zip(learner.optimizer.parameters, learner.optimizer.gradients(), strict=True))

    monkeypatch.setattr(Scorer, "hidden", count)
    monkeypatch.setattr(learner.optimizer, "step", catch)
    record = learner.update(case.batch, scores, Credit(advantage=scale * settled(case.batch)[1]))
    return caught, record, followed[0]


SURROGATES = {
    "reinforce": surrogates.reinforce,
    "gpg": surrogates.gpg,
    "ppo_clip": partial(surrogates.ppo_clip, clip_low=0.2, clip_high=0.28),
    "dual_clip": partial(surrogates.dual_clip, clip_low=0.2, clip_high=0.28, clip_dual=3.0),
    "cispo": partial(surrogates.cispo, clip_low=0.2, clip_high=0.28),
    "gspo": partial(surrogates.gspo, clip_low=0.2, clip_high=0.28),
    "sapo": partial(surrogates.sapo, tau_pos=1.0, tau_neg=1.05),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_gradient_and_metrics_are_those_of_all_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_sequence = frozenset({"surrogate"}) if name == "gspo" else frozenset[str]()
    short, said, some = update(monkeypatch, SURROGATES[name], by_sequence=by_sequence)
    whole, also, every = update(monkeypatch, SURROGATES[name], by_sequence=by_sequence, proportional=False)
    rests, _ = settled(sharp_case(torch.float64).batch)
    assert rests.any() and 0 < some < every
    assert max(float(grad.abs().max()) for grad in whole.values()) > 1e-3
    for key, grad in whole.items():
        torch.testing.assert_close(short[key], grad, rtol=1e-9, atol=1e-12)
    assert measured(said) == pytest.approx(measured(also), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("terms", [{"kl_loss_coef": 0.1}, {"entropy_coef": 0.01}, {"proportional": False}])
def test_where_anything_else_pulls_all_are_learnt_from(terms: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, followed = update(monkeypatch, SURROGATES["ppo_clip"], **terms)
    assert followed == sharp_case(torch.float64).batch.tokens.numel()


def test_a_few_at_rest_learn_along(monkeypatch: pytest.MonkeyPatch) -> None:
    short, said, some = update(monkeypatch, SURROGATES["ppo_clip"])
    batch = sharp_case(torch.float64).batch
    resting_part, _ = select(batch, settled(batch)[0].nonzero().flatten().tolist())
    flat, bounds = resting_part.tokens.tolist(), resting_part.cu_seqlens.tolist()
    beginnings = {tuple(flat[begin:end]) for begin, last in pairwise(bounds) for end in range(begin + 1, last + 1)}
    resting = len(beginnings)
    monkeypatch.setattr(planning, "FEW", resting + 1)
    whole, also, every = update(monkeypatch, SURROGATES["ppo_clip"])
    assert some < every == batch.tokens.numel()
    for key, grad in whole.items():
        torch.testing.assert_close(short[key], grad, rtol=1e-9, atol=1e-12)
    assert measured(said) == pytest.approx(measured(also), rel=1e-9, abs=1e-12)
    monkeypatch.setattr(planning, "FEW", resting)
    assert update(monkeypatch, SURROGATES["ppo_clip"])[2] == some


def test_where_all_are_at_rest_nothing_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    found, record, followed = update(monkeypatch, SURROGATES["ppo_clip"], scale=0.0)
    assert followed == 0 and record["entropy"] > 0.0
    assert not any(grad.any() for grad in found.values())


def test_those_apart_come_last_and_by_themselves() -> None:
    batch = sharp_case(torch.float64).batch
    rests, _ = settled(batch)
    for ranks in (Ranks(), Ranks(0, 2), Ranks(1, 2)):
        kinds = [{bool(rests[one]) for one in micro} for micro in plan(batch, ranks, BUDGET, apart=rests)]
        assert all(len(kind) == 1 for kind in kinds)
        assert kinds == sorted(kinds, key=lambda kind: True in kind) and {True} in kinds and {False} in kinds
    whole = [one for rank in (0, 1) for micro in plan(batch, Ranks(rank, 2), BUDGET, apart=rests) for one in micro]
    assert sorted(whole) == sorted(one for micro in plan(batch, Ranks(), BUDGET) for one in micro)
