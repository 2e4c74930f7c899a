"""A folder that holds a LoRA adapter, as peft saves it, and no weights of a model: its base, and the two merged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_UNSUPPORTED = {"use_dora": False, "modules_to_save": None, "bias": "none", "target_parameters": None}
"""Settings of an adapter that change more than W + scale * B A, with the values under which they do not."""


def holds_adapter(folder: Path) -> bool:
    """Whether the folder holds an adapter alone. NovaError: a model's weights lie beside it, so that nobody can tell
    whether the two belong together."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / "config.json").is_file():
        what = f"the folder holds both a model (config.json) and an adapter ({CONFIG}): it is not clear which is meant"
        raise NovaError(what, where=str(folder), fix="move one of the two to another folder")
    return True


def base_of(folder: Path) -> str:
    """The folder of the model that the adapter was made for. NovaError: there is none on this machine, or the adapter
    is of a kind that cannot be merged."""
    config = _config(folder)
    where = str(folder / CONFIG)
    changed = [name for name, plain in _UNSUPPORTED.items() if config.get(name, plain) not in (plain, [])]
    if config.get("peft_type") != "LORA" or changed:
        kind = changed[0] if changed else f"peft_type={config.get('peft_type')}"
        raise NovaError(
            f"only plain LoRA adapters are read, and this one has {kind}", where=where, fix="merge it with peft first"
        )
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not (Path(base).expanduser() / "config.json").is_file():
        what = f"the folder holds an adapter alone, and its base model is no folder on this machine: {base!r}"
        raise NovaError(what, where=where, fix="set base_model_name_or_path to the base model's folder")
    return str(Path(base).expanduser())


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: Path) -> None:
    """W += scale * B A in every layer that the adapter names; scale = alpha / r, or alpha / sqrt(r) with rslora.

    NovaError: the weights are missing, or are not of this model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config, path = _config(folder), folder / WEIGHTS
    fix = "save the adapter again, with peft's save_pretrained"
    if not path.is_file():
        raise NovaError(f"there is no {WEIGHTS}", where=str(folder), fix=fix)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise NovaError(f"the adapter cannot be read: {error}", where=str(path), fix=fix) from error
    layers = dict(model.named_modules())
    left = set(tensors)
    for name in sorted(tensors):
        if not name.endswith(".lora_A.weight"):
            continue
        layer, other = name.removeprefix(PREFIX).removesuffix(".lora_A.weight"), name.replace(".lora_A.", ".lora_B.")
        weight = getattr(layers.get(layer), "weight", None)
        delta = _delta(config, layer, tensors[name], tensors.get(other))
        if delta is not None and config.get("fan_in_fan_out"):
            delta = delta.T
        if weight is None or delta is None or delta.shape != weight.shape:
            what = f"{name} has no place in the base model that {CONFIG} names"
            raise NovaError(what, where=str(path), fix="set base_model_name_or_path to the adapter's own base")
        weight += delta.to(weight)
        left -= {name, other}
    if left:
        raise NovaError(f"{min(left)} is no part of a LoRA adapter", where=str(path), fix="merge it with peft first")


def _delta(config: dict[str, Any], layer: str, down: Tensor, up: Tensor | None) -> Tensor | None:
    """scale * B A in float32, or None where the two do not fit."""
    if up is None or up.shape[-1] != down.shape[0]:
        return None
    rank, alpha = down.shape[0], _of_layer(config.get("alpha_pattern") or {}, layer, config.get("lora_alpha", 8))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    delta: Tensor = scale * (up.float() @ down.float())
    return delta


def _of_layer(pattern: dict[str, Any], layer: str, usual: float) -> float:
    """The value of the first name in a pattern that a layer's name ends with."""
    return float(next((value for end, value in pattern.items() if f".{layer}".endswith(f".{end}")), usual))


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise NovaError(f"not valid JSON: {error}", where=str(path), fix="copy the file again") from error
    except RecursionError as error:
        raise NovaError("the file is nested too deeply", where=str(path), fix="copy the file again") from error
    if not isinstance(config, dict):
        raise NovaError("not a JSON object", where=str(path), fix="copy the file again")
    return config
