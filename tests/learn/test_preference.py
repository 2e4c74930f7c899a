"""Updates on preferences against their formulae in plain PyTorch, however the batch is cut, laid out or shared."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from novarl.algos.preference_losses import LOSSES
from novarl.core.types import Batch, Sequence
from novarl.data.pairs import Labelled, pack_pairs
from novarl.distributed.ranks import Ranks
from novarl.learn.optim import OptimSettings
from novarl.learn.plan import plan
from novarl.learn.preference import (
    KTOLearner,
    PreferenceLearner,
    one_side,
    reference_sums,
    unpaired,
    with_reference,
)
from novarl.learn.scorer import Scorer
from novarl.models.forward import Layout
from novarl.models.transformer import Decoder
from novarl.observe.glossary import lookup
from tests.distributed.fork import run
from tests.invariance.gradients import LIMITS, Gradients, distance, measured
from tests.invariance.sharp import sharp_policy
from tests.learn.pairs import (
    WHOLE,
    caught,
    exchanged,
    gradients,
    log_probability,
    model,
    pairs,
    raw_pairs,
    recorded,
    reference,
    rows,
    shifted,
    wider,
)

BETA, LR = 0.3, 1e-3
PAIRED = sorted(LOSSES.keys() - {"kto"})
Learner = PreferenceLearner | KTOLearner


def learner(
    of: Decoder,
    loss: str = "sigmoid",
    *,
    budget: int = WHOLE,
    layout: Layout = "auto",
    ranks: Ranks | None = None,
    seed_lr: float = LR,
) -> Learner:
    scorer = Scorer(of, chunk=50, layout=layout)
    optim, group = OptimSettings(lr=seed_lr), ranks or Ranks()
    if loss == "kto":
        return KTOLearner(of, scorer, beta=BETA, optim=optim, ranks=group, budget=budget, desirable_weight=1.5)
    return PreferenceLearner(of, scorer, loss=loss, beta=BETA, optim=optim, ranks=group, budget=budget)


def batch(loss: str = "sigmoid", dtype: torch.dtype = torch.float64) -> Batch:
    return pack_pairs(unpaired(rows()) if loss == "kto" else pairs(), dtype=dtype)


def ratio(of: Decoder, sequence: Sequence) -> Tensor:
    return log_probability(of, sequence) - recorded(sequence)


def by_hand(of: Decoder, loss: str) -> Tensor:
    """The mean over pairs, or rows, written out."""
    if loss == "kto":
        asked = unpaired(rows())
        point = max(0.0, sum(ratio(of, row.rejected).item() for row in asked) / len(asked))
        values = []
        for row in asked:
            value = torch.sigmoid(BETA * (ratio(of, row.chosen) - point))
            values.append(1.5 * (1 - value) if (row.margin or 0.0) > 0.5 else value)
        return torch.stack(values).mean()
    losses = []
    for pair in pairs():
        chosen, rejected = log_probability(of, pair.chosen), log_probability(of, pair.rejected)
        h, other = chosen - recorded(pair.chosen), rejected - recorded(pair.rejected)
        m, n = sum(pair.chosen.mask), sum(pair.rejected.mask)
        gap = BETA * (h - other)
        p, q = (chosen / m).exp(), (rejected / n).exp()
        losses.append(
            {
                "sigmoid": -F.logsigmoid(gap),
                "robust": -F.logsigmoid(gap),
                "hinge": F.relu(1 - gap),
                "ipo": (h / m - other / n - 1 / (2 * BETA)) ** 2,
                "dpop": -F.logsigmoid(gap - BETA * 50 * F.relu(-h)),
                "simpo": -F.logsigmoid(BETA * (chosen / m - rejected / n) - 0.5),
                "orpo": -p.log() - BETA * F.logsigmoid((p / (1 - p)).log() - (q / (1 - q)).log()),
            }[loss]
        )
    return torch.stack(losses).mean()


@pytest.mark.parametrize("loss", [*PAIRED, "kto"])
def test_loss_and_gradient_are_those_of_the_formula(loss: str) -> None:
    of = model()
    expected = by_hand(of, loss)
    wanted = gradients(expected, of)
    found, record = caught(learner(of, loss, budget=60), batch(loss))
    assert record["loss"] == pytest.approx(expected.item(), rel=1e-10)
    assert distance(found, wanted).tensor < 1e-9
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-5
    assert all(lookup(name) for name in record)


def test_what_is_reported() -> None:
    of = model()
    _, record = caught(learner(of, "sigmoid", budget=50), batch())
    chosen = torch.stack([log_probability(of, pair.chosen) for pair in pairs()])
    rejected = torch.stack([log_probability(of, pair.rejected) for pair in pairs()])
    good = BETA * (chosen - torch.tensor([recorded(pair.chosen) for pair in pairs()]))
    bad = BETA * (rejected - torch.tensor([recorded(pair.rejected) for pair in pairs()]))
    expected = {
        "preference_accuracy": (good > bad).double().mean(),
        "reward_margin": (good - bad).mean(),
        "reward_chosen_mean": good.mean(),
        "reward_rejected_mean": bad.mean(),
        "chosen_logp_mean": chosen.mean(),
        "rejected_logp_mean": rejected.mean(),
    }
    assert {name: record[name] for name in expected} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-6
    )
    rest = record.keys() - expected.keys()
    assert rest == {"loss", "grad_norm", "lr", "tokens", "micro_batches"} and record["tokens"] == batch().tokens.numel()
    assert 0 < record["preference_accuracy"] < 1, "the accuracy must be able to go either way"


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "orpo", "kto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_budget_and_layout_do_not_matter(loss: str, dtype: torch.dtype) -> None:
    of, whole = model(dtype), batch(loss, dtype)
    expected, record = caught(learner(of, loss), whole)
    assert len(plan(whole, Ranks(), 1)) == len(whole.reward) > len(plan(whole, Ranks(), 60)) > 1
    for budget in (1, 60):
        for layout in ("packed", "padded"):
            found, told = caught(learner(of, loss, budget=budget, layout=layout), whole)
            assert distance(found, expected).within(LIMITS[dtype]), (budget, layout, distance(found, expected))
            assert measured(told) == pytest.approx(measured(record), rel=1e-4, abs=1e-5)


def on_a_rank(ranks: Ranks, loss: str) -> tuple[Gradients, dict[str, float]]:
    return caught(learner(model(), loss, budget=50, ranks=ranks), batch(loss))


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_ranks_do_not_matter(loss: str) -> None:
    expected, record = caught(learner(model(), loss), batch(loss))
    parts = run(on_a_rank, loss)
    for found, told in parts:
        assert distance(found, expected).within(LIMITS[torch.float64])
        assert measured(told) == pytest.approx(measured(record), rel=1e-6)
    assert parts[0][1] == parts[1][1]


def test_a_mean_of_micro_batch_means_is_caught() -> None:
    of = model()
    expected, _ = caught(learner(of), batch())
    parts = [caught(learner(of), pack_pairs(part, dtype=torch.float64))[0] for part in (pairs()[:1], pairs()[1:])]
    mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in expected}
    assert distance(mean, expected).whole > 0.01


def sides_exchanged(whole: Batch) -> Batch:
    return pack_pairs([replace(pair, chosen=pair.rejected, rejected=pair.chosen) for pair in pairs()])


def labels_turned(whole: Batch) -> Batch:
    return replace(whole, reward=1 - whole.reward)


@pytest.mark.parametrize(
    ("loss", "spoil"),
    [
        *[("sigmoid", fault) for fault in (shifted, exchanged, sides_exchanged)],
        *[("kto", fault) for fault in (shifted, wider, exchanged, labels_turned)],
        *[(loss, wider) for loss in ("ipo", "dpop", "simpo")],  # in D a prompt that both sides share cancels
    ],
)
def test_planted_faults_are_caught(loss: str, spoil: Callable[[Batch], Batch]) -> None:
    of, whole = model(), batch(loss)
    wanted = gradients(by_hand(of, loss), of)
    assert distance(caught(learner(of, loss), whole)[0], wanted).whole < 1e-9
    assert distance(caught(learner(of, loss), spoil(whole))[0], wanted).whole > 0.01


@pytest.mark.parametrize("loss", ["sigmoid", "dpop", "kto"])
def test_it_learns_and_what_it_learns_depends_on_the_seed(loss: str) -> None:
    of, other = model(torch.float32), sharp_policy(torch.float32).model
    assert isinstance(other, Decoder)
    whole = batch(loss, torch.float32)
    before = [parameter.detach().clone() for parameter in of.parameters()]
    update, elsewhere = learner(of, loss), learner(other, loss)
    losses = [update.update(whole)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.02, losses
    assert all(not torch.equal(one, two) for one, two in zip(before, of.parameters(), strict=True))
    assert elsewhere.update(whole)["loss"] != losses[0]


def test_preferences_are_learnt() -> None:
    update = learner(model(torch.float32))
    records = [update.update(batch(dtype=torch.float32)) for _ in range(25)]
    assert records[-1]["preference_accuracy"] == 1.0 and records[-1]["reward_margin"] > 1.0


@pytest.mark.parametrize("loss", ["sigmoid", "kto"])
def test_state_survives_and_the_next_update_is_the_same(loss: str) -> None:
    of, whole = model(torch.float32), batch(loss, torch.float32)
    update = learner(of, loss)
    for _ in range(3):
        update.update(whole)
    again = learner(deepcopy(of), loss)
    again.load_state_dict(deepcopy(update.state_dict()))
    assert update.update(whole) == again.update(whole)
    for one, two in zip(of.parameters(), again.scorer.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_at_the_reference_all_rewards_are_zero() -> None:
    of = sharp_policy(torch.float64).model
    assert isinstance(of, Decoder)
    _, record = caught(learner(of, budget=50), batch())
    assert record["loss"] == pytest.approx(torch.tensor(2.0).log().item(), abs=1e-6)
    assert abs(record["reward_chosen_mean"]) < 1e-10 and abs(record["reward_margin"]) < 1e-10


def test_reference_log_probabilities_travel_with_the_rows() -> None:
    of = sharp_policy(torch.float64).model
    assert isinstance(of, Decoder)
    for before, after in zip(raw_pairs(), pairs(), strict=True):
        for raw, done in ((before.chosen, after.chosen), (before.rejected, after.rejected)):
            assert (raw.tokens, raw.mask) == (done.tokens, done.mask)
            assert recorded(done) == pytest.approx(log_probability(of, raw).item(), rel=1e-12)
    assert [pair.margin for pair in pairs()] == [pair.margin for pair in raw_pairs()]


def test_a_missing_reference_is_refused_and_not_taken_for_zero() -> None:
    with pytest.raises(ValueError, match="with_reference"):
        learner(model()).update(pack_pairs(raw_pairs(), dtype=torch.float64))
    learner(model(), "simpo").update(pack_pairs(raw_pairs(), dtype=torch.float64))


def test_a_reference_that_is_certain_of_everything_is_one() -> None:
    """A certain token's log-probability is 0, as it is where none is known."""
    certain = with_reference(raw_pairs(), lambda batch: torch.zeros_like(batch.behavior_logp))
    batch = pack_pairs(certain, dtype=torch.float64)
    assert not batch.behavior_logp.any() and not reference_sums(batch).any()


