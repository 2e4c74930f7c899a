"""Updates of reward models against their formulae in plain PyTorch, however the batch is cut, laid out or shared."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from novarl.algos.calibration import auroc
from novarl.core.types import Batch, Sequence
from novarl.data.pairs import pack_labelled, pack_pairs
from novarl.distributed.ranks import Ranks
from novarl.learn.optim import OptimSettings
from novarl.learn.preference import unpaired
from novarl.learn.reward_model import (
    LABELLED,
    PAIRED,
    HeadScorer,
    RatioScorer,
    RewardModelLearner,
    RewardScorer,
    rewards_of,
)
from novarl.learn.scorer import Scorer
from novarl.models.forward import Layout
from novarl.models.heads import ValueModel, with_head
from novarl.observe.glossary import lookup
from tests.distributed.fork import run
from tests.invariance.gradients import LIMITS, Gradients, distance, measured
from tests.learn.pairs import (
    WHOLE,
    caught,
    exchanged,
    gradients,
    log_probability,
    model,
    pairs,
    recorded,
    rows,
    shifted,
    wider,
)

BETA, LR, CENTRING, WRONG = 0.3, 1e-3, 0.02, 0.05
LOSSES = sorted(PAIRED | LABELLED)


def value_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> ValueModel:
    """A head that already says something."""
    found = with_head(model(dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        found.head.weight.normal_(std=0.3, generator=generator)
        found.head.bias.fill_(0.2)
    return found


def scorer(of: ValueModel, loss: str, layout: Layout = "auto") -> RewardScorer:
    if loss.startswith("implicit"):
        return RatioScorer(Scorer(of.model, chunk=50, layout=layout), BETA)
    return HeadScorer(of, layout)


def trained(of: ValueModel, loss: str) -> nn.Module:
    """What an update moves: the head takes no part in a log-ratio."""
    return of.model if loss.startswith("implicit") else of


def learner(
    of: ValueModel, loss: str, *, budget: int = WHOLE, layout: Layout = "auto", ranks: Ranks | None = None
) -> RewardModelLearner:
    return RewardModelLearner(
        trained(of, loss),
        scorer(of, loss, layout),
        loss=loss,
        optim=OptimSettings(lr=LR),
        ranks=ranks or Ranks(),
        budget=budget,
        centring=CENTRING if loss in PAIRED else 0.0,
        label_smoothing=WRONG,
    )


def batch(loss: str, dtype: torch.dtype = torch.float64) -> Batch:
    return pack_pairs(pairs(), dtype=dtype) if loss in PAIRED else pack_labelled(rows(), dtype=dtype)


def reward(of: ValueModel, loss: str, sequence: Sequence) -> Tensor:
    """By one forward pass of the sequence alone."""
    if loss.startswith("implicit"):
        return BETA * (log_probability(of.model, sequence) - recorded(sequence))
    ids = torch.tensor([sequence.tokens])
    hidden = of.model(ids, position_ids=torch.arange(ids.numel())[None]).last_hidden_state[0, -1]
    return hidden @ of.head.weight[0] + of.head.bias[0]


def by_hand(of: ValueModel, loss: str) -> Tensor:
    if loss in PAIRED:
        losses = []
        for pair in pairs():
            one, other = reward(of, loss, pair.chosen), reward(of, loss, pair.rejected)
            m = pair.margin or 0.0
            kept, turned = -F.logsigmoid(one - other - m), -F.logsigmoid(other - one - m)
            losses.append((1 - WRONG) * kept + WRONG * turned + CENTRING * (one + other) ** 2)
        return torch.stack(losses).mean()
    found = torch.stack([reward(of, loss, row.sequence) for row in rows()])
    label = torch.tensor([row.label for row in rows()], dtype=torch.float64)
    target = label * (1 - WRONG) + (1 - label) * WRONG
    return -(target * found.sigmoid().log() + (1 - target) * (-found).sigmoid().log()).mean()


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradient_are_those_of_the_formula(loss: str) -> None:
    of = value_model()
    expected = by_hand(of, loss)
    wanted = gradients(expected, trained(of, loss))
    found, record = caught(learner(of, loss, budget=120), batch(loss))
    assert record["loss"] == pytest.approx(expected.item(), rel=1e-10)
    assert distance(found, wanted).whole < 1e-9
    assert all(lookup(name) for name in record)


def test_what_is_reported() -> None:
    of = value_model()
    _, record = caught(learner(of, "bt", budget=100), batch("bt"))
    good = torch.stack([reward(of, "bt", pair.chosen) for pair in pairs()])
    bad = torch.stack([reward(of, "bt", pair.rejected) for pair in pairs()])
    assert record["preference_accuracy"] == pytest.approx((good > bad).double().mean().item())
    assert record["reward_margin"] == pytest.approx((good - bad).mean().item())
    assert record["reward_chosen_mean"] == pytest.approx(good.mean().item())
    _, record = caught(learner(of, "bce", budget=100), batch("bce"))
    found = torch.stack([reward(of, "bce", row.sequence) for row in rows()])
    label = torch.tensor([row.label > 0.5 for row in rows()])
    assert record["label_accuracy"] == pytest.approx(((found > 0) == label).double().mean().item())
    assert record["reward_rejected_mean"] == pytest.approx(found[~label].mean().item())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_budget_and_layout_do_not_matter(loss: str, dtype: torch.dtype) -> None:
    of, whole = value_model(dtype), batch(loss, dtype)
    expected, record = caught(learner(of, loss), whole)
    for budget in (1, 120):
        for layout in ("packed", "padded"):
            found, told = caught(learner(of, loss, budget=budget, layout=layout), whole)
            assert distance(found, expected).within(LIMITS[dtype]), (budget, layout, distance(found, expected))
            assert measured(told) == pytest.approx(measured(record), rel=1e-4, abs=1e-5)


def on_a_rank(ranks: Ranks, loss: str) -> tuple[Gradients, dict[str, float], Tensor]:
    of = value_model()
    found, record = caught(learner(of, loss, budget=100, ranks=ranks), batch(loss))
    return found, record, rewards_of(scorer(of, loss), batch(loss), ranks, 100)


@pytest.mark.parametrize("loss", ["bt", "implicit_ce"])
def test_ranks_do_not_matter(loss: str) -> None:
    expected, record = caught(learner(value_model(), loss), batch(loss))
    alone = rewards_of(scorer(value_model(), loss), batch(loss), Ranks(), WHOLE)
    for found, told, rewards in run(on_a_rank, loss):
        assert distance(found, expected).within(LIMITS[torch.float64])
        assert measured(told) == pytest.approx(measured(record), rel=1e-6)
        torch.testing.assert_close(rewards, alone)


def sides_exchanged(whole: Batch) -> Batch:
    return pack_pairs([replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in pairs()])


def labels_turned(whole: Batch) -> Batch:
    return replace(whole, reward=1 - whole.reward)


def margins_late(whole: Batch) -> Batch:
    return replace(whole, reward=whole.reward.roll(1))


@pytest.mark.parametrize(
    ("loss", "spoil"),
    [
        *[("bt", fault) for fault in (sides_exchanged, margins_late)],
        *[("bce", fault) for fault in (labels_turned, margins_late)],
        *[("implicit_dpo", fault) for fault in (shifted, exchanged, sides_exchanged)],
        *[("implicit_ce", fault) for fault in (shifted, wider, exchanged, labels_turned)],
    ],
)
def test_planted_faults_are_caught(loss: str, spoil: Callable[[Batch], Batch]) -> None:
    of, whole = value_model(), batch(loss)
    wanted = gradients(by_hand(of, loss), trained(of, loss))
    assert distance(caught(learner(of, loss), spoil(whole))[0], wanted).whole > 0.01


def test_the_token_before_the_last_is_another_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    of, whole = value_model(), batch("bt")
    wanted = gradients(by_hand(of, "bt"), of)
    monkeypatch.setattr("novarl.learn.reward_model.last_positions", lambda batch: batch.cu_seqlens[1:] - 2)
    assert distance(caught(learner(of, "bt"), whole)[0], wanted).whole > 0.01


@pytest.mark.parametrize("loss", LOSSES)
def test_it_learns_and_what_it_learns_depends_on_the_seed(loss: str) -> None:
    of, other, whole = value_model(torch.float32), value_model(torch.float32, seed=1), batch(loss, torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in of.named_parameters()}
    update = learner(of, loss)
    losses = [update.update(whole)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.03, losses
    assert any(not torch.equal(before[name], parameter) for name, parameter in of.named_parameters())
    assert (learner(other, loss).update(whole)["loss"] != losses[0]) != loss.startswith("implicit")


def test_a_new_head_learns_the_order_of_its_pairs() -> None:
    of = with_head(model(torch.float32))
    whole, update = batch("bt", torch.float32), learner(with_head(model(torch.float32)), "bt")
    assert rewards_of(HeadScorer(of), whole, Ranks(), WHOLE).eq(0).all()
    records = [update.update(whole) for _ in range(30)]
    assert records[0]["preference_accuracy"] == 0.0, "ties are no successes"
    assert records[-1]["preference_accuracy"] == 1.0
    assert isinstance(update.scorer, HeadScorer)
    rewards = rewards_of(update.scorer, whole, Ranks(), 100)
    label = torch.tensor([1.0, 0.0]).repeat(len(pairs()))
    assert auroc(rewards, label) > 0.8


def test_rewards_of_are_those_of_each_sequence_alone() -> None:
    of = value_model()
    for loss in ("bt", "implicit_dpo"):
        expected = [reward(of, loss, side).item() for pair in pairs() for side in (pair.chosen, pair.rejected)]
        found = rewards_of(scorer(of, loss), batch(loss), Ranks(), 100)
        assert found.tolist() == pytest.approx(expected, rel=1e-9) and not found.requires_grad


def test_a_log_ratio_says_which_tokens_earned_it() -> None:
    of, whole = value_model(), batch("implicit_dpo")
    said = scorer(of, "implicit_dpo")(whole)
    assert said.token is not None and scorer(of, "bt")(whole).token is None
    owner = torch.repeat_interleave(torch.arange(len(said.sequence)), whole.cu_seqlens.diff())
    sums = torch.zeros_like(said.sequence).index_add(0, owner, said.token)
    torch.testing.assert_close(sums, said.sequence, atol=1e-10, rtol=0)
    assert said.token[~whole.mask].eq(0).all() and said.token[whole.mask].abs().min() > 0


def test_state_survives_and_the_next_update_is_the_same() -> None:
    of, whole = value_model(torch.float32), batch("bt", torch.float32)
    update = learner(of, "bt")
    for _ in range(3):
        update.update(whole)
    other = deepcopy(of)
    again = learner(other, "bt")
    again.load_state_dict(deepcopy(update.state_dict()))
    assert update.update(whole) == again.update(whole)
    for one, two in zip(of.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_what_a_loss_cannot_do_is_refused() -> None:
    of = value_model()
    with pytest.raises(ValueError, match="unknown reward-model loss 'implicit_kto'"):
        learner(of, "implicit_kto")
    settings = {"optim": OptimSettings(), "ranks": Ranks(), "budget": WHOLE}
    with pytest.raises(ValueError, match="not a loss for RatioScorer"):
        RewardModelLearner(of, scorer(of, "implicit_ce"), loss="bt", **settings)
    with pytest.raises(ValueError, match="not support centring"):
        RewardModelLearner(of, HeadScorer(of), loss="bce", centring=0.1, **settings)
    with pytest.raises(ValueError, match="with_reference"):
        bare = [replace(row.chosen, versions=(-1,) * len(row.chosen.tokens)) for row in unpaired(rows())]
        learner(of, "implicit_ce").update(
            pack_labelled([replace(row, sequence=side) for row, side in zip(rows(), bare, strict=True)])
        )
