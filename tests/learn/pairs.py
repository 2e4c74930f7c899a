"""Pairs and labelled answers for a small model that has learnt something, and the gradient of an update on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from novarl.core.types import Batch, Record, Sequence
from novarl.data.pairs import Labelled, Pair
from novarl.distributed.ranks import Ranks
from novarl.learn.preference import with_reference
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import OfflineLearner
from novarl.models.transformer import Decoder
from tests.invariance.gradients import Gradients
from tests.invariance.sharp import lessons, perturbed, sharp_policy

WHOLE = 10**9


def model(dtype: torch.dtype = torch.float64) -> Decoder:
    """Trained, and moved away from the reference."""
    trained = sharp_policy(dtype).model
    assert isinstance(trained, Decoder)
    return perturbed(trained, 0.1)


@cache
def raw_pairs() -> tuple[Pair, ...]:
    """Six pairs of answers of different lengths, half of them with a margin."""
    answers = lessons()
    return tuple(Pair(str(i), answers[3 * i], answers[3 * i + 1 + i % 2], 0.3 * i if i % 2 else None) for i in range(6))


@cache
def raw_rows() -> tuple[Labelled, ...]:
    """Nine answers: good, bad, and undecided."""
    return tuple(Labelled(str(i), answer, (1.0, 0.0, 0.7)[i % 3]) for i, answer in enumerate(lessons()[::2]))


def reference(batch: Batch) -> Tensor:
    """The trained model's log-probabilities."""
    return Scorer(sharp_policy(torch.float64).model).logprobs(batch, Ranks(), WHOLE)


@cache
def pairs() -> tuple[Pair, ...]:
    return tuple(with_reference(raw_pairs(), reference))


@cache
def rows() -> tuple[Labelled, ...]:
    return tuple(with_reference(raw_rows(), reference))


def log_probability(of: nn.Module, sequence: Sequence) -> Tensor:
    """log pi of a sequence's trained tokens, summed: one forward pass, a softmax over all logits."""
    ids = torch.tensor([sequence.tokens])
    hidden = of(ids, position_ids=torch.arange(ids.numel())[None]).last_hidden_state[0, :-1]
    logp = of.lm_head(hidden).log_softmax(-1)  # type: ignore[operator]
    chosen = logp.gather(-1, ids[0, 1:, None])[:, 0]
    return chosen[torch.tensor(sequence.mask[1:])].sum()


def recorded(sequence: Sequence) -> float:
    """log ref of a sequence's trained tokens, summed."""
    return sum(value for value, chosen in zip(sequence.behavior_logp, sequence.mask, strict=True) if chosen)


def caught(learner: OfflineLearner, batch: Batch) -> tuple[Gradients, Record]:
    """The gradient of an update and its record; the weights stay."""
    found: Gradients = {}

    def catch() -> tuple[float, float]:
        for name, parameter in learner.optimizer.parameters.items():
            assert parameter.grad is not None
            found[name], parameter.grad = parameter.grad, None
        return 1.5, 0.1

    learner.optimizer.step = catch  # type: ignore[method-assign]
    return found, learner.update(batch)


def gradients(loss: Tensor, of: nn.Module) -> Gradients:
    """By name, zeros where the loss does not depend on a parameter."""
    names, parameters = zip(*of.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def shifted(batch: Batch) -> Batch:
    """Every token predicted by itself."""
    return replace(batch, prev=torch.where(batch.prev < 0, batch.prev, batch.prev + 1))


def wider(batch: Batch) -> Batch:
    """Prompts are trained on, too."""
    return replace(batch, mask=batch.position_ids > 0)


def exchanged(batch: Batch) -> Batch:
    """The reference's log-probabilities one token late."""
    return replace(batch, behavior_logp=batch.behavior_logp.roll(1))
