"""Evaluate rewards on held-out rows: as a ranking, as decisions and as probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from novarl.algos import calibration
from novarl.core.types import Batch
from novarl.data.pairs import Labelled, Pair, pack_labelled, pack_pairs
from novarl.loops.evaluate import Evaluation, wilson

BINS = 10
"""Probability bins of the calibration error and the reliability diagram."""


@dataclass(frozen=True, slots=True)
class RewardEvaluation(Evaluation):
    """`score` is the accuracy, with Wilson's interval; `auroc` compares the rewards of good and bad answers. `ece` and
    `brier` are of sigma(reward) as the probability that a labelled answer is good, and for a pair of sigma(r_chosen -
    r_rejected). `bins` hold the number of rows, their mean probability and the fraction of good ones; `rewards` are
    those of all sides."""

    auroc: float = math.nan
    ece: float = math.nan
    brier: float = math.nan
    bins: tuple[tuple[int, float, float], ...] = ()
    rewards: tuple[float, ...] = ()

    def measures(self) -> dict[str, float]:
        found = {"auroc": self.auroc, "ece": self.ece, "brier": self.brier}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def summary(self) -> dict[str, object]:
        return Evaluation.summary(self) | self.measures()


def evaluate_rewards(
    rows: Sequence[Pair | Labelled], rewards: Callable[[Batch], Tensor], *, batch_size: int = 64
) -> RewardEvaluation:
    """Score held-out pairs or labelled answers with `rewards`, which returns one number per sequence of a batch [S]. A
    pair is right if the chosen side has the higher reward, a labelled answer by the sign; an exact tie counts half."""
    found: list[Tensor] = []
    labels: list[float] = []
    for begin in range(0, len(rows), batch_size):
        part = rows[begin : begin + batch_size]
        pairs = [row for row in part if isinstance(row, Pair)]
        answers = [row for row in part if isinstance(row, Labelled)]
        found.append(rewards(pack_pairs(pairs) if pairs else pack_labelled(answers)).double())
        labels += [1.0, 0.0] * len(pairs) + [row.label for row in answers]
    reward, label = torch.cat(found), torch.tensor(labels, dtype=torch.float64)
    auroc = calibration.auroc(reward, label).item()
    paired = isinstance(rows[0], Pair)
    decided = reward[0::2] - reward[1::2] if paired else torch.where(label > 0.5, reward, -reward)
    probability, truth = torch.sigmoid(decided if paired else reward), label
    if paired:  # each pair in both orders, so that the order does not matter
        probability = torch.cat([probability, 1.0 - probability])
        truth = torch.cat([torch.ones_like(decided), torch.zeros_like(decided)])
    correct = (decided > 0).double() + 0.5 * (decided == 0).double()
    right = correct.sum().item()
    table = calibration.reliability(probability, truth, bins=BINS)
    columns = zip(table.rows.tolist(), table.confidence.tolist(), table.frequency.tolist(), strict=True)
    return RewardEvaluation(
        score=right / len(decided),
        interval=wilson(right, len(decided)),
        n=len(decided),
        pass_at={},
        failed=0,
        rows=(),
        scores=tuple(zip([row.id for row in rows], correct.tolist(), strict=True)),
        auroc=auroc,
        ece=calibration.ece(probability, truth, bins=BINS).item(),
        brier=calibration.brier(probability, truth).item(),
        bins=tuple(columns),
        rewards=tuple(reward.tolist()),
    )
