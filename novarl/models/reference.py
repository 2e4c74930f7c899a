"""The frozen reference model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from novarl.distributed.shard import gather

if TYPE_CHECKING:
    from torch import nn


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` with weights of its own, which stays as it is: no gradients, evaluation mode. Of a sharded
    model, a whole copy on every rank."""
    return freeze(copy.deepcopy(gather(model)))


def freeze(model: nn.Module) -> nn.Module:
    """Freeze `model` itself: no gradients, evaluation mode."""
    return model.requires_grad_(False).eval()
