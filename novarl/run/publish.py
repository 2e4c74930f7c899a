"""The one link from the learner's weights to what samples from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from novarl.core.types import Engine
from novarl.models.lora import merged


def link(model: nn.Module, engine: Engine) -> Callable[[int], None]:
    """`publish(version)`: from now on `engine` samples from the weights that `model` has at this moment.

    An engine in this process shares the learner's modules (`shares_weights`) and is told the version alone; any other
    is handed every weight by name, with adapters merged.
    """
    if getattr(engine, "shares_weights", False):
        return lambda version: engine.publish(None, version)
    return lambda version: engine.publish(named_weights(model), version)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name, as a model without adapters has it."""
    for name, parameter in merged(model).named_parameters(remove_duplicate=False):
        yield name, parameter.detach()
