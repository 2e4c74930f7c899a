"""Weights in shared memory: one process writes them, the other samples from them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError

_ALIGN = 64
"""Alignment of tensors in bytes, for vector instructions."""
_IN_MEMORY = Path("/dev/shm")
"""Files here are in memory; elsewhere they are normally kept in the page cache."""

Entry = tuple[str, tuple[int, ...], torch.dtype, int]


@dataclass(slots=True)
class SharedWeights:
    """A memory-mapped block with a place for each parameter of a model; callers must synchronise reads and writes.

    `layout` holds (name, shape, dtype, first byte). On Linux the file has no name, so nothing is left behind however
    the processes end: `path` is that of the writer's open file.
    """

    path: str
    size: int
    layout: tuple[Entry, ...]
    block: Tensor
    file: int | None = None

    @classmethod
    def of(cls, model: nn.Module) -> SharedWeights:
        """A block for the parameters of `model` (tied ones once). Raises NovaError if there is not enough space."""
        layout: list[Entry] = []
        size = 0
        for name, parameter in model.named_parameters():
            layout.append((name, tuple(parameter.shape), parameter.dtype, size))
            size += -(-parameter.numel() * parameter.element_size() // _ALIGN) * _ALIGN
        file, path = _reserve(size)
        shared = cls(path, size, tuple(layout), torch.empty(0), file)
        try:
            shared.block = _map(path, size)
        except RuntimeError:  # no address space left
            shared.forget()
            raise
        return shared

    @classmethod
    def open(cls, path: str, size: int, layout: Sequence[Entry]) -> SharedWeights:
        """Open the block in the other process."""
        return cls(path, size, tuple(layout), _map(path, size))

    @torch.no_grad()
    def write(self, model: nn.Module) -> None:
        """Copy the parameters of `model` into the block."""
        parameters = dict(model.named_parameters())
        for name, place in self.named_tensors():
            place.copy_(parameters[name])

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """(name, view of its values) pairs for `LocalEngine.publish`."""
        return [
            (name, self.block[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape))
            for name, shape, dtype, start in self.layout
        ]

    def forget(self) -> None:
        """Close the writer's file; the two mappings keep it alive."""
        if self.file is not None:
            os.close(self.file)
            self.file = None
            if sys.platform != "linux":
                Path(self.path).unlink()


def _map(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _reserve(size: int) -> tuple[int, str]:
    """A new open file of `size` bytes, and its path for other processes. The space is really allocated, because writing
    to a mapping without space kills the process."""
    folders = [folder for folder in (_IN_MEMORY, Path(tempfile.gettempdir())) if os.access(folder, os.W_OK)]
    for folder in folders:
        file, path = _create(folder)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, size)
            else:
                os.truncate(file, size)
        except OSError:
            os.close(file)
        else:
            return file, path
    raise NovaError(
        f"not enough space for {size / 2**20:.0f} MB of shared weights",
        where=" or ".join(map(str, folders)),
        fix="free some space there, or use rollout.staleness=0",
    )


def _create(folder: Path) -> tuple[int, str]:
    """A new open file (unnamed on Linux) and its path."""
    if sys.platform != "linux":
        return tempfile.mkstemp(prefix="novarl-weights-", dir=folder)
    try:
        file = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError:  # not supported by some file systems: use a name temporarily
        file, name = tempfile.mkstemp(prefix="novarl-weights-", dir=folder)
        os.unlink(name)
    return file, f"/proc/{os.getpid()}/fd/{file}"
