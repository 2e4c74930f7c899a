"""Supervised fine-tuning against PyTorch's own cross-entropy, however the batch is cut."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from novarl.core.types import Batch, Record, Sequence
from novarl.data.pack import pack_sequences
from novarl.data.render import render_sft
from novarl.distributed.ranks import Ranks
from novarl.kernels.accumulation import total_of
from novarl.learn.optim import OptimSettings
from novarl.learn.plan import plan
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import SupervisedLearner
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import Layout
from novarl.models.transformer import Decoder
from novarl.observe.glossary import lookup
from tests.invariance.gradients import LIMITS, Gradients, distance, measured
from tests.invariance.sharp import lessons, perturbed, sharp_policy

LR = 1e-3


def two_turns() -> Sequence:
    """A conversation with loss on both answers and nothing else."""
    chat = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    ((tokens, mask),) = render_sft(ByteTokenizer(), chat)
    assert sum(mask) == 4, "two letters, two ends"
    none = (0.0,) * len(tokens)
    return Sequence(tokens, mask, none, none, (-1,) * len(tokens))


def batch(dtype: torch.dtype) -> Batch:
    return pack_sequences([*lessons()[::2], two_turns()], dtype=dtype)


def model(dtype: torch.dtype) -> Decoder:
    """Trained, and moved off its optimum, where gradients would be mere noise."""
    trained = sharp_policy(dtype).model
    assert isinstance(trained, Decoder)
    return perturbed(trained, 0.1)


def learner(
    of: Decoder, *, budget: int = 10**9, layout: Layout = "auto", ranks: Ranks | None = None
) -> SupervisedLearner:
    scorer = Scorer(of, chunk=50, layout=layout)
    return SupervisedLearner(of, scorer, optim=OptimSettings(lr=LR), ranks=ranks or Ranks(), budget=budget)


def by_hand(of: Decoder, whole: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(cross-entropy over the masked tokens of the batch, mean entropy of their distributions, the share of them that
    are the likeliest)."""
    losses, entropies, right = [], [], []
    for begin, end in pairwise(whole.cu_seqlens.tolist()):
        row = whole.tokens[None, begin:end]
        logits = of.lm_head(of(row, position_ids=torch.arange(end - begin)[None]).last_hidden_state)[0, :-1]
        chosen = whole.mask[begin + 1 : end]
        losses.append(torch.nn.functional.cross_entropy(logits[chosen], row[0, 1:][chosen], reduction="none"))
        entropies.append(torch.distributions.Categorical(logits=logits[chosen]).entropy())
        right.append((logits[chosen].argmax(-1) == row[0, 1:][chosen]).to(logits.dtype))
    return torch.cat(losses).mean(), torch.cat(entropies).mean(), torch.cat(right).mean()


def caught(update: SupervisedLearner, whole: Batch) -> tuple[Gradients, Record]:
    """The gradient of an update and its record; the weights stay."""
    found: Gradients = {}

    def catch() -> tuple[float, float]:
        for name, parameter in update.optimizer.parameters.items():
            assert parameter.grad is not None
            found[name], parameter.grad = parameter.grad, None
        return 1.5, LR

    update.optimizer.step = catch  # type: ignore[method-assign]
    return found, update.update(whole)


