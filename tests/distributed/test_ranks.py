"""What ranks say to each other, by hand-made numbers; and that one process is the identity."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from novarl.distributed.ranks import Ranks
from novarl.learn.ledger import Ledger
from tests.distributed.fork import run


def test_one_process_is_the_identity() -> None:
    ranks = Ranks.start(torch.device("cpu"))
    assert (ranks.rank, ranks.size) == (0, 1)
    total = torch.tensor([1.0, 2.0])
    ranks.sum_(total)
    assert total.tolist() == [1.0, 2.0]
    assert ranks.gather("a") == ["a"] and ranks.from_first(3) == 3 and ranks.share([1, 2, 3]) == [1, 2, 3]
    ranks.wait()
    ranks.stop()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 12])
def test_shares_are_disjoint_and_their_union_is_everything(size: int, count: int) -> None:
    shares = [Ranks(rank, size).share(range(count)) for rank in range(size)]
    assert sorted(item for share in shares for item in share) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def talk(ranks: Ranks) -> dict[str, Any]:
    r = ranks.rank
    floats, matrix = torch.tensor([1.0 + r, 10.0]), torch.full((2, 2), float(r))
    double, count = torch.tensor([0.1 * (r + 1)], dtype=torch.float64), torch.tensor([r, 5])
    strided = torch.zeros(2, 3).T
    strided += r + 1
    ranks.sum_(floats, matrix, double, count, strided)
    ranks.wait()
    return {
        "sums": [floats.tolist(), matrix.tolist(), double.item(), count.tolist(), strided.tolist()],
        "gathered": ranks.gather({"rank": r}),
        "first": ranks.from_first(f"said by {r}"),
        "mine": ranks.share(list("abcde")),
    }


def test_collectives() -> None:
    first, second = run(talk)
    assert first["sums"] == second["sums"]
    floats, matrix, double, count, strided = first["sums"]
    assert floats == [3.0, 20.0] and matrix == [[1.0, 1.0], [1.0, 1.0]] and count == [1, 10]
    assert double == pytest.approx(0.3, abs=1e-15) and strided == [[3.0, 3.0]] * 3
    assert first["gathered"] == second["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert first["first"] == second["first"] == "said by 0"
    assert (first["mine"], second["mine"]) == (list("ace"), list("bd"))


VALUES = torch.tensor([1.0, 2.0, 4.0, 9.0, -3.0, 0.5])


def report(ranks: Ranks, cut: int) -> dict[str, float]:
    """Each rank adds its part, and rank 1 alone adds a metric of its own."""
    part = VALUES.split([cut, len(VALUES) - cut])[ranks.rank]
    ledger = Ledger()
    ledger.mean("entropy", part)
    ledger.moments("kl", part)
    ledger.sum("loss", part.sum())
    ledger.max("ratio_max", part)
    if ranks.rank == 1:
        ledger.mean("correction_mean", part)
    return ledger.reduce(ranks)


@pytest.mark.parametrize("cut", [0, 1, 3])
def test_metrics_are_reduced_by_their_own_rule(cut: int) -> None:
    """A mean is not the mean of the ranks' means, nor a deviation that of their deviations."""
    first, second = run(report, cut)
    assert first == second
    assert first["entropy"] == first["kl_mean"] == pytest.approx(13.5 / 6)
    assert first["kl_std"] == pytest.approx(VALUES.double().std(unbiased=False).item())
    assert first["loss"] == 13.5 and first["ratio_max"] == 9.0
    assert first["correction_mean"] == pytest.approx(VALUES[cut:].double().mean().item())


def stumble(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError("this rank has had enough")
    ranks.wait()


def test_the_launcher_says_what_a_rank_said() -> None:
    with pytest.raises(AssertionError, match=r"rank 1:(.|\n)*this rank has had enough"):
        run(stumble)
