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
        self.means: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self.squares: dict[str, float] = defaultdict(float)
        self.sums: dict[str, float] = defaultdict(float)
        self.largest: dict[str, float] = {}

    def mean(self, name: str, values: Tensor) -> None:
        """Report the mean over all values added under `name` (any shapes); nothing is reported without values."""
        total, count = self.means[name]
        self.means[name] = (total + values.detach().double().sum().item(), count + values.numel())

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
        for means, squares, sums, largest in ranks.gather(
            (dict(self.means), dict(self.squares), dict(self.sums), self.largest)
        ):
            for name, (total, count) in means.items():
                before = whole.means[name]
                whole.means[name] = (before[0] + total, before[1] + count)
            for name, total in squares.items():
                whole.squares[name] += total
            for name, total in sums.items():
                whole.sums[name] += total
            for name, value in largest.items():
                whole.largest[name] = max(value, whole.largest.get(name, value))
        record: Record = {**whole.sums, **whole.largest}
        for name, (total, count) in whole.means.items():
            if count:
                record[name] = total / count
        for name, square in whole.squares.items():
            count = whole.means[f"{name}_mean"][1]
            if count:
                record[f"{name}_std"] = max(0.0, square / count - record[f"{name}_mean"] ** 2) ** 0.5
        return record
