"""One policy update against the formula written out in plain PyTorch: its gradient, its step, and what it reports."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from novarl.algos import off_policy
from novarl.algos.surrogates import reinforce
from novarl.core.types import Batch, Credit, Record, Scores, Sequence
from novarl.data.pack import pack, pack_sequences
from novarl.distributed.ranks import Ranks
from novarl.learn import policy
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Objective
from novarl.learn.optim import OptimSettings
from novarl.learn.plan import plan
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.models.forward import Layout
from novarl.observe.glossary import METRICS, lookup
from tests.invariance.families import family_policy
from tests.invariance.gradients import LIMITS, Case, distance, gradient, make_case, make_learner, sharp_case, weights_of
from tests.invariance.sharp import prompts, record, recorded, sampler, score, sharp_policy

TEMPERATURE, LOW, HIGH, KL, ENTROPY, CORRECTION, CONSTANT = 0.9, 0.2, 0.28, 0.1, 0.01, 2.0, 16.0
"""What `gradients.make_learner` sets."""


def plain(model: nn.Module, batch: Batch, temperature: float = TEMPERATURE) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every token, 0 for a first one: a forward pass for each sequence by itself, and a
    softmax over all of its logits."""
    logps, entropies = [], []
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        row, positions = batch.tokens[None, begin:end], torch.arange(end - begin)[None]
        if hasattr(model, "generate"):
            logits = model(input_ids=row, position_ids=positions, use_cache=False).logits
        else:
            logits = model.lm_head(model(row, position_ids=positions).last_hidden_state)  # type: ignore[operator]
        log_p = (logits[0, :-1] / temperature).log_softmax(-1)
        none = log_p.new_zeros(1)
        logps.append(torch.cat([none, log_p.gather(-1, row[0, 1:, None])[:, 0]]))
        entropies.append(torch.cat([none, -(log_p.exp() * log_p).sum(-1)]))
    return torch.cat(logps), torch.cat(entropies)


def by_hand(case: Case) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradient and metrics of the update, from the definitions."""
    batch, mask = case.batch, case.batch.mask
    owner = torch.repeat_interleave(batch.traj, batch.cu_seqlens.diff())
    rewards: dict[int, list[float]] = {}
    for group, reward in zip(batch.group.tolist(), batch.reward.tolist(), strict=True):
        rewards.setdefault(group, []).append(reward)
    advantages = []
    for group, reward in zip(batch.group.tolist(), batch.reward.tolist(), strict=True):
        own = torch.tensor(rewards[group], dtype=torch.float64)
        flat = len(set(rewards[group])) == 1  # whose rounding error, divided by eps, would count for something
        advantages.append(0.0 if flat else (reward - own.mean().item()) / (own.std().item() + 1e-6))
    advantage = torch.tensor(advantages, dtype=torch.float64)[owner]
    with torch.no_grad():
        (old, _), (ref, _) = plain(case.old, batch), plain(case.reference, batch)
    logp, entropy = plain(case.model, batch)
    ratio = (logp - old).exp()
    free, clipped = ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage
    correction = (old - batch.behavior_logp).exp().clamp(max=CORRECTION)
    k3 = (ref - logp).exp() - (ref - logp) - 1
    lengths = torch.stack([mask[owner == trajectory].sum() for trajectory in range(len(advantages))])[owner]
    weight = {
        "token": torch.full_like(logp, 1.0 / mask.sum().item()),
        "sequence": 1.0 / (len(advantages) * lengths.double()),
        "constant": torch.full_like(logp, 1.0 / (len(advantages) * CONSTANT)),
    }[case.aggregation] * mask
    policy, kl, bonus = (
        (weight * values).sum() for values in (-correction * torch.minimum(free, clipped), k3, entropy)
    )
    loss = policy + KL * kl - ENTROPY * bonus
    names = [name for name, _ in case.model.named_parameters()]
    grads = torch.autograd.grad(loss, list(case.model.parameters()))

    def mean(values: Tensor) -> float:
        return values[mask].double().mean().item()

    gap = (old - batch.behavior_logp).abs()
    metrics = {
        "total_loss": loss.item(),
        "policy_loss": policy.item(),
        "kl_loss": kl.item(),
        "kl_penalty": KL * kl.item(),
        "policy_objective": (weight * free).sum().item(),
        "entropy": mean(entropy),
        "ratio_mean": mean(ratio),
        "ratio_max": ratio[mask].max().item(),
        "clip_fraction": mean((free > clipped).double()),
        "correction_mean": mean(correction),
        "effective_sample_size": (correction[mask].sum() ** 2 / (mask.sum() * (correction[mask] ** 2).sum())).item(),
        "mismatch_mean": mean(gap),
        "mismatch_max": gap[mask].max().item(),
        "kl_mean": mean(k3),
        "kl_std": k3[mask].std(unbiased=False).item(),
        "kl_to_ref": mean(logp - ref),
        "kl_sequence": torch.zeros(len(advantages), dtype=k3.dtype).index_add(0, owner, k3 * mask).mean().item(),
        "grad_norm": sum(float(value.square().sum()) for value in grads) ** 0.5,
    }
    return dict(zip(names, grads, strict=True)), metrics


def scored_case(family: str, aggregation: str = "token") -> Case:
    """In float64, on the model's own rollouts."""
    if family == "sharp":
        return sharp_case(torch.float64, aggregation)
    scored = record(family_policy(family))
    return make_case(family_policy(family, torch.float64).model, scored, torch.float64, aggregation)


