"""LoRA in a run: where its base lies, when its adapters come in, and how both come back when the run is resumed.

A checkpoint's `model/` holds merged weights, for everyone. From those no run could go on bit by bit, so the base lies
in the run directory, written once, and the adapters travel in the checkpoint's state.
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
"""The folder in the run directory with the weights below the adapters, or those that an implicit reward model started
from."""
STATE = "adapter"
"""The adapters' place in a checkpoint's state."""


def model_source(config: TrainConfig, opened: Opened, state: Mapping[str, Any] | None) -> str:
    """Where a run's weights are read from: the model asked for, the checkpoint's, or the base below its adapters.

    Raises NovaError where the run is resumed with other adapters than it was started with.
    """
    if state is None or opened.checkpoint is None:
        return config.model
    _check_same(config.lora, state)
    if STATE not in state:
        return str(opened.checkpoint.model)
    folder = opened.rundir.path / BASE
    if not (folder / "config.json").is_file():
        raise NovaError(
            "the weights below the run's adapters are gone", where=str(folder), fix="put them back, or start a new run"
        )
    return str(folder)


def check_adaptable(config: TrainConfig, policy: Policy) -> None:
    """Refuse, before anything is written or trained, what would fail only when the adapters come in."""
    if (settings := _settings(config.lora)) is not None:
        targets(policy.model, settings)


def adapt(config: TrainConfig, policy: Policy, state: Mapping[str, Any] | None) -> None:
    """Put the adapters in, where the run is to have them: fresh ones, or those of `state`."""
    if (settings := _settings(config.lora)) is None:
        return
    inject(policy.model, settings, seed=config.seed)
    if state is not None and STATE in state:
        put_adapter_weights(policy.model, state[STATE]["weights"])


def keep_base(config: TrainConfig, policy: Policy, opened: Opened, ranks: Ranks, *, is_reference: bool = False) -> None:
    """Write the base once, while the adapters still add nothing to it: for whoever resumes, and where it `is_reference`
    for whoever compares the trained model with it."""
    if config.lora.rank == 0 and not is_reference:
        return
    if ranks.rank == 0:
        save(policy, opened.rundir.path / BASE)
    ranks.wait()


def adapter_state(config: TrainConfig, policy: Policy) -> dict[str, Any]:
    """What a checkpoint must hold of the adapters; nothing where there are none."""
    if config.lora.rank == 0:
        return {}
    return {STATE: {"settings": _said(config.lora), "weights": adapter_weights(policy.model)}}


def _settings(lora: Lora) -> LoraSettings | None:
    if lora.rank == 0:
        return None
    return LoraSettings(lora.rank, lora.alpha, None if lora.target == "all-linear" else lora.target)


def _said(lora: Lora) -> dict[str, Any]:
    """What decides how the adapters' weights are read, as JSON holds it."""
    target = lora.target if isinstance(lora.target, str) else list(lora.target)
    return {"rank": lora.rank, "alpha": lora.alpha, "target": target}


def _check_same(lora: Lora, state: Mapping[str, Any]) -> None:
    if state["phase"] == "warmup":  # the adapters are still to come
        return
    before = state[STATE]["settings"] if STATE in state else {"rank": 0}
    now = _said(lora)
    for name, value in before.items():
        if now[name] != value:
            raise NovaError(
                f"the run was started with lora.{name}={value}, and is told to go on with {now[name]}",
                where=f"lora.{name}",
                fix=f"write lora.{name}={value}, or choose another run_dir",
            )
