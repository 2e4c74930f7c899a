"""LoRA in a run: where the base weights are stored, when adapters are added, and how both are restored.

A checkpoint's `model/` holds merged weights, which do not allow a bit-identical resume. So the base is written once to
the run directory and the adapters are part of the checkpoint's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from novarl.config.base import TrainConfig
from novarl.config.parts import Lora
from novarl.core.errors import NovaError
from novarl.distributed.ranks import Ranks
from novarl.models.load import Policy, save
from novarl.models.lora import LoraSettings, adapter_weights, inject, put_adapter_weights, targets
from novarl.run.resume import Opened

BASE = "base"
"""The folder with the base weights of the adapters, or the initial weights of an implicit reward model."""
STATE = "adapter"
"""The adapters' key in a checkpoint's state."""


def model_source(config: TrainConfig, opened: Opened, state: Mapping[str, Any] | None) -> str:
    """The configured model, the checkpoint's model, or the base of its adapters. NovaError if its settings differ."""
    if state is None or opened.checkpoint is None:
        return config.model
    _check_same(config.lora, state)
    if STATE not in state:
        return str(opened.checkpoint.model)
    folder = opened.rundir.path / BASE
    if not (folder / "config.json").is_file():
        raise NovaError(
            "the base weights of the run's adapters are missing",
            where=str(folder),
            fix="restore them, or start a new run",
        )
    return str(folder)


def check_adaptable(config: TrainConfig, policy: Policy) -> None:
    """Check before anything is written or trained that the adapters can be added later."""
    if (settings := _settings(config.lora)) is not None:
        targets(policy.model, settings)


def adapt(config: TrainConfig, policy: Policy, state: Mapping[str, Any] | None) -> None:
    """Add the adapters if the run uses them: new ones, or those of `state`."""
    if (settings := _settings(config.lora)) is None:
        return
    inject(policy.model, settings, seed=config.seed)
    if state is not None and STATE in state:
        put_adapter_weights(policy.model, state[STATE]["weights"])


def keep_base(config: TrainConfig, policy: Policy, opened: Opened, ranks: Ranks, *, is_reference: bool = False) -> None:
    """Write the base weights once, while the adapters are zero: for a resume, and if it `is_reference`."""
    if config.lora.rank == 0 and not is_reference:
        return
    if ranks.rank == 0:
        save(policy, opened.rundir.path / BASE)
    ranks.wait()


def adapter_state(config: TrainConfig, policy: Policy) -> dict[str, Any]:
    """The adapters' state for a checkpoint; empty if there are none."""
    if config.lora.rank == 0:
        return {}
    return {STATE: {"settings": _said(config.lora), "weights": adapter_weights(policy.model)}}


def _settings(lora: Lora) -> LoraSettings | None:
    if lora.rank == 0:
        return None
    return LoraSettings(lora.rank, lora.alpha, None if lora.target == "all-linear" else lora.target)


def _said(lora: Lora) -> dict[str, Any]:
    """The settings that determine how adapter weights are read, as JSON values."""
    target = lora.target if isinstance(lora.target, str) else list(lora.target)
    return {"rank": lora.rank, "alpha": lora.alpha, "target": target}


def _check_same(lora: Lora, state: Mapping[str, Any]) -> None:
    if state["phase"] == "warmup":  # the adapters are not added yet
        return
    before = state[STATE]["settings"] if STATE in state else {"rank": 0}
    now = _said(lora)
    for name, value in before.items():
        if now[name] != value:
            raise NovaError(
                f"the run was started with lora.{name}={value}, but now it is {now[name]}",
                where=f"lora.{name}",
                fix=f"set lora.{name}={value}, or choose another run_dir",
            )