AGGREGATIONS = pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])


@AGGREGATIONS
def test_the_gradient_is_that_of_the_formula(aggregation: str) -> None:
    case = sharp_case(torch.float64, aggregation)
    expected, _ = by_hand(case)
    found = distance(gradient(case, budget=100), expected)
    assert found.whole < 1e-12 and found.tensor < 1e-12, found


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("family", "limit"), [("gpt2", 1e-12), ("moe", 1e-6)])
def test_the_gradient_of_other_families_too(family: str, limit: float, layout: Layout) -> None:
    """transformers computes the norms of Qwen3 in float32 whatever it is told."""
    case = scored_case(family)
    expected, _ = by_hand(case)
    found = distance(gradient(case, budget=100, layout=layout), expected)
    assert found.whole < limit and found.tensor < limit, found


def updated(case: Case, **changes: Any) -> tuple[PolicyLearner, Record, Scores]:
    """The learner after one update of the case."""
    learner = make_learner(case, budget=100)
    learner.optimizer.settings = replace(learner.optimizer.settings, **changes)
    with weights_of(case.model, case.old):
        scores = learner.score(case.batch)
    credit, _, _ = CreditRule("group", {"norm_std": True})(case.batch, scores, None)
    return learner, learner.update(case.batch, scores, credit), scores


@AGGREGATIONS
def test_what_it_reports_is_what_the_glossary_says(aggregation: str) -> None:
    case = sharp_case(torch.float64, aggregation)
    _, expected = by_hand(case)
    _, found, _ = updated(case, lr=1e-4)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert found.keys() - expected.keys() == {"kl", "lr", "kl_coef", "entropy_coef", "micro_batches"}
    assert found["micro_batches"] == len(plan(case.batch, Ranks(), 100)) > 1
    assert found["lr"] == 1e-4 and found["kl_coef"] == KL and found["entropy_coef"] == ENTROPY
    assert all(lookup(name) is METRICS[name] for name in found)


def test_the_effective_sample_size_without_a_correction_is_that_of_the_bare_ratios() -> None:
    case = sharp_case(torch.float64)
    learner, _, scores = updated(case)
    learner.objective = replace(learner.objective, correction=None)
    credit, _, _ = CreditRule("group", {"norm_std": True})(case.batch, scores, None)
    assert scores.old_logp is not None
    ratio = (scores.old_logp - case.batch.behavior_logp).exp()[case.batch.mask].double()
    expected = float(ratio.mean() ** 2 / ratio.square().mean())
    found = learner.update(case.batch, scores, credit)["effective_sample_size"]
    assert found == pytest.approx(expected, rel=1e-6) and 0 < found <= 1
    learner.objective = replace(learner.objective, correction=partial(off_policy.truncated_weight, maximum=1.0))
    truncated = learner.update(case.batch, scores, credit)["effective_sample_size"]
    cut = ratio.clamp(max=1.0)
    assert truncated == pytest.approx(float(cut.mean() ** 2 / cut.square().mean()), rel=1e-6)
    assert found < truncated < 1, "the correction's own weights count where there is one"
    learner.objective = replace(learner.objective, correction=None)
    on_policy = learner.update(case.batch, replace(scores, old_logp=None), credit)
    assert "effective_sample_size" not in on_policy


