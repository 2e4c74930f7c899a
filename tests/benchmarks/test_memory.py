"""Where `make bench WORKLOAD=memory` lets memory run out, and how it measures a gradient. Nothing runs out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import memory
from benchmarks.memory import Shortage, distance
from novarl.learn import accumulate
from novarl.run import machine


def begin(monkeypatch: pytest.MonkeyPatch, shortage: Shortage, micro: list[list[int]]) -> list[tuple[int, str]]:
    """The micro-batches and stages at which a limit is set, in a pass over `micro` in which nothing fails."""
    seen: list[tuple[int, str]] = []

    class Limits:
        RLIMIT_AS, RLIM_INFINITY = 0, -1
        getpagesize = staticmethod(lambda: 1)

        @staticmethod
        def setrlimit(_: int, limits: tuple[int, int]) -> None:
            if limits[0] != -1:
                seen.append((shortage.begun - 1, shortage.stage))

    monkeypatch.setattr(memory, "resource", Limits)
    monkeypatch.setattr(accumulate, "piece", lambda *_: None)
    batch: Any = None
    with shortage:
        for trajectories in micro:
            accumulate.piece(batch, trajectories, torch.device("cpu"))
            torch.ones((), requires_grad=True).backward()
    return seen


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_memory_runs_out_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    micro = [[0, 1], [2], [3, 4]]
    assert begin(monkeypatch, Shortage(stage, 1), micro) == [(1, stage)]
    assert begin(monkeypatch, Shortage(stage), micro) == [(0, stage), (2, stage)], "what cannot be split is spared"
    assert begin(monkeypatch, Shortage(), micro) == []


def test_everything_is_put_back() -> None:
    before = accumulate.piece, torch.Tensor.backward, machine.keep_freed_memory
    with Shortage("forward", 0):
        assert before != (accumulate.piece, torch.Tensor.backward, machine.keep_freed_memory)
    assert before == (accumulate.piece, torch.Tensor.backward, machine.keep_freed_memory)


def test_distance_is_that_of_the_whole_gradient() -> None:
    whole = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    assert distance(whole, whole) == 0.0
    assert distance([torch.tensor([3.0]), torch.tensor([0.5, 4.0])], whole) == pytest.approx(0.1)
