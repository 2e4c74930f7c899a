"""The device of each process, on a machine whose accelerators are made up; and memory that is kept."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from novarl.core.errors import NovaError
from novarl.run.machine import keep_freed_memory, pick_device, start


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Four CUDA devices; the ones that a process made its own."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch,
        "accelerator",
        SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: torch.device("cuda")),
    )
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return chosen


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_process_under_torchrun_takes_its_own_card(
    cards: list[torch.device], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    with torch.random.fork_rng(devices=[]):
        for rank in range(4):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            assert start(device, 1, 0)[0] == torch.device("cuda", rank)
    assert cards == [torch.device("cuda", rank) for rank in range(4)]


def test_more_processes_than_cards_are_refused(cards: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(NovaError, match=r"device=cuda:4: this machine has 4 CUDA devices \(start at most 4 processes"):
        pick_device("auto")


def test_without_torchrun_the_current_card_stays(cards: list[torch.device]) -> None:
    with torch.random.fork_rng(devices=[]):
        assert start("auto", 1, 0)[0] == torch.device("cuda")
        assert not cards
        assert start("cuda:2", 1, 0)[0] == torch.device("cuda", 2)
    assert cards == [torch.device("cuda", 2)]


def test_a_run_on_the_cpu_asks_for_no_card(cards: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with torch.random.fork_rng(devices=[]):
        assert start("cpu", 1, 0)[0] == torch.device("cpu")
    assert not cards


def test_freed_memory_is_kept_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """What page faults follow hangs on the layout of the heap, so what is asked of the library is what is held here."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=lambda *given: asked.append(given)))
    keep_freed_memory()
    assert asked == [(-3, 32 * 2**20), (-1, 2**31 - 1)]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    keep_freed_memory()
    assert len(asked) == 2


def test_the_smallest_numbers_are_zero_in_every_thread_of_a_run() -> None:
    """In a process of its own: threads that are there already keep what they were told."""
    multiply = "x = torch.full((1 << 20,), 1e-20); print(int((x * 1e-20).count_nonzero()))"
    ours = "from novarl.run.machine import start; start('cpu', 2, 0)"
    for settled, left in ((ours, 0), ("torch.set_num_threads(2)", 1 << 20)):
        command = [sys.executable, "-c", f"import torch; {settled}; {multiply}"]
        assert int(subprocess.run(command, check=True, capture_output=True, timeout=120).stdout) == left
