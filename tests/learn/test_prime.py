"""PRIME's process rewards: 0 before anything is learnt, adding up to the outcome's logit, and learnt from outcomes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from novarl.core.types import Batch, Scored, Scores
from novarl.data.pack import pack
from novarl.distributed.ranks import Ranks
from novarl.learn.optim import OptimSettings
from novarl.learn.plan import plan, trajectory_of_tokens
from novarl.learn.prime import ProcessRewards
from novarl.learn.scorer import Scorer
from tests.distributed.fork import run
from tests.invariance.gradients import LIMITS, WHOLE, distance, two_in_one
from tests.invariance.sharp import perturbed, recorded, sharp_policy

BETA, THRESHOLD = 0.5, 0.5
Gradients = dict[str, Tensor]


def batch(seed: int = 0) -> Batch:
    """Rollouts, one of two sequences, and a greedy twin whose outcome is not learnt from."""
    found: list[Scored] = two_in_one(recorded(seed))
    twin = replace(found[-1], reward=9.0, rollout=replace(found[-1].rollout, role="baseline"))
    return pack([*found, twin], dtype=torch.float64)


def made(
    moved: float = 0.0, *, lr: float = 3e-3, temperature: float = 1.0, ranks: Ranks | None = None, budget: int = WHOLE
) -> tuple[ProcessRewards, Scorer]:
    """(the reward model, off its reference by `moved`; the reference)."""
    reference = sharp_policy(torch.float64).model
    scorer = Scorer(reference, temperature=temperature, chunk=50, compute_dtype=torch.float64)
    own = replace(scorer, model=perturbed(reference, moved) if moved else deepcopy(reference))
    optim = OptimSettings(lr=lr, max_grad_norm=0.0)
    made = ProcessRewards(own, beta=BETA, threshold=THRESHOLD, optim=optim, ranks=ranks or Ranks(), budget=budget)
    return made, scorer


def rewards(mine: ProcessRewards, reference: Scorer, of: Batch) -> tuple[Tensor, dict[str, float]]:
    scores = Scores(ref_logp=reference.logprobs(of, Ranks(), WHOLE))
    supplied, record = mine.supply([], of, scores, 0)
    assert supplied.token_reward is not None and supplied.ref_logp is scores.ref_logp
    return supplied.token_reward, dict(record)


def summed(per_token: Tensor, of: Batch) -> Tensor:
    return per_token.new_zeros(len(of.reward)).index_add(0, trajectory_of_tokens(of), per_token)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_it_has_learnt_its_rewards_are_exactly_0(temperature: float) -> None:
    """A rate of 0 leaves phi where it began, which is the reference."""
    mine, reference = made(lr=0.0, temperature=temperature)
    found, record = rewards(mine, reference, batch())
    assert not bool(found.any())
    assert record["process_loss"] == pytest.approx(torch.log(torch.tensor(2.0, dtype=torch.float64)).item())
    assert record["process_grad_norm"] > 0 and record["process_reward_std"] == 0.0


def test_rewards_add_up_to_the_logit_of_the_outcome() -> None:
    """And the loss is the cross-entropy of that logit, over what is trained on, written out."""
    mine, reference = made(0.1, lr=0.0)
    of = batch()
    found, record = rewards(mine, reference, of)
    gain = (mine.scorer.logprobs(of, Ranks(), WHOLE) - reference.logprobs(of, Ranks(), WHOLE)) * of.mask
    logit = BETA * summed(gain, of)
    assert torch.allclose(summed(found, of), logit, atol=1e-12) and logit[~of.baseline].abs().min() > 1e-3
    right = (of.reward >= THRESHOLD).double()
    losses = -(right * torch.sigmoid(logit).log() + (1 - right) * torch.sigmoid(-logit).log())
    trained = ~of.baseline
    assert 0 < right[trained].sum() < trained.sum(), "outcomes differ"
    assert record["process_loss"] == pytest.approx(losses[trained].mean().item(), rel=1e-9)
    accuracy = ((logit > 0) == right.bool())[trained].double().mean().item()
    assert record["process_accuracy"] == pytest.approx(accuracy)
    assert not bool(found[~of.mask].any())


def test_updates_raise_accuracy_also_on_other_answers() -> None:
    mine, reference = made()
    batches = [batch(seed) for seed in range(3)]
    records = [rewards(mine, reference, batches[step % 2])[1] for step in range(16)]
    for first, last in ((records[0], records[-2]), (records[1], records[-1])):
        assert last["process_accuracy"] > 0.9 and last["process_loss"] < 0.5 * first["process_loss"]
    assert records[0]["process_accuracy"] < 0.7, "at first all logits are 0, which says that all are wrong"
    fresh = batches[2]
    logit = summed(rewards(mine, reference, fresh)[0], fresh)[~fresh.baseline]
    right = (fresh.reward >= THRESHOLD)[~fresh.baseline]
    majority = max(right.double().mean(), (~right).double().mean())
    assert logit[right].mean() > logit[~right].mean() + 1.0
    assert ((logit > 0) == right).double().mean() > majority + 0.1


def test_rewards_are_those_of_the_model_just_updated() -> None:
    mine, reference = made(lr=3e-3)
    of = batch()
    found, _ = rewards(mine, reference, of)
    gain = (mine.scorer.logprobs(of, Ranks(), WHOLE) - reference.logprobs(of, Ranks(), WHOLE)) * of.mask
    assert torch.equal(found, BETA * gain) and bool(found.any())


def gradient(ranks: Ranks | None = None, budget: int = WHOLE) -> Gradients:
    mine, reference = made(0.1, ranks=ranks, budget=budget)
    found: Gradients = {}

    def catch() -> tuple[float, float]:
        for name, parameter in mine.optimizer.parameters.items():
            assert parameter.grad is not None
            found[name] = parameter.grad.clone()
            parameter.grad = None
        return 0.0, 0.0

    mine.optimizer.step = catch  # type: ignore[method-assign]
    of = batch()
    mine.supply([], of, Scores(ref_logp=reference.logprobs(of, Ranks(), WHOLE)), 0)
    return found


def on_a_rank(ranks: Ranks) -> tuple[int, Gradients]:
    return len(plan(batch(), ranks, 60)), gradient(ranks, 60)


def test_neither_the_budget_nor_the_ranks_matter() -> None:
    whole = gradient()
    for budget in (1, 100):
        assert distance(gradient(budget=budget), whole).within(LIMITS[torch.float64])
    for parts, found in run(on_a_rank):
        assert parts and distance(found, whole).within(LIMITS[torch.float64])


def test_its_state_is_exact() -> None:
    whole, reference = made(0.1)
    of = batch()
    rewards(whole, reference, of)
    again, _ = made()
    again.load_state_dict(deepcopy(whole.state_dict()))
    one, two = rewards(whole, reference, of), rewards(again, reference, of)
    assert torch.equal(one[0], two[0]) and one[1] == two[1]