def test_scores_are_those_of_the_weights_before_the_update() -> None:
    case = sharp_case(torch.float64)
    _, _, scores = updated(case)
    for found, model in ((scores.old_logp, case.old), (scores.ref_logp, case.reference)):
        assert found is not None and found.dtype == torch.float64
        with torch.no_grad():
            expected = plain(model, case.batch)[0] * case.batch.mask
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_step_is_adamw_on_the_clipped_gradient() -> None:
    case = sharp_case(torch.float64)
    expected, metrics = by_hand(case)
    twin = sharp_case(torch.float64).model
    norm = metrics["grad_norm"]
    for parameter, value in zip(twin.parameters(), expected.values(), strict=True):
        parameter.grad = value * min(1.0, 0.01 / norm)
    learner, _, _ = updated(case, lr=1e-3, max_grad_norm=0.01)
    torch.optim.AdamW(twin.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    for (name, mine), theirs in zip(case.model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8, msg=name)
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_kl_is_measured_after_the_update_and_never_clamped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first trajectories: here on everything."""
    monkeypatch.setattr(policy, "PROBE_LEAST", policy.PROBE_MOST)
    for lr in (0.0, 1e-3, 1.0):
        case = sharp_case(torch.float64)
        with torch.no_grad():
            before, _ = plain(case.model, case.batch)
        learner = make_learner(case)
        learner.optimizer.settings = replace(learner.optimizer.settings, lr=lr)
        credit, _, _ = CreditRule("group")(case.batch, Scores(), None)
        found = learner.update(case.batch, learner.score(case.batch), credit)
        with torch.no_grad():
            x = (before - plain(case.model, case.batch)[0])[case.batch.mask]
        assert found["kl"] == pytest.approx((x + torch.expm1(-x)).mean().item(), rel=1e-9, abs=1e-12)
        assert found["kl"] == 0.0 if lr == 0.0 else found["kl"] > 0.0
    assert found["kl"] > 10.0


@pytest.mark.parametrize(("answers", "looked_at"), [(5, 5), (100, 8), (800, 25), (2000, 29)])
def test_a_few_trajectories_show_how_far_an_update_moved(answers: int, looked_at: int) -> None:
    """Of 45 trained tokens all; of 900 and 7,200 a thirty-second, 64 at least; of 18,000 no more than 256."""
    tokens = tuple(range(10))
    columns = {"behavior_logp": (0.0,) * 10, "versions": (0,) * 10, "kept_logmass": (0.0,) * 10}
    masks = [(False,) * 10, (False, *(True,) * 9)]
    batch = pack_sequences([Sequence(tokens=tokens, mask=mask, **columns) for mask in masks * answers])
    assert PolicyLearner._probe(batch) == list(range(1, 2 * looked_at, 2)), "every other one is not trained on"


def simple(model: nn.Module, **changes: Any) -> PolicyLearner:
    """REINFORCE: no clip, no KL, no scores."""
    objective = Objective(surrogate=reinforce, aggregation="constant", constant=1.0)
    return PolicyLearner(
        model,
        Scorer(model, chunk=64, **changes),
        objective=objective,
        optim=OptimSettings(lr=1e-3),
        ranks=Ranks(),
        budget=200,
    )


def test_without_scores_it_is_the_policy_gradient() -> None:
    policy = sharp_policy(torch.float64)
    batch = pack(recorded(), dtype=torch.float64)
    learner = simple(policy.model)
    scores = learner.score(batch)
    assert scores == Scores()
    credit, _, _ = CreditRule("leave_one_out")(batch, scores, None)
    logp, _ = plain(policy.model, batch, 1.0)
    loss = -(credit.advantage * logp)[batch.mask].sum() / len(batch.reward)
    expected = torch.autograd.grad(loss, list(policy.model.parameters()))
    norm = sum(float(value.square().sum()) for value in expected) ** 0.5
    found = learner.update(batch, scores, credit)
    assert found["grad_norm"] == pytest.approx(norm, rel=1e-10)
    assert found["policy_loss"] == found["total_loss"] == pytest.approx(loss.item(), rel=1e-10)
    assert found["ratio_mean"] == found["ratio_max"] == 1.0 and found["mismatch_mean"] <= 1e-5
    assert found["kl_loss"] == found["kl_penalty"] == found["kl_coef"] == 0.0


def test_greedy_twins_take_no_part() -> None:
    """Neither in the gradient nor in a denominator."""
    twins = score(sampler(sharp_policy(), samples=1, temperature=0.0).train(list(enumerate(prompts())), 0))
    twins = [replace(item, rollout=replace(item.rollout, role="baseline")) for item in twins]
    norms = []
    for items in (list(recorded()), [*twins[:3], *recorded(), *twins[3:]]):
        policy = sharp_policy(torch.float64)
        batch = pack(items, dtype=torch.float64)
        assert int(batch.baseline.sum()) in (0, 6)
        learner = simple(policy.model)
        credit, _, _ = CreditRule("group")(batch, Scores(), None)
        norms.append(learner.update(batch, Scores(), credit)["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-12) and norms[0] > 0


def test_a_minibatch_without_a_trained_token() -> None:
    """It moves nothing that has no momentum, and reports no mean of nothing."""
    policy = sharp_policy()
    batch = pack(recorded())
    batch = replace(batch, mask=torch.zeros_like(batch.mask))
    before = [parameter.detach().clone() for parameter in policy.model.parameters()]
    found = simple(policy.model).update(batch, Scores(), Credit(advantage=torch.zeros_like(batch.behavior_logp)))
    assert found["grad_norm"] == 0.0 and "entropy" not in found and "kl" not in found
    assert not any(value != value for value in found.values()), found
    assert all(torch.equal(one, two) for one, two in zip(before, policy.model.parameters(), strict=True))


@pytest.mark.parametrize("family", ["gpt2", "moe"])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_other_families_learn(family: str, layout: Layout) -> None:
    """Sampled, scored and trained: every tensor moves, and the advantages' sign shows in the log-probabilities."""
    policy = family_policy(family)
    batch = pack(record(policy))
    before = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    learner = simple(policy.model, layout=layout)
    credit, _, _ = CreditRule("group")(batch, Scores(), None)
    logp = learner.scorer.logprobs(batch, Ranks(), 200)
    found = learner.update(batch, Scores(), credit)
    assert found["mismatch_max"] <= 1e-3
    still = [name for name, parameter in policy.model.named_parameters() if torch.equal(before[name], parameter)]
    assert not still, still
    moved = learner.scorer.logprobs(batch, Ranks(), 200) - logp
    assert float((moved * credit.advantage).sum()) > 0.0


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_where_pad_is_eos_the_end_of_an_answer_is_still_learnt(layout: Layout) -> None:
    """GPT-2 without a pad token: pad is eos, and a mask of ids would never teach it to stop."""
    policy = family_policy("gpt2", torch.float64)
    eos = policy.tokenizer.eos_token_id
    assert policy.tokenizer.pad_token_id == eos
    scored = record(family_policy("gpt2"))
    batch = pack(scored, dtype=torch.float64)
    ends = batch.mask & (batch.tokens == eos)
    assert int(ends.sum()) == len(scored)
    # An advantage for the ends alone: what moves, moves because of them.
    credit = Credit(advantage=ends.double())
    found = simple(policy.model, layout=layout).update(batch, Scores(), credit)
    policy = family_policy("gpt2", torch.float64)
    logp, _ = plain(policy.model, batch, 1.0)
    expected = torch.autograd.grad(-logp[ends].sum() / len(scored), list(policy.model.parameters()))
    norm = sum(float(value.square().sum()) for value in expected) ** 0.5
    assert norm > 1e-3 and found["grad_norm"] == pytest.approx(norm, rel=1e-9)


def test_recomputing_activations_changes_nothing() -> None:
    case = sharp_case(torch.float32)
    whole = gradient(case, budget=100)
    case.model.model.gradient_checkpointing = True  # type: ignore[union-attr]
    assert distance(gradient(case, budget=100), whole).within(LIMITS[torch.float32])


def test_bfloat16_is_near() -> None:
    """Weights and gradients stay in float32; the direction is kept within a few percent."""
    case = sharp_case(torch.float32)
    whole = gradient(case)
    half = gradient(replace(case, dtype=torch.bfloat16))
    assert all(value.dtype == torch.float32 and bool(torch.isfinite(value).all()) for value in half.values())
    assert 1e-5 < distance(half, whole).whole < 0.1