def test_loss_and_gradient_are_those_of_cross_entropy() -> None:
    of, whole = model(torch.float64), batch(torch.float64)
    loss, entropy, right = by_hand(of, whole)
    assert 0.2 < right < 0.99, "some tokens are the likeliest ones, and some are not"
    names = [name for name, _ in of.named_parameters()]
    expected = dict(zip(names, torch.autograd.grad(loss, list(of.parameters())), strict=True))
    found, record = caught(learner(of, budget=60), whole)
    assert distance(found, expected).tensor < 1e-12
    assert record == {
        "loss": pytest.approx(loss.item(), rel=1e-12),
        "entropy": pytest.approx(entropy.item(), rel=1e-12),
        "accuracy": pytest.approx(right.item(), rel=1e-12),
        "perplexity": pytest.approx(math.exp(loss.item()), rel=1e-12),
        "grad_norm": 1.5,
        "lr": LR,
        "tokens": float(whole.tokens.numel()),
        "micro_batches": len(plan(whole, Ranks(), 60)),
    }
    assert all(lookup(name) for name in record)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_neither_budget_nor_layout_matters(dtype: torch.dtype) -> None:
    of, whole = model(dtype), batch(dtype)
    expected, record = caught(learner(of), whole)
    assert record["micro_batches"] == 1
    for budget in (1, 40, 100):
        for layout in ("packed", "padded"):
            found, told = caught(learner(of, budget=budget, layout=layout), whole)
            assert distance(found, expected).within(LIMITS[dtype]), (budget, layout, distance(found, expected))
            assert told["micro_batches"] == len(plan(whole, Ranks(), budget, shares=False))
            assert measured(told) == pytest.approx(measured(record), rel=1e-5)


def test_a_mean_of_micro_batch_means_is_caught() -> None:
    """What would come of dividing by each micro-batch's own tokens."""
    of, whole = model(torch.float64), batch(torch.float64)
    expected, _ = caught(learner(of), whole)
    rows = [*lessons()[::2], two_turns()]
    parts = [caught(learner(of), pack_sequences([row], dtype=torch.float64))[0] for row in rows]
    mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in expected}
    assert distance(mean, expected).whole > 0.01


def test_prompts_are_not_learnt() -> None:
    """Another mask is another gradient: on the prompts, or without the ends of answers."""
    of, whole = model(torch.float64), batch(torch.float64)
    expected, _ = caught(learner(of), whole)
    for mask in (whole.position_ids > 0, whole.mask & (whole.tokens != ByteTokenizer.eos_token_id)):
        assert distance(caught(learner(of), replace(whole, mask=mask))[0], expected).whole > 0.01


def test_it_learns() -> None:
    of, whole = model(torch.float32), batch(torch.float32)
    update = learner(of, budget=100)
    records = [update.update(whole) for _ in range(10)]
    losses = [record["loss"] for record in records]
    assert losses[-1] < losses[0] - 0.05 and losses[0] == pytest.approx(by_hand(model(torch.float32), whole)[0].item())
    assert all(record["lr"] == LR and record["grad_norm"] > 0 for record in records)


def test_state_survives_and_the_next_update_is_the_same() -> None:
    whole = batch(torch.float32)
    of = model(torch.float32)
    update = learner(of)
    for _ in range(3):
        update.update(whole)
    again = learner(perturbed(of, 0.0))
    again.load_state_dict(deepcopy(update.state_dict()))
    assert update.update(whole) == again.update(whole)
    for one, two in zip(of.parameters(), again.scorer.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_rows_without_a_trained_token_are_no_work() -> None:
    of, whole = model(torch.float32), batch(torch.float32)
    before = [parameter.detach().clone() for parameter in of.parameters()]
    record = learner(of).update(replace(whole, mask=torch.zeros_like(whole.mask)))
    assert record["grad_norm"] == 0.0 and "loss" not in record
    assert all(torch.equal(one, two) for one, two in zip(before, of.parameters(), strict=True))


def test_the_vocabularys_gradient_is_added_where_it_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each micro-batch, and nowhere else: `torch.autograd.grad` finds gradients before and after."""
    mine = learner(model(torch.float64), budget=60)
    weight = mine.optimizer.parameters["model.embed_tokens.weight"]
    seen: list[bool] = []
    losses = SupervisedLearner.losses
    monkeypatch.setattr(
        SupervisedLearner, "losses", lambda *given: (seen.append(total_of(weight) is not None), losses(*given))[1]
    )
    assert total_of(weight) is None
    mine.update(batch(torch.float64))
    assert len(seen) > 1 and all(seen) and total_of(weight) is None
