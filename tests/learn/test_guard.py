"""A guard shortens or undoes a step, or ends the rollout, and an undone step leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from novarl.data.pack import pack
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.guard import STOP, StepGuard
from novarl.learn.optim import Optimizer, OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.loops.online import online
from novarl.loops.state import LoopState
from tests.invariance.gradients import objective
from tests.invariance.sharp import recorded, sharp_policy
from tests.loops.fakes import Seen, prompts, stages


def stepped(updates: int = 2) -> tuple[nn.Module, Optimizer]:
    """A small model with moments in its optimiser, and a gradient waiting."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).view(2, 3) / 7)
        model.bias.fill_(0.3)
    optimizer = Optimizer(model, OptimSettings(lr=0.01))
    for number in range(updates + 1):
        for place, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, 0.1 * (number + 1) + place)
        if number < updates:
            optimizer.step()
    return model, optimizer


def everything(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    moments = optimizer.state_dict()["moments"]
    found = [parameter.detach().clone() for parameter in model.parameters()]
    return found + [value.clone() for entry in moments.values() for value in entry.values()]


def equal(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def moved(model: nn.Module, start: list[Tensor], end: list[Tensor]) -> Callable[[], float]:
    """How much of the way from `start` to `end` the weights have gone: a distance in units of the whole step."""
    return lambda: float((next(model.parameters()).detach() - start[0]).norm() / (end[0] - start[0]).norm())


def whole_step() -> list[Tensor]:
    model, optimizer = stepped()
    optimizer.step()
    return everything(model, optimizer)


@pytest.mark.parametrize("updates", [0, 2], ids=["first update", "with moments"])
def test_an_undone_step_leaves_no_trace(updates: int) -> None:
    model, optimizer = stepped(updates)
    before = everything(model, optimizer)
    asked: list[float] = []

    def never() -> float:
        asked.append(1.0)
        return float("nan")

    _, _, record = StepGuard("rollback", 0.1).around(optimizer, never)
    assert equal(everything(model, optimizer), before)
    assert optimizer.update == updates + 1, "the schedule goes on"
    assert record["step_fraction"] == 0.0 and record[STOP] == 1.0 and len(asked) >= 6
    # And what follows goes on from there as from a step that never was.
    other, twin = stepped(updates)
    for parameter, same in zip(model.parameters(), other.parameters(), strict=True):
        assert same.grad is not None
        parameter.grad = same.grad.clone()  # clipping works in place
    optimizer.step()
    twin.step()
    assert equal(everything(model, optimizer), everything(other, twin))


@pytest.mark.parametrize(("limit", "fraction"), [(1.5, 1.0), (0.6, 0.5), (0.26, 0.25), (0.04, 1 / 32), (0.03, 0.0)])
def test_it_halves_until_within_the_limit(limit: float, fraction: float) -> None:
    model, optimizer = stepped()
    start, end = everything(model, optimizer), whole_step()
    measure, asked = moved(model, start, end), []

    def counting() -> float:
        asked.append(measure())
        return asked[-1]

    _, _, record = StepGuard("rollback", limit).around(optimizer, counting)
    assert asked == pytest.approx(
        [0.5**k for k in range(6) if 0.5**k >= fraction] + [0.0] * (fraction == 0.0), abs=1e-6
    )
    assert record["kl_to_old"] == asked[-1], "what was measured last is what stands, and is not measured again"
    assert record["step_fraction"] == fraction and record["kl_to_old"] == pytest.approx(fraction, abs=1e-6)
    assert record[STOP] == float(fraction == 0.0)
    for parameter, first, last in zip(model.parameters(), start, end, strict=False):
        assert torch.allclose(parameter, first + fraction * (last - first), atol=1e-7)
    if fraction == 1.0:
        assert equal(everything(model, optimizer), end), "a step that stands is the optimiser's, to the bit"
    if fraction == 0.0:
        assert equal(everything(model, optimizer), start)


@pytest.mark.parametrize(("distance", "stop"), [(0.05, 0.0), (0.1, 0.0), (0.2, 1.0), (float("nan"), 1.0)])
def test_early_stop_lets_the_step_stand(distance: float, stop: float) -> None:
    model, optimizer = stepped()
    _, _, record = StepGuard("early_stop", 0.1).around(optimizer, lambda: distance)
    assert record[STOP] == stop and equal(everything(model, optimizer), whole_step())


def test_the_rest_of_a_stopped_rollout_is_not_learnt_from() -> None:
    """Four updates to a step, of which the second says stop: the third sees a fresh rollout."""
    seen = Seen()
    parts = stages(seen, rows=prompts(8), updates_per_rollout=4, prompts_per_rollout=4)
    update = parts.learner.update
    counted: list[int] = []

    def stopping(*args: Any) -> Any:
        counted.append(1)
        return {**update(*args), STOP: float(len(counted) % 2 == 0)}

    parts.learner.update = stopping  # type: ignore[assignment,method-assign]
    state = LoopState()
    whole = [state.pending is None for _ in online(state, parts, steps=3)]
    assert whole == [False, True] * 3 and state.step == 3 and state.update == 6 and seen.steps == 3
    assert len(seen.asked) == 3


def updated(guard: StepGuard | None) -> tuple[list[Tensor], list[Tensor], dict[str, float], float]:
    """A policy's weights before and after one large update, its Record, and how far it is from where it was."""
    policy, batch = sharp_policy(), pack(recorded())
    scorer = Scorer(policy.model, chunk=64)
    learner = PolicyLearner(
        policy.model,
        scorer,
        objective=replace(objective("token"), kl_loss_coef=0.0),
        optim=OptimSettings(lr=0.02, max_grad_norm=0.0),
        ranks=Ranks(),
        budget=200,
        needs_old_logp=True,
        guard=guard,
    )
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    scores = learner.score(batch)
    credit, _, _ = CreditRule("group")(batch, scores, None)
    record = learner.update(batch, scores, credit)
    assert scores.old_logp is not None
    after = scorer.logprobs(batch, Ranks(), 200)
    x = (scores.old_logp - after)[batch.mask].double()
    kl = float((x + torch.expm1(-x)).mean())  # k3 of KL(old || new), which sampled: its mean is never negative
    return before, [parameter.detach() for parameter in policy.model.parameters()], dict(record), kl


def test_a_policy_is_held_within_its_limit() -> None:
    _, _, free, far = updated(None)
    assert far > 0.05 and STOP not in free
    before, after, record, kl = updated(StepGuard("rollback", far / 3))
    assert 0.0 < record["step_fraction"] < 1.0 and kl <= far / 3 and not equal(before, after)
    assert record["kl_to_old"] == pytest.approx(kl, rel=1e-6)
    _, _, record, kl = updated(StepGuard("early_stop", far / 3))
    assert record[STOP] == 1.0 and record["kl_to_old"] == pytest.approx(kl, rel=1e-6) == pytest.approx(far, rel=1e-6)
    before, after, record, kl = updated(StepGuard("rollback", 1e-9))
    assert record["step_fraction"] == 0.0 and record[STOP] == 1.0 and kl == 0.0 and equal(before, after)
