"""The frozen reference model."""

from __future__ import annotations

import copy

from torch import nn

from novarl.distributed.shard import gather


def frozen_copy(model: nn.Module) -> nn.Module:
    """A frozen copy of `model` in evaluation mode. Of a sharded model, a whole copy on every rank."""
    return freeze(copy.deepcopy(gather(model)))


def freeze(model: nn.Module) -> nn.Module:
    """Freeze `model` itself: no gradients, evaluation mode."""
    return model.requires_grad_(False).eval()
