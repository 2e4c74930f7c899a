"""The one link from the learner's weights to what samples from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from novarl.core.types import Engine
from novarl.distributed.shard import gather
from novarl.models.lora import merged


def link(model: nn.Module, engine: Engine) -> Callable[[int], None]:
    """`publish(version)`: from now on `engine` samples from the weights that `model` has at this moment. All ranks call
    it.

    An engine in this process shares the learner's modules, or the whole copy of sharded ones, and is told the version
    alone; any other is given every weight by name, with adapters merged.
    """

    def publish(version: int) -> None:
        whole = gather(model)
        engine.publish(None if getattr(engine, "shares_weights", False) else named_weights(whole), version)

    return publish


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, as a model without adapters has it."""
    for name, parameter in merged(model).named_parameters(remove_duplicate=False):
        yield name, parameter.detach()
