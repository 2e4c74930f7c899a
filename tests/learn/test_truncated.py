"""Training on truncated samples: the learner's distribution is the sampler's, whatever batches are cut into."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from novarl.core.errors import NovaError
from novarl.core.types import Batch, Credit, Scored, Scores
from novarl.data.pack import pack, select
from novarl.data.serial import from_dict, to_dict
from novarl.distributed.ranks import Ranks
from novarl.learn.optim import OptimSettings
from novarl.learn.plan import piece
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.models.load import Policy
from tests.invariance.gradients import objective
from tests.invariance.sharp import perturbed, prompts, record, sampler, score, sharp_policy
from tests.learn.test_agreement import Check

CUT: dict[str, dict[str, Any]] = {
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.2},
    "all, hot": {"top_k": 30, "top_p": 0.98, "min_p": 0.01, "temperature": 1.5},
}


@cache
def recorded(name: str) -> tuple[Scored, ...]:
    return tuple(score(sampler(sharp_policy(), supports=True, **CUT[name]).train(list(enumerate(prompts())), 0)))


def scorer(policy: Policy, name: str, **options: Any) -> Scorer:
    return Scorer(policy.model, CUT[name].get("temperature", 1.0), chunk=64, **options)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_on_policy_the_ratio_is_1(name: str, layout: Any) -> None:
    policy, batch = sharp_policy(), pack(recorded(name))
    own = scorer(policy, name, layout=layout)
    apart = (own.logprobs(batch, Ranks(), 200) - batch.behavior_logp)[batch.mask].abs()
    assert apart.mean() <= 1e-5 and apart.max() <= 1e-3
    found = Check(policy, temperature=own.temperature, layout=layout)([one.rollout for one in recorded(name)], batch)
    assert found["mismatch_max"] <= 1e-3
    # What a learner that does not renormalise would see.
    naive = own.logprobs(replace(batch, support=None, cu_support=None), Ranks(), 200)
    assert (naive - batch.behavior_logp)[batch.mask].abs().max() > 0.01, "ten times what the check tolerates"


@pytest.mark.parametrize("name", ["top_k", "all, hot"])
def test_a_learner_that_does_not_renormalise_is_refused(name: str) -> None:
    policy, batch = sharp_policy(), pack(recorded(name))
    blind = replace(batch, support=None, cu_support=None)
    check = Check(policy, temperature=CUT[name].get("temperature", 1.0))
    with pytest.raises(NovaError, match="sampler and learner disagree"):
        check([one.rollout for one in recorded(name)], blind)


def test_tokens_whose_supports_were_not_recorded_are_refused() -> None:
    policy = sharp_policy()
    scored = score(sampler(policy, top_p=0.9).train(list(enumerate(prompts())), 0))
    with pytest.raises(NovaError, match=r"truncated distribution \(top_k, top_p or min_p\), but .* not recorded"):
        Check(policy)([one.rollout for one in scored], pack(scored))


def test_saved_and_loaded_rollouts_are_equal() -> None:
    scored = recorded("all, hot")
    assert any(one.rollout.sequences[0].support for one in scored)
    assert tuple(from_dict(Scored, to_dict(one)) for one in scored) == scored
    plain = record(sharp_policy())[0]
    assert plain.rollout.sequences[0].support is None
    assert "support" not in to_dict(plain)["rollout"]["sequences"][0]
    assert pack([plain]).support is None and pack([plain]).cu_support is None


def words(batch: Batch) -> list[list[int]]:
    assert batch.support is not None and batch.cu_support is not None
    bounds = batch.cu_support.tolist()
    return [batch.support[a:b].tolist() for a, b in pairwise(bounds)]


def test_parts_of_a_batch_keep_their_supports() -> None:
    batch = pack([*recorded("all, hot"), *record(sharp_policy(), step=1)])
    whole = words(batch)
    assert len(whole) == batch.tokens.numel() and not any(
        one for one, m in zip(whole, batch.mask, strict=True) if not m
    )
    for chosen in ([0], [5, 2, 30], list(range(batch.reward.numel()))):
        part, index = select(batch, chosen)
        assert words(part) == [whole[token] for token in index.tolist()]
        moved, _ = piece(batch, chosen, torch.device("cpu"))
        assert words(moved) == words(part)


def gradient(name: str, scored: tuple[Scored, ...], *, budget: int) -> dict[str, Tensor]:
    """The gradient of one update in float64."""
    policy = sharp_policy(torch.float64)
    batch = pack(scored, dtype=torch.float64)
    own = scorer(policy, name)
    learner = PolicyLearner(
        policy.model,
        own,
        objective=objective("token"),
        optim=OptimSettings(lr=1e-3),
        ranks=Ranks(),
        budget=budget,
        reference=replace(own, model=perturbed(policy.model, 0.1)),
    )
    scores = learner.score(batch)
    advantage = torch.where(batch.mask, torch.linspace(-1, 1, batch.mask.numel(), dtype=torch.float64), 0.0)
    found: dict[str, Tensor] = {}

    def keep() -> tuple[float, float]:
        found.update({n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None})
        return 1.0, 0.0

    learner.optimizer.step = keep  # type: ignore[method-assign]
    learner.update(batch, scores, Credit(advantage))
    return found


@pytest.mark.parametrize("name", ["top_p", "all, hot"])
def test_micro_batches_do_not_change_the_gradient(name: str) -> None:
    one, other = (gradient(name, recorded(name), budget=budget) for budget in (10_000, 60))
    assert one.keys() == other.keys() and max(float(g.abs().max()) for g in one.values()) > 1e-3
    for key, value in one.items():
        torch.testing.assert_close(other[key], value, rtol=1e-6, atol=1e-9)


def test_the_reference_is_renormalised_too() -> None:
    """So that KL is 0 where policy and reference are equal, token by token."""
    policy, batch = sharp_policy(), pack(recorded("all, hot"))
    own = scorer(policy, "all, hot")
    learner = PolicyLearner(
        policy.model,
        own,
        objective=objective("token"),
        optim=OptimSettings(lr=0.0),
        ranks=Ranks(),
        budget=200,
        reference=replace(own, model=sharp_policy().model),
    )
    scores = learner.score(batch)
    assert scores.ref_logp is not None
    torch.testing.assert_close(scores.ref_logp[batch.mask], batch.behavior_logp[batch.mask], rtol=0, atol=1e-4)
    record = learner.update(batch, Scores(ref_logp=scores.ref_logp), Credit(torch.where(batch.mask, 1.0, 0.0)))
    assert abs(record["kl_to_ref"]) < 1e-6 and record["ratio_mean"] == 1.0 and record["mismatch_max"] < 1e-3


def test_a_greedy_twin_is_not_cut() -> None:
    twins = sampler(sharp_policy(), samples=2, greedy_twin=True, supports=True, **CUT["all, hot"])
    scored = score(twins.train(list(enumerate(prompts())), 0))
    baselines = [one.rollout for one in scored if one.rollout.role == "baseline"]
    assert len(baselines) == len(prompts())
    assert all(sequence.support is None for rollout in baselines for sequence in rollout.sequences)
    batch = pack(scored)
    assert [bool(one) for one in words(batch)].count(True) > 0
    apart = scorer(sharp_policy(), "all, hot").logprobs(batch, Ranks(), 200) - batch.behavior_logp
    assert apart[batch.mask].abs().max() <= 1e-3
