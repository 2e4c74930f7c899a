"""Load a directory that holds only a LoRA adapter, as saved by PEFT: find its base model and merge the two."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from novarl.core.errors import NovaError
from novarl.models.files import read_json, read_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_UNSUPPORTED = {"use_dora": False, "modules_to_save": None, "bias": "none", "target_parameters": None}
"""Adapter settings that change more than W + scale * B A, with the values under which they do not."""


def holds_adapter(folder: Path) -> bool:
    """Whether the directory holds only an adapter. NovaError beside a model: whether it is for that one is unknown."""
    if not (folder / CONFIG).is_file():
        return False
    if (folder / "config.json").is_file():
        what = f"the directory contains both a model (config.json) and an adapter ({CONFIG})"
        raise NovaError(what, where=str(folder), fix="move one of them to another directory")
    return True


def base_of(folder: Path) -> str:
    """The directory of the adapter's base model. Raises NovaError if it is not local or cannot be merged."""
    config = _config(folder)
    where = str(folder / CONFIG)
    changed = [name for name, plain in _UNSUPPORTED.items() if config.get(name, plain) not in (plain, [])]
    if config.get("peft_type") != "LORA" or changed:
        kind = changed[0] if changed else f"peft_type={config.get('peft_type')}"
        raise NovaError(
            f"only plain LoRA adapters are supported, not {kind}", where=where, fix="merge it with PEFT first"
        )
    base = config.get("base_model_name_or_path")
    if not isinstance(base, str) or not (Path(base).expanduser() / "config.json").is_file():
        what = f"the directory contains only an adapter, and its base model is not a local directory: {base!r}"
        raise NovaError(what, where=where, fix="set base_model_name_or_path to the directory of the base model")
    return str(Path(base).expanduser())


@torch.no_grad()
def merge_adapter(model: nn.Module, folder: Path) -> None:
    """W += scale * B A in every layer; scale = alpha / r, or alpha / sqrt(r) with rslora. NovaError: weights are
    missing or another model's."""
    config, path = _config(folder), folder / WEIGHTS
    fix = "save the adapter again with save_pretrained of PEFT"
    if not path.is_file():
        raise NovaError(f"{WEIGHTS} is missing", where=str(folder), fix=fix)
    tensors = read_tensors(path, "the adapter", fix=fix)
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
            what = f"{name} does not exist in the base model given by {CONFIG}"
            raise NovaError(what, where=str(path), fix="set base_model_name_or_path to the correct base model")
        weight += delta.to(weight)
        left -= {name, other}
    if left:
        raise NovaError(f"{min(left)} is not part of a LoRA adapter", where=str(path), fix="merge it with PEFT first")


def _delta(config: dict[str, Any], layer: str, down: Tensor, up: Tensor | None) -> Tensor | None:
    """scale * B A in float32, or None if the shapes do not match."""
    if up is None or up.shape[-1] != down.shape[0]:
        return None
    rank, patterns = down.shape[0], (config.get("alpha_pattern") or {}).items()
    own = (value for end, value in patterns if f".{layer}".endswith(f".{end}"))
    scale = float(next(own, config.get("lora_alpha", 8))) / (math.sqrt(rank) if config.get("use_rslora") else rank)
    delta: Tensor = scale * (up.float() @ down.float())
    return delta


def _config(folder: Path) -> dict[str, Any]:
    return read_json(folder / CONFIG, fix="copy the file again")
