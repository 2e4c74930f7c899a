"""Whose weights they are, and how they are moved."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from novarl.build.chat import with_chat
from novarl.build.lora import model_source
from novarl.build.resolve import RLPlan
from novarl.build.session import Opened
from novarl.build.trust import trust_of
from novarl.config.base import TrainConfig
from novarl.config.parts import Optim
from novarl.config.tree import RLConfig
from novarl.core.errors import NovaError
from novarl.core.rundir import RunDir
from novarl.learn.agreement import switch_dropout_off
from novarl.learn.optim import OptimSettings
from novarl.models.compiled import compile_layers
from novarl.models.heads import refuse_reward_model
from novarl.models.load import Policy, load
from novarl.models.lora import plain_parameters


def fingerprint(policy: Policy) -> str:
    """The architecture as a short name: equal for two models whose weights can stand in for each other."""
    shapes = ";".join(f"{name}:{tuple(value.shape)}" for name, value in plain_parameters(policy.model))
    return hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()


def read_policy(config: TrainConfig, opened: Opened, device: torch.device) -> Policy:
    """The model that a run trains, as asked for or as its checkpoint says, dropout off; adapters are not on it yet.

    Raises NovaError where the checkpoint is of another model.
    """
    if opened.state is None and config.kind != "rm":
        refuse_reward_model(config.model)
    source = model_source(config, opened, opened.state)
    policy = load(
        source,
        seed=config.seed,
        dtype=config.dtype,
        device=device,
        gradient_checkpointing=config.micro.gradient_checkpointing,
        attn=config.attn,
        trust=trust_of(config, source),
    )
    policy = with_chat(policy, config, opened.state)
    if opened.state is not None and opened.checkpoint is not None:
        check_same_model(opened.state, config.model, policy, opened.checkpoint.path)
    switch_dropout_off(policy.model)
    if config.compile:
        compile_layers(policy.model)
    return policy


def check_same_model(state: Mapping[str, Any], asked: str, policy: Policy, where: Path) -> None:
    """Refuse to go on with a checkpoint whose model is not the one it says, or not the one asked for."""
    if state["model"] != fingerprint(policy) or state["facts"].get("model", asked) != asked:
        raise NovaError(
            f"the checkpoint is of model {state['facts'].get('model')!r}, this run is told to train {asked!r}",
            where=str(where),
            fix="continue with the model the run was started with, or choose another run_dir",
        )


def optim_settings(optim: Optim, *, lr: float, total: int) -> OptimSettings:
    """The optimiser's plain values, with a rate that is settled already: models learn at different ones."""
    return OptimSettings(
        lr=lr,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        eps=optim.eps,
        max_grad_norm=optim.max_grad_norm,
        schedule=optim.schedule,
        warmup_steps=optim.warmup_steps,
        min_lr_ratio=optim.min_lr_ratio,
        total_steps=total,
    )


def check_reference_is_there(config: RLConfig, plan: RLPlan, rundir: RunDir, state: Mapping[str, Any]) -> None:
    """Refuse to compare with a reference that the run has not kept, before anything of the run is cut."""
    kept = config.kl.reference in ("start", "ema") and config.lora.rank == 0 and state["phase"] == "rl"
    if plan.needs_reference and kept and not (rundir.path / "reference").is_dir():
        raise NovaError(
            "the run has kept no reference, since nothing in it was compared with one, and now KL is to be",
            where=f"run_dir={rundir.path}",
            fix="continue it as it was, or start a new run with model=<checkpoint>/model",
        )
