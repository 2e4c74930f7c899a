"""The critic: its gradient written out by hand, the same however the batch is cut or shared, and its state exact."""

from __future__ import annotations

import itertools
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from novarl.core.types import Batch, Credit, Scored, Scores
from novarl.data.pack import pack
from novarl.distributed.ranks import Ranks
from novarl.learn.critic import Critic, ValueScorer
from novarl.learn.optim import OptimSettings
from novarl.learn.plan import plan
from novarl.learn.policy import PolicyLearner, SharedValue
from novarl.learn.scorer import Scorer
from novarl.models.forward import head as language_head
from novarl.models.heads import ScalarHead, ValueModel, with_head
from tests.distributed.fork import run
from tests.invariance.gradients import LIMITS, WHOLE, distance, objective, two_in_one
from tests.invariance.sharp import perturbed, recorded, sharp_policy

CLIP = 0.05
Gradients = dict[str, Tensor]


def some() -> list[Scored]:
    """Twelve rollouts, one of them of two sequences, one cut off by a limit, one a greedy twin."""
    found = two_in_one(recorded()[:12])
    found[2] = replace(found[2], rollout=replace(found[2].rollout, status="truncated"))
    twin = replace(found[-1], rollout=replace(found[-1].rollout, role="baseline"))
    return [*found, twin]


def batch() -> Batch:
    return pack(some(), dtype=torch.float64)


def value_model(*, separate: bool = True) -> ValueModel:
    """The sharp model in float64, with a head that says something."""
    model = with_head(sharp_policy(torch.float64).model, separate=separate)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        model.head.weight.copy_(0.3 * torch.randn(model.head.weight.shape, generator=generator, dtype=torch.float64))
        model.head.bias.fill_(0.1)
    return model


def critic(model: ValueModel, *, ranks: Ranks | None = None, budget: int = WHOLE, **settings: Any) -> Critic:
    scorer = ValueScorer(model, compute_dtype=torch.float64)
    settings = {"optim": OptimSettings(max_grad_norm=0.0), "clip": CLIP, **settings}
    return Critic(scorer, ranks=ranks or Ranks(), budget=budget, **settings)


def read(model: ValueModel, of: Batch) -> tuple[Tensor, Tensor]:
    """(V before every token but a sequence's first [N], V after every token [N]), one sequence at a time."""
    before, after = torch.zeros(len(of.tokens), dtype=torch.float64), []
    bounds = of.cu_seqlens.tolist()
    parts = []
    for begin, end in itertools.pairwise(bounds):
        row = of.tokens[begin:end][None]
        hidden = model.model(row, position_ids=torch.arange(end - begin)[None]).last_hidden_state
        values = (hidden @ model.head.weight[0] + model.head.bias)[0]
        parts.append(torch.cat([torch.zeros(1, dtype=torch.float64), values[:-1]]))
        after.append(values)
    before = torch.cat(parts)
    return before, torch.cat(after)


def targets(of: Batch) -> tuple[Tensor, Tensor]:
    """(old values, returns), of which some lie beyond the clip of the model's own."""
    generator = torch.Generator().manual_seed(5)
    old, _ = read(value_model(), of)
    noise = torch.randn(2, len(of.tokens), generator=generator, dtype=torch.float64)
    return (old.detach() + 0.1 * noise[0]) * of.mask, (old.detach() + 0.5 * noise[1]) * of.mask


def caught(learner: Critic | PolicyLearner, go: Any) -> Gradients:
    """The gradient of one update; the weights stay."""
    found: Gradients = {}

    def catch() -> tuple[float, float]:
        learner.optimizer.gradients()
        for name, parameter in learner.optimizer.parameters.items():
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()
            parameter.grad = None
        return 0.0, 0.0

    learner.optimizer.step = catch  # type: ignore[method-assign]
    go()
    return found


def gradient(ranks: Ranks | None = None, budget: int = WHOLE) -> Gradients:
    of = batch()
    old, returns = targets(of)
    mine = critic(value_model(), ranks=ranks, budget=budget)
    return caught(mine, lambda: mine.learn(of, Scores(values=old), Credit(torch.zeros_like(old), returns)))


def by_hand(model: ValueModel, of: Batch, clip: float) -> Tensor:
    """mean over trained tokens of max((V - R)^2, (clip(V) - R)^2) / 2, written out."""
    old, returns = targets(of)
    values, _ = read(model, of)
    near = old + (values - old).clamp(-clip, clip)
    loss = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return loss[of.mask]


def test_values_before_tokens_and_after_the_last() -> None:
    model, of = value_model(), batch()
    wanted, after = read(model, of)
    owner = torch.repeat_interleave(of.traj, of.cu_seqlens.diff())
    last = [int((owner == r).nonzero()[-1]) for r in range(len(of.reward))]
    for budget in (1, 60, WHOLE):
        scorer = ValueScorer(model, compute_dtype=torch.float64)
        values, bootstrap = scorer.values(of, Ranks(), budget, bootstrap=True)
        assert torch.allclose(values, (wanted * of.mask).detach(), atol=1e-12)
        assert of.truncated.sum() == 1 and not of.truncated[-1]
        assert torch.allclose(bootstrap, (after[last] * of.truncated).detach(), atol=1e-12), "only where cut off"
        assert bootstrap[of.truncated].abs().item() > 1e-3
        values, bootstrap = scorer.values(of, Ranks(), budget, bootstrap=False)
        assert torch.allclose(values, (wanted * of.mask).detach(), atol=1e-12) and not bootstrap.any(), "as asked for"


