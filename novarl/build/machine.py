"""Threads, device and processes of a run."""

from __future__ import annotations

import os

import torch

from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.distributed.ranks import Ranks


def start(device: str, threads: int | None, seed: int) -> tuple[torch.device, Ranks]:
    """Settle the device, the number of threads and torch's own generator; join torchrun's other processes, if any."""
    torch.manual_seed(derive(seed, "torch"))
    torch.set_num_threads(threads or int(os.environ.get("OMP_NUM_THREADS", "2")))
    chosen = pick_device(device)
    ranks = Ranks.start(chosen)
    return chosen, ranks


def pick_device(name: str) -> torch.device:
    """`auto` is the first accelerator, else the CPU; anything else must be there."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = accelerator.type if accelerator else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    kind = name.split(":")[0]
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "xpu": torch.xpu.is_available(),
    }
    if not available.get(kind, False):
        raise NovaError("this machine has no such device", where=f"device={name}", fix="use device=auto or device=cpu")
    return torch.device(name)
