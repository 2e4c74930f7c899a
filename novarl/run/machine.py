"""Threads, memory, device and processes of a run."""

from __future__ import annotations

import ctypes
import os

import torch

from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.distributed.ranks import Ranks

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers for what `mallopt` sets: free bytes at the end of the heap that go back to the system, and from what
size on a block is the system's own."""

MAPPED = 32 << 20
"""Bytes: what glibc raises the second number to by itself, at most."""


def start(device: str, threads: int | None, seed: int) -> tuple[torch.device, Ranks]:
    """Settle the device, the number of threads and torch's own generator; join torchrun's other processes, if any."""
    keep_freed_memory()
    flush_denormals()
    torch.manual_seed(derive(seed, "torch"))
    torch.set_num_threads(threads or int(os.environ.get("OMP_NUM_THREADS", "2")))
    chosen = pick_device(device)
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)  # what names no index (streams, NCCL, other libraries) means this rank's own too
    ranks = Ranks.start(chosen)
    return chosen, ranks


def flush_denormals() -> None:
    """Take numbers below 1.2e-38, the least that a float32 holds in full, as 0, in this thread and those it starts.

    Gradients of unlikely tokens, and their squares, come near that, and many processors compute what is below it by
    microcode, many times slower.
    """
    torch.set_flush_denormal(True)


def divided_threads(threads: int | None, *, staleness: int, sampling: int | None) -> tuple[int, int]:
    """(threads of this process, threads that sample). Where a second process samples (`staleness`), `threads` is what
    both have together, unless `sampling` gives the second its own; each has one at least."""
    total = threads or int(os.environ.get("OMP_NUM_THREADS", "2"))
    if staleness == 0:
        return total, total
    if sampling is not None:
        return total, sampling
    return max(1, total - total // 2), max(1, total // 2)


def keep_freed_memory() -> None:
    """Let freed tensors be used again without asking the system, where the C library is glibc.

    By default it gives the end of its heap back at once, and the system zeroes each page anew at its next touch. Blocks
    above `MAPPED` still go back, since kept ones fit only what is a little smaller, and large ones would pile up.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def check_overlap(staleness: int, ranks: Ranks) -> None:
    """Refuse a second process for each of torchrun's: their collectives would meet those of the learners."""
    if staleness and ranks.size > 1:
        raise NovaError(
            f"overlap is for one learning process, and torchrun started {ranks.size}",
            where="rollout.staleness",
            fix="use rollout.staleness=0, or start one process",
        )


def pick_device(name: str) -> torch.device:
    """`auto` is the first accelerator, else the CPU; anything else must be there. Under torchrun each process of a
    machine takes the CUDA device of its own number."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = accelerator.type if accelerator else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    kind, _, index = name.partition(":")
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "xpu": torch.xpu.is_available(),
    }
    if not available.get(kind, False):
        raise NovaError("this machine has no such device", where=f"device={name}", fix="use device=auto or device=cpu")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise NovaError(
            f"this machine has {count} of them", where=f"device={name}", fix=f"start at most {count} processes on it"
        )
    return torch.device(name)
