"""Models whose weights are spread over the ranks, by PyTorch's FSDP2. All functions take plain models and tensors too.

Each rank holds a part of every weight. That makes every forward and backward pass a collective: all ranks must run the
same ones in the same order, and a pass that fails on one rank must be given up on all (`Sharding.passes`,
`Sharding.padded`). Gradients arrive summed over the ranks. Sampling, saving and copying use `gather`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.core.memory import out_of_memory
from novarl.distributed.ranks import Ranks

T = TypeVar("T")

FINE, DISSENT, FAILED = 0, 1, 2
"""Votes of a rank; the largest one counts."""


class FailedElsewhere(MemoryError):
    """Memory ran out on another rank, in the same pass over the batch."""


class Sharding:
    """What ranks must do together to compute with a sharded model. `copy` is the same model with whole weights."""

    def __init__(self, root: Any, copy: nn.Module, ranks: Ranks) -> None:
        self.root, self.copy, self.ranks = root, copy, ranks
        self.stale = False

    def moved(self) -> None:
        """Note that the weights have changed."""
        self.stale = True

    def any(self, holds: bool) -> bool:
        """Whether `holds` on any rank. Within `passes` only."""
        return self._vote(DISSENT if holds else FINE) == DISSENT

    def padded(self, items: Sequence[list[T]]) -> list[list[T]]:
        """This rank's micro-batches, and as many empty ones as it takes to have the number of the rank with most."""
        return [*items, *([] for _ in range(max(self.ranks.gather(len(items))) - len(items)))]

    @contextmanager
    def passes(self) -> Iterator[None]:
        """For forward and backward passes. The weights outside of blocks are whole in it, for who reads the head's.
        Where memory runs out on a rank, all ranks leave it, the others with FailedElsewhere, and gradients are lost."""
        try:
            self.root.unshard()
            yield
            self._vote(FINE)
        except BaseException as error:
            if out_of_memory(error) and not isinstance(error, FailedElsewhere):
                with suppress(FailedElsewhere):
                    self._vote(FAILED)
            for parameter in self.root.parameters():
                parameter.grad = None
            with suppress(AttributeError):  # before the first pass there is nothing to reset
                self.root.reset_iter_state()
            raise
        self.root.reshard()

    def _vote(self, vote: int) -> int:
        """The largest vote of all ranks. Each collective of a pass begins with one: a rank that has left the pass
        answers the one that the others have reached. FailedElsewhere: a rank has failed."""
        largest = self.ranks.largest(vote)
        if largest == FAILED:
            raise FailedElsewhere("memory ran out on another rank")
        return largest


class _Collective:
    """A collective in the form that FSDP calls, which begins with a vote."""

    def __init__(self, collective: Any, sharding: Sharding) -> None:
        self._collective, self._sharding = collective, sharding

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        self._sharding.any(False)
        return self._collective(output_tensor, input_tensor, **options)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


def shard(model: nn.Module, blocks: Sequence[nn.Module], ranks: Ranks) -> None:
    """Spread the weights of `model` over all ranks, in place, before the optimiser is made. A whole copy stays in
    memory (`gather`). NovaError: there is one rank, or this PyTorch cannot recover from a failed pass."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if ranks.size == 1:
        raise NovaError("there is one process, so there is nothing to shard over", fix="start several with torchrun")
    if not (hasattr(FSDPModule, "reset_iter_state") and hasattr(dist, "all_gather_single")):
        raise NovaError(f"sharding needs PyTorch 2.13 or newer, this is {torch.__version__}", fix="upgrade torch")
    whole = copy.deepcopy(model)
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.size,))
    sharding = Sharding(model, whole, ranks)
    # The root stays whole between its forward and backward pass, because the head is read in between (`passes`).
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=module is not model)
    for part in (*blocks, model):
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)  # every loss is divided by what it is to be divided by
        part.set_force_sum_reduction_for_comms(True)
        part.set_reduce_scatter_unused_params(True)
        part.set_custom_all_gather(_Collective(dist.all_gather_single, sharding))  # type: ignore[arg-type]
        part.set_custom_reduce_scatter(_Collective(dist.reduce_scatter_single, sharding))  # type: ignore[arg-type]
    model.sharding = sharding  # type: ignore[assignment]


def sharding_of(model: nn.Module) -> Sharding | None:
    """The sharding of a model, or of one that it holds; None where it is not sharded."""
    found = (getattr(module, "sharding", None) for module in (model, *model.children()))
    return next((sharding for sharding in found if isinstance(sharding, Sharding)), None)


@torch.no_grad()
def gather(model: nn.Module) -> nn.Module:
    """The model with all of its weights: itself, or the whole copy of a sharded one, brought up to date. All ranks must
    call it after an update; until the next one it is free, and one rank may call it alone."""
    sharding = sharding_of(model)
    if sharding is None:
        return model
    if sharding.stale:
        for mine, theirs in zip(sharding.copy.parameters(), model.parameters(), strict=True):
            mine.copy_(full(theirs))
        sharding.stale = False
    return sharding.copy


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds a part of the tensor only."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory; all of a plain one."""
    part: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def full(tensor: Tensor) -> Tensor:
    """All of a tensor. A collective where it is sharded."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def spread(whole: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of `like`, sharded as that is: the inverse of `full`."""
    whole = whole.to(like.device)
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """The L2 norm of gradients that are summed over the ranks, sharded and plain ones."""
    parts = [local(gradient) for gradient in gradients if is_sharded(gradient)]
    plain = [gradient for gradient in gradients if not is_sharded(gradient)]
    norm = torch.nn.utils.get_total_norm(plain)
    if not parts:
        return norm
    square = torch.nn.utils.get_total_norm(parts).square()
    dist.all_reduce(square)
    return (square + norm.to(square).square()).sqrt()
