"""The policy's weights and the optimizer settings of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from novarl.compose.chat import with_chat
from novarl.compose.lora import model_source
from novarl.compose.resolve import RLPlan
from novarl.compose.trust import trust_of
from novarl.config.base import Config, TrainConfig
from novarl.config.objects import is_object
from novarl.config.parts import Optim
from novarl.config.tree import RLConfig
from novarl.core.errors import NovaError
from novarl.core.rundir import RunDir
from novarl.core.types import Tokenizer
from novarl.distributed.ranks import Ranks
from novarl.distributed.shard import shard
from novarl.learn.agreement import switch_dropout_off
from novarl.learn.optim import OptimSettings
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.compiled import compile_layers
from novarl.models.given import copy_weights, policy_of, read_weights
from novarl.models.heads import refuse_reward_model
from novarl.models.load import Policy, load
from novarl.models.plain import PlainModel
from novarl.models.transformer import Decoder
from novarl.run.fingerprint import fingerprint
from novarl.run.resume import Opened


def read_policy(config: TrainConfig, opened: Opened, device: torch.device) -> Policy:
    """The model that a run trains, with dropout off and without adapters. NovaError for another model's checkpoint."""
    if config.object("model") is not None:
        policy = _given(config, opened, device)
    else:
        if opened.state is None and config.kind != "rm":
            refuse_reward_model(config.model)
        refuse_names_of_objects(config)
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


def shard_policy(policy: Policy, ranks: Ranks, *, lora: bool, compiled: bool) -> None:
    """Spread the weights over the ranks (`fsdp`). NovaError for what is not possible with sharded weights."""
    obstacles = {
        "LoRA cannot be combined with it yet": lora,
        "torch.compile cannot be combined with it yet": compiled,
        f"{policy.name} does not run on the built-in modules": not isinstance(policy.model, Decoder),
        "needs several processes, and this is the only one": ranks.size == 1,
    }
    if what := next((what for what, holds in obstacles.items() if holds), None):
        fix = "start with torchrun --nproc_per_node=N" if ranks.size == 1 else "leave it out"
        raise NovaError(what, where="fsdp", fix=fix)
    shard(policy.model, list(policy.model.model.layers), ranks)  # type: ignore[union-attr, arg-type]


def _given(config: TrainConfig, opened: Opened, device: torch.device) -> Policy:
    """The policy of a model object; a resumed run uses the weights of its checkpoint."""
    tokenizer = config.object("tokenizer")
    policy = policy_of(
        config.object("model"),
        load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer,
        dtype=config.dtype,
        device=device,
        gradient_checkpointing=config.micro.gradient_checkpointing,
        attn=config.attn,
    )
    if opened.state is None:
        return policy
    source = model_source(config, opened, opened.state)
    if isinstance(policy.model, PlainModel):
        read_weights(policy.model, Path(source))
    else:
        copy_weights(load(source, dtype=config.dtype, device=device).model, policy.model)
    return policy


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a directory or hub id."""
    from novarl.models.hugging_face.pretrained import load_tokenizer as load_pretrained_tokenizer

    return ByteTokenizer.read(Path(name)) or load_pretrained_tokenizer(name)


def refuse_names_of_objects(config: Config) -> None:
    """NovaError if the model is only the name of a Python object, as in the config.yaml of a run started in Python."""
    if is_object(config.model):
        what = f"{config.model} was an object of the Python program that started the run"
        raise NovaError(what, where="model", fix="resume in Python with the same objects and resume='auto'")


def check_same_model(state: Mapping[str, Any], asked: str, policy: Policy, where: Path) -> None:
    """Refuse to resume a checkpoint of a different model."""
    if state["model"] != fingerprint(policy) or state["facts"].get("model", asked) != asked:
        raise NovaError(
            f"the checkpoint belongs to model {state['facts'].get('model')!r}, but the run has model={asked}",
            where=str(where),
            fix="resume with the original model, or choose another run_dir",
        )


def optim_settings(optim: Optim, *, lr: float, total: int) -> OptimSettings:
    """The optimizer settings as plain values, with a resolved learning rate."""
    return OptimSettings(
        lr=lr,
        weight_decay=optim.weight_decay,
        betas=optim.betas,
        eps=optim.eps,
        max_grad_norm=optim.max_grad_norm,
        schedule=optim.schedule,
        warmup_steps=optim.warmup_steps or math.ceil(optim.warmup_ratio * total),
        min_lr_ratio=optim.min_lr_ratio,
        total_steps=total,
    )


def check_reference_is_there(config: RLConfig, plan: RLPlan, rundir: RunDir, state: Mapping[str, Any]) -> None:
    """Refuse to resume with KL if the run kept no reference, before its logs are truncated."""
    kept = config.kl.reference in ("start", "ema") and config.lora.rank == 0 and state["phase"] == "rl"
    if plan.needs_reference and kept and not (rundir.path / "reference").is_dir():
        raise NovaError(
            "the run was started without KL and kept no reference policy",
            where=f"run_dir={rundir.path}",
            fix="resume without KL, or start a new run with model=<checkpoint>/model",
        )
