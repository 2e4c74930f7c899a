"""The processes of a run. With one process all collectives are no-ops, so callers need not know how many there are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from novarl.core.errors import LostRank, NovaError
from novarl.core.memory import first_line

T = TypeVar("T")


@contextmanager
def _together() -> Iterator[None]:
    """A context for collectives. Errors inside mean that the connection to another process is lost: LostRank."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, OSError) as error:
        raise LostRank(
            f"another process of the run has terminated or does not respond ({first_line(error)})",
            where=f"rank {os.environ.get('RANK', '?')}",
            fix="check its output for the cause, then resume from the last checkpoint with resume=auto",
        ) from None


class Ranks:
    """The process group, with collectives that are free with one process. Under `torchrun` it is initialised from the
    environment (gloo on CPU, NCCL on CUDA)."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @classmethod
    def start(cls, device: torch.device, *, timeout_s: float = 600.0) -> Ranks:
        """Join the process group described by torchrun's environment variables, if set."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            # Gradients use NCCL; objects and scores, which are on the CPU, use gloo.
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
            except (ValueError, RuntimeError) as error:
                raise NovaError(
                    f"cannot join the other processes: {error}", where="WORLD_SIZE", fix="start with torchrun"
                ) from None
        return cls(dist.get_rank(), dist.get_world_size())

    def share(self, items: Sequence[T]) -> list[T]:
        """This rank's disjoint part of `items`."""
        return list(items[self.rank :: self.size])

    def sum_(self, *tensors: torch.Tensor) -> None:
        """Sum tensors over the ranks, in place, with one message per dtype."""
        if self.size == 1:
            return
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for group in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            with _together():
                dist.all_reduce(flat)
            for tensor, part in zip(group, flat.split([tensor.numel() for tensor in group]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def gather(self, item: T) -> list[T]:
        """Every rank's `item`, in rank order, on every rank."""
        if self.size == 1:
            return [item]
        found: list[T] = [item] * self.size
        with _together():
            dist.all_gather_object(found, item)
        return found

    def from_first(self, item: T) -> T:
        """Rank 0's `item` on every rank."""
        if self.size == 1:
            return item
        box = [item]
        with _together():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        box = torch.tensor([number])
        with _together():
            dist.all_reduce(box, dist.ReduceOp.MAX)
        return int(box)

    def wait(self) -> None:
        if self.size > 1:
            with _together():
                dist.barrier()

    def stop(self) -> None:
        """Leave the group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
