"""Preference learning: from pairs of answers (DPO and related losses) or from answers labelled good or bad (KTO).

Batches have trajectories of two sequences (`data.pairs.pack_pairs`). The reference is the initial model: its
log-probabilities are computed once, by `with_reference`, and stored with the rows in `behavior_logp`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from novarl.algos import preference_losses as preference
from novarl.core.types import Batch, Record, Sequence
from novarl.data.pack import pack_sequences, padded, select
from novarl.data.pairs import Labelled, Pair
from novarl.distributed.ranks import Ranks
from novarl.learn.optim import OptimSettings
from novarl.learn.scorer import Scorer
from novarl.learn.supervised import OfflineLearner

Row = TypeVar("Row", Pair, Labelled)

SLAB = 1024
"""Sequences per batch when computing reference log-probabilities."""


class PreferenceLearner(OfflineLearner):
    """Trains on pairs with any loss of `algos.preference_losses.LOSSES` except kto, whose reference point needs answers
    to other prompts: its pairs become rows for `KTOLearner`. `options` are keywords of the loss."""

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        *,
        loss: str,
        beta: float,
        optim: OptimSettings,
        ranks: Ranks,
        budget: int,
        options: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(model, scorer, optim=optim, ranks=ranks, budget=budget)
        if loss not in preference.LOSSES or loss == "kto":
            raise ValueError(f"unknown pair loss '{loss}'")
        self.scorer, self.beta = scorer, beta
        self.loss, self.options = preference.LOSSES[loss], dict(options or {})
        if unknown := sorted(self.options.keys() - self.loss.options):
            raise ValueError(f"{loss} does not support {', '.join(unknown)}")

    def losses(self, part: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        logp = answer_sums(part, self.scorer(part)[0])
        ref = reference_sums(part) if self.loss.reference else torch.zeros_like(logp)
        options: dict[str, Any] = dict(self.options)
        length = answer_sums(part, part.mask.to(logp.dtype))
        if self.loss.lengths:
            options |= {"chosen_length": length[0::2], "rejected_length": length[1::2]}
        chosen, rejected = logp[0::2], logp[1::2]
        losses = self.loss.function(chosen, rejected, ref[0::2], ref[1::2], beta=self.beta, **options)
        # Without a reference the reward is the mean log-probability per token.
        value = logp if self.loss.reference else logp / length
        rewards = preference.implicit_rewards(value, ref, beta=self.beta)
        return losses, {
            **pair_metrics(rewards[0::2], rewards[1::2]),
            "chosen_logp_mean": chosen,
            "rejected_logp_mean": rejected,
        }


class KTOLearner(OfflineLearner):
    """Trains on rows of `unpaired` with `algos.preference_losses.kto_unpaired`; the reference point is per batch."""

    def __init__(
        self,
        model: nn.Module,
        scorer: Scorer,
        *,
        beta: float,
        optim: OptimSettings,
        ranks: Ranks,
        budget: int,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
    ) -> None:
        super().__init__(model, scorer, optim=optim, ranks=ranks, budget=budget)
        self.scorer, self.beta = scorer, beta
        self.weights = {"desirable_weight": desirable_weight, "undesirable_weight": undesirable_weight}
        self.point = torch.zeros(())

    def update(self, batch: Batch) -> Record:
        """Two passes: over the unrelated answers without gradients, for the reference point, then over the answers."""
        strangers = one_side(batch, 1)
        logp = answer_sums(strangers, self.scorer.logprobs(strangers, self.ranks, self.budget))
        self.point = preference.kto_point(logp, reference_sums(strangers)).to(self.accumulator.scorer.device)
        record = super().update(one_side(batch, 0))
        return record | {"kto_point": self.point.item(), "tokens": float(batch.tokens.numel())}

    def losses(self, part: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
        logp, ref = answer_sums(part, self.scorer(part)[0]), reference_sums(part)
        losses = preference.kto_unpaired(logp, ref, part.reward, self.point, beta=self.beta, **self.weights)
        rewards, good = preference.implicit_rewards(logp, ref, beta=self.beta), part.reward > 0.5
        return losses, {
            "reward_chosen_mean": rewards[good],
            "reward_rejected_mean": rewards[~good],
            "chosen_logp_mean": logp[good],
            "rejected_logp_mean": logp[~good],
        }


def answer_sums(batch: Batch, per_token: Tensor) -> Tensor:
    """Per sequence [S]: the sum of a per-token column [N] over the mask."""
    return padded(per_token * batch.mask, batch.cu_seqlens, 0.0).sum(1)


def reference_sums(batch: Batch) -> Tensor:
    """log pi_ref of each sequence's answer [S], as recorded by `with_reference`. Raises ValueError if not recorded."""
    check_reference(batch)
    return answer_sums(batch, batch.behavior_logp)