def test_strangers_are_the_next_other_prompts_answers_to_ones_own() -> None:
    asked = unpaired(rows())

    def prompt(sequence: Sequence) -> tuple[int, ...]:
        return sequence.tokens[: sequence.mask.index(True)]

    for i, row in enumerate(asked):
        own = rows()[i].sequence
        other = next(r.sequence for r in rows()[i + 1 :] + rows() if prompt(r.sequence) != prompt(own))
        assert row.chosen == own and row.margin == rows()[i].label
        cut, begin = own.mask.index(True), other.mask.index(True)
        assert row.rejected.tokens == own.tokens[:cut] + other.tokens[begin:]
        assert sum(row.rejected.mask) == sum(other.mask) and not any(row.rejected.mask[:cut])
    again = with_reference(asked, reference)
    for before, after in zip(asked, again, strict=True):
        assert (after.chosen.tokens, after.chosen.mask) == (before.chosen.tokens, before.chosen.mask)
        assert after.chosen.behavior_logp == pytest.approx(before.chosen.behavior_logp), "matched: scored alike"
    assert any(recorded(row.rejected) < recorded(row.chosen) - 5 for row in again), "strangers fit badly"
    with pytest.raises(ValueError, match="two rows"):
        unpaired(rows()[:1])


def test_a_stranger_answers_another_prompt() -> None:
    """Rows come in as pairs do, good and bad answers to one prompt beside each other."""
    apart = [Labelled(p.id, side, label) for p in pairs() for side, label in ((p.chosen, 1.0), (p.rejected, 0.0))]
    for i, row in enumerate(unpaired(apart)):
        answer = apart[2 * ((i // 2 + 1) % len(pairs()))].sequence
        trained = [token for token, chosen in zip(answer.tokens, answer.mask, strict=True) if chosen]
        assert [t for t, chosen in zip(row.rejected.tokens, row.rejected.mask, strict=True) if chosen] == trained
    same = unpaired(apart[:2])
    assert [row.rejected.tokens for row in same] == [apart[1].sequence.tokens, apart[0].sequence.tokens]


def test_one_side_of_every_pair() -> None:
    whole = batch()
    for which in (0, 1):
        side = one_side(whole, which)
        expected = [(pair.chosen, pair.rejected)[which].tokens for pair in pairs()]
        assert side.tokens.tolist() == [token for tokens in expected for token in tokens]
        assert torch.equal(side.reward, whole.reward) and side.traj.tolist() == list(range(len(expected)))


def test_what_a_loss_cannot_do_is_refused() -> None:
    of = model()
    for loss in ("kto", "nonsense"):
        with pytest.raises(ValueError, match="unknown pair loss"):
            PreferenceLearner(of, Scorer(of), loss=loss, beta=1.0, optim=OptimSettings(), ranks=Ranks(), budget=WHOLE)
    with pytest.raises(ValueError, match="hinge does not support label_smoothing"):
        PreferenceLearner(
            of,
            Scorer(of),
            loss="hinge",
            beta=1.0,
            optim=OptimSettings(),
            ranks=Ranks(),
            budget=WHOLE,
            options={"label_smoothing": 0.1},
        )


def test_soft_labels_are_kept_by_the_rows() -> None:
    assert {row.label for row in rows()} == {1.0, 0.0, 0.7} and isinstance(rows()[0], Labelled)


def test_what_the_reference_had_to_split_is_told_with_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, call = learner(model()), Scorer.__call__
    assert isinstance(mine, PreferenceLearner)
    of = batch()

    def small(self: Scorer, batch: Batch) -> tuple[Tensor, Tensor]:
        if batch.reward.numel() > 2:
            raise MemoryError
        return call(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Scorer, "__call__", small)
        mine.scorer.logprobs(of, Ranks(), WHOLE)
    first, second = mine.update(of), mine.update(of)
    assert first["split_micro_batches"] >= 1 and "split_micro_batches" not in second
