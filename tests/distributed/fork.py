"""Several ranks in a test: forked processes joined by gloo, in a quarter of a second and without torchrun.

A rank's result comes back through a file, since tensors sent through a queue die with the process that sent them. An
exception in a rank, or its death, fails the test at once with what the rank said.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # sharding imports it, and fsdp: once here instead of in every rank
import torch.distributed as dist
import torch.distributed.fsdp

from novarl.distributed.ranks import Ranks


def run(function: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 100.0) -> list[Any]:
    """`function(ranks, *args)` on every rank; what each returned (tensors and plain values), in rank order."""
    # Autograd cannot be forked once it has threads for an accelerator; a spawned process imports everything anew.
    context: Any = multiprocessing.get_context("spawn" if torch.accelerator.is_available() else "fork")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(target=_entry, args=(rank, world, folder, function, args), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            _watch(processes, folder, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(world)]


def _watch(processes: list[Any], folder: Path, end: float) -> None:
    """Wait for all of them; AssertionError with the first rank's words where one fails."""
    running = list(processes)
    while running:
        ended = wait([process.sentinel for process in running], timeout=max(0.0, end - time.monotonic()))
        said = [path.read_text() for path in sorted(folder.glob("error-*"))]
        assert not said, "\n".join(said)
        assert ended, f"{len(running)} ranks were still running at the time limit"
        gone = [process for process in running if process.sentinel in ended]
        for process in gone:
            process.join()
            assert process.exitcode == 0, f"rank {processes.index(process)} died with exit code {process.exitcode}"
        running = [process for process in running if process not in gone]


def _entry(rank: int, world: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        result = function(Ranks.start(torch.device("cpu")), *args)
        torch.save(result, folder / f"result-{rank}")
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