def test_the_gradient_is_the_formulas() -> None:
    model, of = value_model(), batch()
    losses = by_hand(model, of, CLIP)
    losses.mean().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    found = gradient()
    assert found.keys() == wanted.keys()
    assert distance(found, wanted).whole < 1e-10
    values, _ = read(model, of)
    old, _ = targets(of)
    assert 0.1 < ((values - old).abs() > CLIP)[of.mask].double().mean() < 0.9, "the clip takes part"


@pytest.mark.parametrize("budget", [1, 30, 60])
def test_the_budget_does_not_matter(budget: int) -> None:
    assert len(plan(batch(), Ranks(), budget)) > 1
    assert distance(gradient(budget=budget), gradient()).within(LIMITS[torch.float64])


def on_a_rank(ranks: Ranks) -> tuple[int, Gradients]:
    return len(plan(batch(), ranks, 60)), gradient(ranks, 60)


def test_the_ranks_do_not_matter() -> None:
    whole = gradient()
    for parts, found in run(on_a_rank):
        assert parts and distance(found, whole).within(LIMITS[torch.float64])


def test_it_learns_and_reports() -> None:
    of = batch()
    old, returns = targets(of)
    mine = critic(value_model(), clip=None, passes=2, optim=OptimSettings(lr=3e-3))
    scores, credit = Scores(values=old), Credit(torch.zeros_like(old), returns)
    records = [mine.learn(of, scores, credit) for _ in range(10)]
    assert mine.optimizer.update == 20, "two updates a minibatch"
    assert records[-1]["value_loss"] < 0.3 * records[0]["value_loss"] and records[0]["critic_grad_norm"] > 0
    supplied, _ = mine.supply([], of, Scores(), 0)
    assert supplied.values is not None and supplied.bootstrap is not None
    again = mine.learn(of, supplied, credit)
    assert records[0]["explained_variance"] < again["explained_variance"] < 1.0
    assert again["return_mean"] == pytest.approx(returns[of.mask].mean().item())


def test_its_state_is_exact_with_tied_weights() -> None:
    of = batch()
    old, returns = targets(of)
    scores, credit = Scores(values=old), Credit(torch.zeros_like(old), returns)
    whole = critic(value_model())
    whole.learn(of, scores, credit)
    state = deepcopy(whole.state_dict())
    names = set(state["model"])
    assert "head.weight" in names and not any("lm_head" in name for name in names), "what is tied is there once"
    again = critic(with_head(perturbed(sharp_policy(torch.float64).model, 0.3), separate=True))
    again.load_state_dict(state)
    first, second = whole.scorer.model, again.scorer.model
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert whole.learn(of, scores, credit) == again.learn(of, scores, credit)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


COEF = 0.7


def shared(budget: int, coef: float, ranks: Ranks | None = None) -> Gradients:
    """The gradient of a policy whose trunk the critic shares."""
    model, of = value_model(separate=False), batch()
    scorer = Scorer(model.model, chunk=50, compute_dtype=torch.float64)
    learner = PolicyLearner(
        model.model,
        scorer,
        objective=replace(objective("token"), kl_loss_coef=0.0, correction=None),
        optim=OptimSettings(max_grad_norm=0.0),
        ranks=ranks or Ranks(),
        budget=budget,
        needs_old_logp=True,
        value=SharedValue(model.head, coef, CLIP),
    )
    old, returns = targets(of)
    scores = replace(learner.score(of), values=old)
    advantage = (returns - old) * of.mask
    return caught(learner, lambda: learner.update(of, scores, Credit(advantage, returns)))


def test_a_shared_trunk_gets_the_gradient_of_the_joint_loss() -> None:
    """Policy (ratio 1: -A log pi), entropy bonus and value loss, each a mean over trained tokens, by one backward."""
    model, of = value_model(separate=False), batch()
    old, returns = targets(of)
    bounds, logits = of.cu_seqlens.tolist(), []
    weight, bias = language_head(model.model)
    assert bias is None
    for begin, end in itertools.pairwise(bounds):
        hidden = model.model(
            of.tokens[begin:end][None], position_ids=torch.arange(end - begin)[None]
        ).last_hidden_state[0]
        logits.append((hidden @ weight.T).roll(1, 0))
    logp = torch.cat(logits).log_softmax(-1)
    chosen = logp.gather(-1, of.tokens[:, None])[:, 0][of.mask]
    entropy = -(logp.exp() * logp).sum(-1)[of.mask]
    policy = -((returns - old)[of.mask] * chosen).mean() - 0.01 * entropy.mean()
    (policy + COEF * by_hand(model, of, CLIP).mean()).backward()
    joint = nn.ModuleList([model.model, model.head])
    wanted = {name: p.grad for name, p in joint.named_parameters() if p.grad is not None}
    found = shared(WHOLE, COEF)
    assert found.keys() == wanted.keys() and distance(found, wanted).whole < 1e-10
    assert distance(shared(60, COEF), wanted).within(LIMITS[torch.float64])
    assert distance(shared(WHOLE, 0.5 * COEF), wanted).whole > 1e-3, "the value loss takes part"


def test_a_head_alone() -> None:
    """What is shared is read as what is separate."""
    own, common = value_model(), value_model(separate=False)
    assert isinstance(common.head, ScalarHead)
    assert torch.equal(read(own, batch())[0], read(common, batch())[0])
