"""Compile layers with torch.compile; useful on a GPU, where fewer small kernels mean fewer launches.

The learner's passes are compiled layer by layer, so that one graph serves all layers and any number of tokens.
Attention is not compiled, because packing changes its plan with every batch; nor is sampling: the built-in decoder has
a CUDA graph for it (`recorded`), and for other models every longer cache would be a new shape.
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
    """Compile the layers in place; results change only by rounding, and the first passes take longer. NovaError: no
    compiler for the device, or no layers are recognised."""
    layers = _layers(model)
    if not layers:
        raise NovaError(f"the layers of {type(model).__name__} cannot be identified", where="compile=true", fix=WITHOUT)
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
    """A context in which the model runs uncompiled."""
    if getattr(model, "layers_are_compiled", False):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def _layers(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, Decoder):
        return list(model.model.layers)
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _check_compiler(device: torch.device) -> None:
    """torch.compile needs Triton on a GPU and a C++ compiler on a CPU; without one a step would fail."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise NovaError("Triton is not installed", where="compile=true", fix=f"pip install triton, or {WITHOUT}")
    elif not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        raise NovaError("there is no C++ compiler", where="compile=true", fix=f"install g++, or {WITHOUT}")


def _apart(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`attend` outside of compiled graphs, with its result in one memory layout: any other one would be recompiled."""

    def outside(*arguments: Any, **options: Any) -> Tensor:
        mixed = attend(*arguments, **options).transpose(1, 2)
        return mixed.clone(memory_format=torch.contiguous_format).transpose(1, 2)

    found: Callable[..., Tensor] = torch.compiler.disable(outside)
    return found
