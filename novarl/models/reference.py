"""The frozen reference model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def frozen_copy(model: nn.Module) -> nn.Module:
    """A frozen copy of `model`: no gradients, evaluation mode."""
    return freeze(copy.deepcopy(model))


def freeze(model: nn.Module) -> nn.Module:
    """Freeze `model` itself: no gradients, evaluation mode."""
    return model.requires_grad_(False).eval()
