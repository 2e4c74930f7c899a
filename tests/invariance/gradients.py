"""The gradient of one whole update, caught before the optimiser uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from novarl.algos.off_policy import truncated_weight
from novarl.algos.surrogates import ppo_clip
from novarl.core.types import Batch, Record, Scored
from novarl.data.pack import pack
from novarl.distributed.ranks import Ranks
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Objective
from novarl.learn.optim import OptimSettings
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.models.forward import Layout
from novarl.observe.glossary import deterministic
from tests.invariance.sharp import perturbed, recorded, sharp_policy

Gradients = dict[str, Tensor]
WHOLE = 10**9
"""A token budget that cuts nothing."""


@dataclass(frozen=True)
class Limits:
    """Largest relative L2 distance of two gradients: as a whole, and of any one tensor."""

    whole: float
    tensor: float


LIMITS = {torch.float32: Limits(5e-6, 2e-5), torch.float64: Limits(1e-6, 1e-6)}


@dataclass(frozen=True)
class Distance:
    whole: float
    tensor: float

    def within(self, limits: Limits) -> bool:
        return self.whole <= limits.whole and self.tensor <= limits.tensor


def measured(record: Record) -> Record:
    """A record without how many micro-batches it took, the one thing in it that budget, layout and ranks may change."""
    assert record["micro_batches"] >= 1
    return {name: value for name, value in record.items() if deterministic(name)}


def distance(mine: Gradients, theirs: Gradients) -> Distance:
    """How far `mine` is from `theirs`. Every tensor of theirs must have a gradient for it to say anything."""
    assert mine.keys() == theirs.keys()
    norms = {name: float(value.double().norm()) for name, value in theirs.items()}
    dead = [name for name, norm in norms.items() if norm == 0.0]
    assert not dead, f"no gradient reached {dead}"
    errors = {name: float((mine[name].double() - theirs[name].double()).norm()) for name in theirs}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    return Distance(
        whole=sum(error**2 for error in errors.values()) ** 0.5 / total,
        tensor=max(errors[name] / norms[name] for name in theirs),
    )


@dataclass(frozen=True)
class Case:
    """An update in the middle of a rollout: `model` has moved away from `old`, which sampled, and from `reference`; so
    ratios, clips, corrections, KL and entropy all take part."""

    model: nn.Module
    old: nn.Module
    reference: nn.Module
    batch: Batch
    aggregation: str = "token"
    dtype: torch.dtype = torch.float32


def two_in_one(scored: Seq[Scored]) -> list[Scored]:
    """The rollouts, with the first two of each group told as one trajectory of two sequences."""
    found: list[Scored] = []
    for item in scored:
        previous = found[-1].rollout if found else None
        if previous and previous.group == item.rollout.group and item.rollout.index == 1:
            joined = replace(previous, sequences=previous.sequences + item.rollout.sequences)
            found[-1] = replace(found[-1], rollout=joined)
        else:
            found.append(item)
    return found


def make_case(model: nn.Module, scored: Seq[Scored], dtype: torch.dtype, aggregation: str = "token") -> Case:
    """The case of a model and what it has sampled."""
    return Case(
        model=perturbed(model, 0.15),
        old=model,
        reference=perturbed(model, 0.1, seed=1),
        batch=pack(two_in_one(scored), dtype=dtype),
        aggregation=aggregation,
        dtype=dtype,
    )


def sharp_case(dtype: torch.dtype, aggregation: str = "token") -> Case:
    return make_case(sharp_policy(dtype).model, recorded(), dtype, aggregation)


def objective(aggregation: str) -> Objective:
    """Everything on at once."""
    return Objective(
        surrogate=partial(ppo_clip, clip_low=0.2, clip_high=0.28),
        aggregation=aggregation,
        constant=16.0,
        kl_loss_coef=0.1,
        kl_estimator="k3",
        entropy_coef=0.01,
        correction=partial(truncated_weight, maximum=2.0),
    )


def make_learner(
    case: Case,
    *,
    budget: int = WHOLE,
    layout: Layout = "auto",
    ranks: Ranks | None = None,
    kind: type[PolicyLearner] = PolicyLearner,
) -> PolicyLearner:
    scorer = Scorer(case.model, temperature=0.9, chunk=50, layout=layout, compute_dtype=case.dtype)
    return kind(
        case.model,
        scorer,
        objective=objective(case.aggregation),
        optim=OptimSettings(max_grad_norm=0.0),
        ranks=ranks or Ranks(),
        budget=budget,
        reference=replace(scorer, model=case.reference),
        needs_old_logp=True,
    )


@contextmanager
def weights_of(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """`model` with the weights of `other`, for a while."""
    own = [parameter.detach().clone() for parameter in model.parameters()]
    _copy(model, list(other.parameters()))
    yield
    _copy(model, own)


@torch.no_grad()
def _copy(model: nn.Module, values: Seq[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


def gradient(
    case: Case,
    *,
    budget: int = WHOLE,
    layout: Layout = "auto",
    ranks: Ranks | None = None,
    kind: type[PolicyLearner] = PolicyLearner,
    spoil: Callable[[Batch], Batch] = lambda batch: batch,
) -> Gradients:
    """The gradient of the whole update by name; the weights stay. `spoil` plants a fault in the batch."""
    learner, batch = make_learner(case, budget=budget, layout=layout, ranks=ranks, kind=kind), spoil(case.batch)
    with weights_of(case.model, case.old):
        scores = learner.score(batch)
    credit, _, _ = CreditRule("group", {"norm_std": True})(batch, scores, None)
    assert bool((credit.advantage[batch.mask] != 0).any())
    caught: Gradients = {}

    def catch() -> tuple[float, float]:
        learner.optimizer.gradients()
        for name, parameter in learner.optimizer.parameters.items():
            assert parameter.grad is not None
            caught[name] = parameter.grad.clone()
            parameter.grad = None
        return 0.0, 0.0

    learner.optimizer.step = catch  # type: ignore[method-assign]
    record = learner.update(batch, scores, credit)
    assert 0.0 < record["clip_fraction"] < 0.5, f"clipping takes no part: {record}"
    return caught
