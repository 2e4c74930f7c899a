"""Metrics with their reductions over micro-batches and ranks: each is a total and a weight."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from novarl.core.types import Record
from novarl.distributed.ranks import Ranks


class Ledger:
    """Collects metrics by name and reduces them once, to the same Record on every rank."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Clear all metrics."""
        self.totals: dict[str, float] = defaultdict(float)
        self.counts: dict[str, float] = defaultdict(float)
        self.squares: dict[str, float] = defaultdict(float)
        self.sums: dict[str, float] = defaultdict(float)
        self.largest: dict[str, float] = {}

    def mean(self, name: str, values: Tensor) -> None:
        """Report the mean over all values added under `name` (any shapes); nothing is reported without values."""
        self.totals[name] += values.detach().double().sum().item()
        self.counts[name] += values.numel()

    def moments(self, name: str, values: Tensor) -> None:
        """Report the mean of `values` as `<name>_mean` and their standard deviation (population) as `<name>_std`."""
        self.mean(f"{name}_mean", values)
        self.squares[name] += values.detach().double().square().sum().item()

    def sum(self, name: str, total: Tensor) -> None:
        """Report a sum over micro-batches and ranks: for parts of a loss with a global denominator."""
        self.sums[name] += total.detach().double().item()

    def count(self, name: str, number: int) -> None:
        """Report a count summed over ranks; zero counts are not reported."""
        if number:
            self.sums[name] += number

    def max(self, name: str, values: Tensor) -> None:
        """Report the maximum over all values added under `name`."""
        if values.numel():
            value = values.detach().double().max().item()
            self.largest[name] = max(value, self.largest.get(name, value))

    def reduce(self, ranks: Ranks) -> Record:
        """The metrics over all ranks, summed in rank order, so that every rank gets the same bits."""
        whole = Ledger()
        mine = self.totals, self.counts, self.squares, self.sums
        for added, largest in ranks.gather((mine, self.largest)):
            for total, part in zip((whole.totals, whole.counts, whole.squares, whole.sums), added, strict=True):
                for name, value in part.items():
                    total[name] += value
            for name, value in largest.items():
                whole.largest[name] = max(value, whole.largest.get(name, value))
        record: Record = {**whole.sums, **whole.largest}
        for name, count in whole.counts.items():
            if count:
                record[name] = whole.totals[name] / count
        for name, square in whole.squares.items():
            if count := whole.counts[f"{name}_mean"]:
                record[f"{name}_std"] = max(0.0, square / count - record[f"{name}_mean"] ** 2) ** 0.5
        return record
