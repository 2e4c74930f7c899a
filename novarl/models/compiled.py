"""Layers through torch.compile: for a GPU, where each small kernel that is left out saves its launch.

Compiled are the learner's forward and backward passes, layer by layer, so that one graph serves all layers and any
number of tokens. Attention stays outside: what is packed changes its plan with every batch. Sampling stays outside too:
the built-in decoder has its own forward pass for it, which on a GPU is recorded instead (`recorded`), and to others
every longer cache would be a new shape.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.models.transformer import Attention, Decoder

WITHOUT = "leave compile out"


def compile_layers(model: nn.Module) -> None:
    """Compile the layers of a language model in place; results stay what they are up to rounding.

    The first passes take as long as the compiler needs. Raises NovaError where there is no compiler for the model's
    device, or where it is unknown which of its modules are the layers.
    """
    layers = _layers(model)
    if not layers:
        raise NovaError(f"{type(model).__name__} does not say what its layers are", where="compile=true", fix=WITHOUT)
    _check_compiler(next(model.parameters()).device)
    if isinstance(model, Decoder):
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend_packed = _apart(module.attend_packed)
    else:
        from novarl.models.hugging_face.packed import keep_attention_uncompiled

        keep_attention_uncompiled()
    for layer in layers:
        layer.compile(dynamic=True)
    model.layers_are_compiled = True  # type: ignore[assignment]


def uncompiled(model: nn.Module) -> AbstractContextManager[object]:
    """Within it the model runs as it is written."""
    if getattr(model, "layers_are_compiled", False):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _layers(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, Decoder):
        return list(model.model.layers)
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _check_compiler(device: torch.device) -> None:
    """torch.compile writes Triton for a GPU and C++ for a CPU; without a compiler it fails in the midst of a step."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise NovaError("Triton is not installed", where="compile=true", fix=f"pip install triton, or {WITHOUT}")
    elif not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        raise NovaError("there is no C++ compiler", where="compile=true", fix=f"install g++, or {WITHOUT}")


def _apart(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`attend` outside of compiled graphs. What it returns, [B, H, L, D], is a copy that always lies as [B, L, H, D],
    since a graph is compiled again for every other layout."""

    def outside(*arguments: Any, **options: Any) -> Tensor:
        mixed = attend(*arguments, **options).transpose(1, 2)
        return mixed.clone(memory_format=torch.contiguous_format).transpose(1, 2)

    found: Callable[..., Tensor] = torch.compiler.disable(outside)
    return found
