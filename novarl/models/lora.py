"""Low-rank adapters: y = W x + (alpha / rank) B A x, where only A [rank, in] and B [out, rank] are trained.

LoRA (https://arxiv.org/abs/2106.09685), added in place with PEFT: the model object stays the same, so the learner,
scorer and engine use the adapters too. B is initialised to zero, so outputs are at first bit-identical. `merged` gives
the plain model for saving; `without_adapters` gives the initial model.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.core.seeds import derive
from novarl.distributed.shard import gather

ADAPTER = "default"
"""The default adapter name in PEFT."""


STATE_SPACE = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
"""Models whose fused kernels read the weight of `out_proj` directly: PEFT refuses to adapt it."""


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """`target`: suffixes of the names of the layers to adapt; None: every linear layer except the head."""

    rank: int
    alpha: float
    target: tuple[str, ...] | None = None


def targets(model: nn.Module, settings: LoraSettings) -> list[str]:
    """The full names of the layers to adapt; not the head, whose weight is read directly. NovaError: no PEFT, no linear
    layer, a name matches none, or the rank is too large for every layer."""
    _peft()
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = {name: module for name, module in model.named_modules() if module is not head and _is_linear(module)}
    if not linear:
        raise NovaError(f"{type(model).__name__} has no linear layers for LoRA", where="lora.rank", fix="lora.rank=0")
    if getattr(getattr(model, "config", None), "model_type", None) in STATE_SPACE:
        linear = {name: module for name, module in linear.items() if not _ends(name, "out_proj")}
    if settings.target == ():
        raise NovaError("is empty", where="lora.target", fix="list some layers, or omit it for all")
    for wanted in settings.target or ():
        if not any(_ends(name, wanted) for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise NovaError(f"no linear layer is named {wanted}", where="lora.target", fix=f"one of {known}")
    names = [name for name in linear if settings.target is None or any(_ends(name, end) for end in settings.target)]
    if (most := max(min(linear[name].weight.shape) for name in names)) < settings.rank:
        fix = f"at most {most}, usually 8 to 64"
        raise NovaError(f"{settings.rank:,} exceeds the rank of every layer's weight", where="lora.rank", fix=fix)
    return names


def inject(model: nn.Module, settings: LoraSettings, *, seed: int) -> None:
    """Add adapters to `model` and freeze everything else; outputs do not change. A is drawn from `seed` by layer name,
    without advancing other random streams. Raises NovaError as `targets` does."""
    names = targets(model, settings)
    peft = _peft()
    config = peft.LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, target_modules=names, lora_dropout=0.0, bias="none"
    )
    model.requires_grad_(False)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings("ignore", message="fan_in_fan_out")  # PEFT fixes it itself, layer by layer
        peft.inject_adapter_in_model(config, model, ADAPTER)
    found = dict(_layers(model))
    if found.keys() != set(names):
        raise RuntimeError(f"PEFT adapted other layers than requested: {sorted(found.keys() ^ set(names))}")
    with torch.no_grad():
        for name, layer in found.items():
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            generator = torch.Generator().manual_seed(derive(seed, "lora", name))
            drawn = torch.empty(down.shape, dtype=down.dtype)
            down.copy_(nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator))
            up.zero_()


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """A and B of every adapter, by parameter name, detached; empty if there are none."""
    mine = _adapter_ids(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if id(parameter) in mine}


@torch.no_grad()
def put_adapter_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """The inverse of `adapter_weights`. Raises NovaError if layers or rank differ."""
    own = adapter_weights(model)
    if {name: tensor.shape for name, tensor in own.items()} != {name: value.shape for name, value in weights.items()}:
        raise NovaError(
            "the adapters in the checkpoint have other layers or another rank",
            where="lora",
            fix="use the lora settings of the original run",
        )
    for name, tensor in own.items():
        tensor.copy_(weights[name])


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """A context in which adapters are disabled; afterwards adapters and their gradients are restored."""
    layers = [layer for _, layer in _layers(model)]
    wanted = [(parameter, parameter.requires_grad) for layer in layers for parameter in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, had_gradient in wanted:
            parameter.requires_grad_(had_gradient)


@torch.no_grad()
def adapted_weight(layer: Any) -> Tensor:
    """W + (alpha / rank) B A of an adapted layer; exactly W if B is zero or adapters are disabled."""
    weight: Tensor = layer.get_base_layer().weight
    return weight.detach() if layer.disable_adapters else weight + layer.get_delta_weight(ADAPTER)


@torch.no_grad()
def merged(model: nn.Module) -> nn.Module:
    """The plain model, of the architecture before `inject`, with W + (alpha / rank) B A in place of W; `model` itself
    is unchanged. Weights without an adapter are shared, not copied."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    plain: dict[int, Any] = {}
    for _, layer in _layers(model):
        base = layer.get_base_layer()
        changed = copy.deepcopy(base, dict(memo))
        changed.weight = nn.Parameter(base.weight + layer.get_delta_weight(ADAPTER), requires_grad=False)
        plain[id(layer)] = changed
    if not plain:
        return model
    whole = copy.deepcopy(model, memo | plain)  # entries of the memo replace the originals
    if hasattr(whole, "peft_config"):
        del whole.peft_config
    return whole


def sibling(model: nn.Module) -> nn.Module:
    """A copy whose trained weights are its own and whose frozen ones are shared: under LoRA, other adapters on the
    same base; without it, a copy of everything. Of a sharded model, a whole copy on every rank."""
    model = gather(model)
    return copy.deepcopy(model, {id(frozen): frozen for frozen in model.parameters() if not frozen.requires_grad})


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters without adapters, under the names they had before `inject`."""
    mine, layers = _adapter_ids(model), dict(_layers(model))
    for name, parameter in model.named_parameters():
        if id(parameter) not in mine:
            layer, _, last = name.rpartition(".base_layer.")
            yield (f"{layer}.{last}" if layer in layers else name), parameter


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The adapted layers."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and hasattr(module, "base_layer"):
            yield name, module


def _adapter_ids(model: nn.Module) -> set[int]:
    pairs = ((layer.lora_A, layer.lora_B) for _, layer in _layers(model))
    return {id(parameter) for pair in pairs for part in pair for parameter in part.parameters()}


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer; GPT-2's Conv1D stores its weight transposed."""
    kind = type(module)
    return isinstance(module, nn.Linear) or (kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."))


def _ends(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _peft() -> Any:
    """Import PEFT, or raise a NovaError that names the extra to install."""
    try:
        import peft
    except ImportError as error:
        raise NovaError(
            "LoRA requires PEFT, which is not installed",
            where="lora.rank",
            fix="pip install 'novarl[llm]' (in a clone: pip install -e '.[llm]')",
        ) from error
    return peft