def check_reference(batch: Batch) -> None:
    """Raise ValueError if no reference is recorded: zeros would mean a reference with probability 1 everywhere."""
    recorded = batch.version[batch.mask] >= 0
    if len(recorded) and not bool(recorded.any()):
        raise ValueError("the batch has no reference log-probabilities: apply with_reference to its rows")


def pair_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Metrics of the rewards [pairs] of chosen and rejected answers."""
    return {
        "preference_accuracy": preference.preferred(chosen, rejected),
        "reward_margin": preference.margins(chosen, rejected),
        "reward_chosen_mean": chosen,
        "reward_rejected_mean": rejected,
    }


def sequences_apart(batch: Batch) -> Batch:
    """The same tokens, with every sequence as its own trajectory."""
    return replace(
        batch,
        traj=torch.arange(batch.traj.numel(), device=batch.traj.device),
        group=batch.group[batch.traj],
        reward=batch.reward[batch.traj],
        rewards=batch.rewards[batch.traj],
        truncated=batch.truncated[batch.traj],
        baseline=batch.baseline[batch.traj],
    )


def one_side(batch: Batch, which: int) -> Batch:
    """The first (0) or second (1) sequence of every two-sequence trajectory, as its own trajectory."""
    return select(sequences_apart(batch), range(which, batch.traj.numel(), 2))[0]


def unpaired(rows: Seq[Labelled]) -> list[Pair]:
    """Rows for `KTOLearner`: each labelled answer as `chosen`, its label as `margin`, and as `rejected` an unrelated
    answer: this row's prompt with the answer of the next row that has another prompt (cyclic; if all rows share one
    prompt, of the next row). They are chosen once for the dataset, so that their reference log-probabilities are also
    computed once. Raises ValueError for a single row."""
    if len(rows) < 2:
        raise ValueError("KTO needs at least two rows: its reference point is estimated on the answers of other rows")
    prompts = [row.sequence.tokens[: row.sequence.mask.index(True)] for row in rows]
    following: list[int | None] = [None] * len(rows)
    for index in reversed(range(2 * len(rows))):  # two cycles, because the search wraps around
        here, after = index % len(rows), (index + 1) % len(rows)
        following[here] = following[after] if prompts[here] == prompts[after] else after
    other = [after if after is not None else (here + 1) % len(rows) for here, after in enumerate(following)]
    return [
        Pair(row.id, row.sequence, _unrelated(row.sequence, rows[after].sequence), row.label)
        for row, after in zip(rows, other, strict=True)
    ]


def _unrelated(own: Sequence, other: Sequence) -> Sequence:
    """The answer of `other`, from its first trained token on, after the prompt of `own`."""
    cut, begin = own.mask.index(True), other.mask.index(True)
    return Sequence(
        own.tokens[:cut] + other.tokens[begin:],
        own.mask[:cut] + other.mask[begin:],
        own.behavior_logp[:cut] + other.behavior_logp[begin:],
        own.kept_logmass[:cut] + other.kept_logmass[begin:],
        own.versions[:cut] + other.versions[begin:],
    )


def with_reference(rows: Seq[Row], logprobs: Callable[[Batch], Tensor]) -> list[Row]:
    """The rows with the reference log-probability of every trained token in `behavior_logp`. `logprobs` computes them
    for a batch [N], with the initial weights."""
    sides = [side for row in rows for side in _sides(row)]
    recorded: list[Sequence] = []
    for start in range(0, len(sides), SLAB):
        slab = sides[start : start + SLAB]
        batch = pack_sequences(slab)
        columns = logprobs(batch).cpu().split(batch.cu_seqlens.diff().tolist())
        recorded += [_recorded(side, column) for side, column in zip(slab, columns, strict=True)]
    done = iter(recorded)
    return [_with_sides(row, [next(done) for _ in _sides(row)]) for row in rows]


def _recorded(side: Sequence, logp: Tensor) -> Sequence:
    """Trained tokens get version 0, the initial weights, because a log-probability of 0 could mean unknown."""
    versions = tuple(0 if trained else version for trained, version in zip(side.mask, side.versions, strict=True))
    return replace(side, behavior_logp=tuple(logp.tolist()), versions=versions)


def _sides(row: Pair | Labelled) -> tuple[Sequence, ...]:
    return (row.chosen, row.rejected) if isinstance(row, Pair) else (row.sequence,)


def _with_sides(row: Row, sides: list[Sequence]) -> Row:
    if isinstance(row, Pair):
        return replace(row, chosen=sides[0], rejected=sides[1])
    return replace(row, sequence=sides[0])
