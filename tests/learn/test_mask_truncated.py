"""Answers that a limit cut off, left out of the loss: the gradient is that of the other answers alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from novarl.core.types import Batch, Credit, Rollout, Scored, Scores
from novarl.data.pack import select
from novarl.learn.credit import CreditRule
from novarl.loops.online import minibatch_order, online, without_truncated
from novarl.loops.state import LoopState
from tests.compose.harness import ON_TASK, finished, metrics, novarl, weights
from tests.invariance.gradients import Case, make_learner, sharp_case, weights_of
from tests.loops.fakes import Seen, prompts, scored, stages

CUT = (0, 3, 4)


def with_cut(batch: Batch, cut: tuple[int, ...] = CUT) -> Batch:
    truncated = torch.zeros_like(batch.truncated)
    truncated[list(cut)] = True
    return replace(batch, truncated=truncated)


def update(case: Case, batch: Batch, scores: Scores, credit: Credit) -> tuple[dict[str, Tensor], float]:
    """The gradient and the loss of one update."""
    learner, caught = make_learner(case, budget=100), {}

    def catch() -> tuple[float, float]:
        learner.optimizer.gradients()
        for name, parameter in learner.optimizer.parameters.items():
            caught[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            parameter.grad = None
        return 0.0, 0.0

    learner.optimizer.step = catch  # type: ignore[method-assign]
    return caught, learner.update(batch, scores, credit).get("total_loss", 0.0)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_the_update_is_that_of_the_other_answers_alone(aggregation: str) -> None:
    """Also its denominators: tokens, answers and lengths are counted without the cut-off ones."""
    case = sharp_case(torch.float64, aggregation)
    batch = with_cut(case.batch)
    with weights_of(case.model, case.old):
        scores = make_learner(case).score(batch)
    credit, _, _ = CreditRule("group", {"norm_std": True})(batch, scores, None)
    kept = [index for index in range(len(batch.reward)) if index not in CUT]
    part, index = select(batch, kept)
    assert scores.old_logp is not None and scores.ref_logp is not None
    alone = Scores(old_logp=scores.old_logp[index], ref_logp=scores.ref_logp[index])
    expected, loss = update(case, part, alone, Credit(advantage=credit.advantage[index], returns=None))
    found, masked = update(case, without_truncated(batch), scores, credit)
    whole, unmasked = update(case, batch, scores, credit)
    assert masked == pytest.approx(loss, rel=1e-12) and masked != pytest.approx(unmasked, rel=1e-3)
    assert all(torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-14) for name in expected)
    assert not all(torch.allclose(found[name], whole[name], rtol=1e-2) for name in expected)


def test_their_rewards_stay_in_the_baselines_and_they_are_in_no_minibatch() -> None:
    """Rewards 0, 1, 2 in a group, the last answer cut off: the others' advantages are -1 and 0, not -1/2 and 1/2."""
    seen = Seen()
    plain = stages(seen, rows=prompts(4), updates_per_rollout=2)

    def score(rollouts: list[Rollout]) -> list[Scored]:
        return [
            scored(replace(item, status="truncated" if item.index == 2 else "done"), float(item.index))
            for item in rollouts
        ]

    list(online(LoopState(), replace(plain, score=score, mask_truncated=True), steps=1))
    assert [batch.reward.tolist() for batch in seen.batches] == [[0.0, 1.0] * 2] * 2
    assert all(batch.mask.any() and not batch.truncated.any() for batch in seen.batches)
    assert [sorted(set(given)) for given in seen.advantages] == [[-1.0, 0.0]] * 2
    every = Seen()
    list(online(LoopState(), replace(stages(every, rows=prompts(4), updates_per_rollout=2), score=score), steps=1))
    assert [batch.reward.tolist() for batch in every.batches] == [[0.0, 1.0, 2.0] * 2] * 2, "as long as nobody asks"


def test_where_every_answer_was_cut_off_one_update_has_no_gradient() -> None:
    case = sharp_case(torch.float64)
    batch = without_truncated(with_cut(case.batch, tuple(range(len(case.batch.reward)))))
    parts = minibatch_order(batch, 0, replace(stages(Seen(), rows=prompts(1)), updates_per_rollout=4))
    assert parts == [list(range(len(batch.reward)))]
    with weights_of(case.model, case.old):
        scores = make_learner(case).score(batch)
    found, loss = update(case, batch, scores, Credit(advantage=torch.ones_like(batch.behavior_logp), returns=None))
    assert loss == 0.0 and not any(bool(value.any()) for value in found.values())


@pytest.mark.parametrize("algo", ["dr_grpo", "ppo", "prime", "vineppo vine.samples=2", "grpo kl.coef=0.1", "dapo"])
def test_a_run_whose_answers_are_all_cut_off_goes_on_and_learns_nothing(algo: str, tmp_path: Path) -> None:
    words = (*ON_TASK, f"run_dir={tmp_path / 'run'}", *f"algo={algo}".split(), "rollout.max_tokens=1", "steps=2")
    finished("rl", *words, "loss.mask_truncated=true")
    found = [row for row in metrics(tmp_path / "run") if row["phase"] == "rl"]
    assert len(found) == 2, "one update a step"
    assert all(row["truncated_fraction"] == 1.0 and row["grad_norm"] == 0.0 for row in found)
    finished("rl", *words, f"run_dir={tmp_path / 'start'}", "steps=1", "optim.lr=1e-30", "loss.mask_truncated=true")
    before, after = weights(tmp_path / "start"), weights(tmp_path / "run")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("algo=gspo clip.dual=3", "clip.dual: loss.surrogate=gspo does not use it (use loss.surrogate=dual_clip"),
        ("loss.surrogate=ppo_clip clip.dual=3", "loss.surrogate=ppo_clip does not use it"),
        ("algo=grpo clip.high=0.5 clip.dual=1.2", "1.2 is below 1 + clip.high = 1.5"),
        ("algo=grpo loss.tau_pos=2", "loss.tau_pos: loss.surrogate=ppo_clip does not use it (use loss.surrogate=sapo"),
        ("algo=grpo loss.tau_neg=2", "loss.tau_neg: loss.surrogate=ppo_clip does not use it (use loss.surrogate=sapo"),
        ("clip.dual=1", "clip.dual: must be above 1"),
    ],
)
def test_a_bound_that_nothing_reads_is_refused(words: str, said: str) -> None:
    ended = novarl("explain", "rl", "task=sort", *words.split())
    assert ended.code == 2 and said in ended.err


def test_the_bounds_reach_the_surrogate() -> None:
    shown = finished("explain", "rl", "task=sort", "algo=dapo", "clip.dual=4").out
    shown = " ".join(shown.split())
    assert "dual" in shown.lower() and "at most 4 for negative advantages" in shown and "0.28" in shown
    shown = " ".join(finished("explain", "rl", "task=sort", "loss.mask_truncated=true").out.split())
    assert "truncated answers are excluded" in shown
