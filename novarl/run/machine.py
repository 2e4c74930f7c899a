"""Threads, memory, device and processes of a run."""

from __future__ import annotations

import ctypes
import os

import torch

from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.distributed.ranks import Ranks

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`: free bytes at the end of the heap that are returned to the system, and the size from
which a block is mapped by itself."""

MAPPED = 32 << 20
"""Bytes: the maximum to which glibc raises M_MMAP_THRESHOLD by itself."""


def start(device: str, threads: int | None, seed: int) -> tuple[torch.device, Ranks]:
    """Choose the device, set threads and torch's seed, and join torchrun's other processes, if any."""
    keep_freed_memory()
    flush_denormals()
    torch.manual_seed(derive(seed, "torch"))
    torch.set_num_threads(threads or int(os.environ.get("OMP_NUM_THREADS", "2")))
    chosen = pick_device(device)
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)  # also for code that names no index (streams, NCCL, other libraries)
    ranks = Ranks.start(chosen)
    return chosen, ranks


def flush_denormals() -> None:
    """Flush denormal numbers (below 1.2e-38 in float32) to 0, in this thread and the threads it starts. Gradients of
    unlikely tokens can be that small, and many processors compute denormals in microcode, many times slower."""
    torch.set_flush_denormal(True)


def divided_threads(threads: int | None, *, staleness: int, sampling: int | None) -> tuple[int, int]:
    """(threads of this process, threads of the sampling process). With a second process (`staleness`), both share
    `threads` unless `sampling` sets the second's own number; each has at least one."""
    total = threads or int(os.environ.get("OMP_NUM_THREADS", "2"))
    if staleness == 0:
        return total, total
    if sampling is not None:
        return total, sampling
    return max(1, total - total // 2), max(1, total // 2)


def keep_freed_memory() -> None:
    """Keep freed memory for reuse, if the C library is glibc: the system zeroes each page that is returned and used
    again. Blocks above `MAPPED` are returned, because kept blocks fit only slightly smaller requests and would
    accumulate."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def check_overlap(staleness: int, ranks: Ranks) -> None:
    """Refuse overlap under torchrun: collectives of the sampling processes would clash with the learners'."""
    if staleness and ranks.size > 1:
        raise NovaError(
            f"rollout.staleness=1 supports one training process, but torchrun started {ranks.size}",
            where="rollout.staleness",
            fix="use rollout.staleness=0, or start one process",
        )


def pick_device(name: str) -> torch.device:
    """`auto` is the first accelerator, otherwise the CPU; any other device must be available. Under torchrun, each
    process uses the CUDA device of its local rank."""
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
        raise NovaError("this device is not available", where=f"device={name}", fix="use device=auto or device=cpu")
    if kind == "cuda" and index and int(index) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise NovaError(
            f"this machine has {count} CUDA devices", where=f"device={name}", fix=f"start at most {count} processes"
        )
    return torch.device(name)
