"""Names that other libraries' users know, and what they are called here.

All tables are shown in docs/names.md and tested row by row:

    ALIASES  another name of one of our keys, or of several that get the same value
    VALUES   another name of a value
    FIXED    a key that is accepted only at the value that says what NovaRL does anyway
    LATER    a key whose feature is not here yet

`names.canonical` applies them. A row applies to a kind of run that has the keys it leads to; our own names always win.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Alias:
    """`old` stands for every key of `new`; `implies` is set too, where nothing else says otherwise."""

    old: str
    new: tuple[str, ...]
    source: str
    example: Any
    convert: Callable[[Any], Any] | None = None
    implies: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Fixed:
    """`old` is accepted only at one of `values`, and then changes nothing."""

    old: str
    values: tuple[Any, ...]
    source: str
    reason: str


def _off_at_zero(value: Any) -> Any:
    return None if value == 0 and not isinstance(value, bool) else value


def _rows(source: str, example: Any, new: str, *olds: str) -> list[Alias]:
    return [Alias(old, (new,), source, example) for old in olds]


def _sections(source: str, new: str, *olds: str, leaves: Mapping[str, Any]) -> list[Alias]:
    """The keys of a section under the other names of it."""
    return [
        Alias(f"{old}.{leaf}", (f"{new}.{leaf}",), source, example) for old in olds for leaf, example in leaves.items()
    ]


def _lagrangian(value: Any) -> Any:
    return ("lagrangian" if value else "penalty") if isinstance(value, bool) else value


_ADAPTIVE = {
    "enabled": True,
    "controller_type": "pid",
    "target_kl": 0.02,
    "initial_coef": 0.2,
    "min_coef": 0.01,
    "max_coef": 5.0,
}
_CONSTRAINT = {
    "enabled": True,
    "kl_constraint": 0.02,
    "entropy_constraint": 0.2,
    "lagrangian_lr": 0.05,
    "constraint_violation_penalty": 5.0,
}
_CLIP = ("clip.low", "clip.high")

ALIASES: tuple[Alias, ...] = (
    *_rows("RL2", "rows.jsonl", "data", "data.path", "data.train.path", "data.train_data_path", "train_data.path"),
    *_rows("RL2", "held_out.jsonl", "eval.data", "data.test.path", "data.test_data_path", "test_data.path"),
    *_rows("RL2", "question", "prompt_key", "data.train.prompt_key", "train_data.prompt_key"),
    *_rows("RL2", "chat", "messages_key", "data.train.messages_key", "train_data.messages_key"),
    *_rows("RL2", "response", "completion_key", "response_key", "data.train.response_key"),
    *_rows("RL2", False, "apply_chat_template", "rollout.apply_chat_template", "actor.rollout.apply_chat_template"),
    *_rows("RL2", False, "apply_chat_template", "data.train.apply_chat_template", "train_data.apply_chat_template"),
    *_rows("RL2", 64, "batch_size", "data.batch_size", "data.train.batch_size"),
    *_rows("RL2", 512, "max_length", "data.max_length", "data.train.max_length"),
    *_rows("RL2", 4, "prompts_per_rollout", "data.prompts_per_rollout", "rollout.train_prompts_per_rollout"),
    *_rows("RL2", 4, "responses_per_prompt", "data.responses_per_prompt", "rollout.responses_per_prompt"),
    *_rows("RL2", "small", "model", "actor.model_name", "model_name"),
    *_rows("RL2", 1e-5, "optim.lr", "actor.lr"),
    *_rows("RL2", 0.01, "optim.weight_decay", "actor.weight_decay", "weight_decay"),
    *_rows("RL2", 0.5, "optim.max_grad_norm", "actor.max_grad_norm", "max_grad_norm"),
    Alias("actor.clip", _CLIP, "RL2", 0.2),
    Alias("actor.tis_coef", ("correction.tis_max",), "RL2", 2.0, _off_at_zero, note="0 there is null here"),
    *_rows("RL2", "sequence", "loss.agg", "actor.avg_level"),
    *_rows("RL2", 2, "updates_per_rollout", "update_per_rollout", "actor.update_per_rollout"),
    *_rows("RL2", 4096, "micro.max_tokens", "actor.max_length_per_device"),
    *_rows("RL2", True, "micro.gradient_checkpointing", "actor.gradient_checkpointing", "gradient_checkpointing"),
    *_rows("RL2", 0.1, "kl.coef", "actor.kl.coef"),
    *_rows("RL2", "reward", "kl.type", "actor.kl.type"),
    *_rows("RL2", 0.01, "entropy.coef", "actor.entropy.coef", "entropy_coef"),
    *_rows("RL2", "env.py", "rollout.env_path", "actor.rollout.env_path", "env_path"),
    *_rows("RL2", 3, "rollout.max_turns", "actor.rollout.max_turns", "max_turns"),
    *_rows("RL2", 0.8, "rollout.temperature", "rollout.train_sampling_params.temperature", "temperature"),
    *_rows("RL2", 99, "rollout.max_tokens", "max_new_tokens", "rollout.train_sampling_params.max_new_tokens"),
    *_rows("RL2", ["END"], "rollout.stop", "rollout.train_sampling_params.stop"),
    *_rows("RL2", True, "dynamic_sampling.enabled", "rollout.dynamic_filtering", "dynamic_filtering"),
    *_rows("RL2", True, "adv.norm_std", "adv.norm_var"),
    *_rows("RL2", 0.99, "adv.gamma", "gamma"),
    *_rows("RL2", 0.95, "adv.lam", "adv.lamda", "lamda", "lam"),
    *_rows("RL2", 12, "critic.updates_per_rollout", "critic.update_per_rollout"),
    *_rows("RL2", 2, "critic.warmup_steps", "actor.freeze_steps"),
    *_sections("RL2", "lora", "actor.lora", leaves={"rank": 8, "alpha": 32.0}),
    *_rows("RL2", ["q_proj"], "lora.target", "actor.lora.target_modules", "lora.target_modules", "actor.lora.target"),
    *_sections("RL2", "adaptive_kl", "actor.kl.adaptive_kl", "kl.adaptive_kl", leaves=_ADAPTIVE),
    *_sections(
        "RL2",
        "constraint_optimization",
        "actor.kl.constraint_optimization",
        "kl.constraint_optimization",
        leaves=_CONSTRAINT,
    ),
    *(
        Alias(f"{part}.{section}", (f"{section}.enabled",), "RL2", True)
        for section in ("adaptive_kl", "constraint_optimization")
        for part in ("actor.kl", "kl")
    ),
    *(
        Alias(f"{section}.use_lagrangian", ("constraint_optimization.mode",), "RL2", False, _lagrangian)
        for section in ("constraint_optimization", "actor.kl.constraint_optimization", "kl.constraint_optimization")
    ),
    *_rows("RL2", "tchebycheff", "multi_objective.method", "multi_objective.pareto_method"),
    *_rows("RL2", 5, "save_every", "save_freq", "actor.save_freq", "trainer.save_freq"),
    *_rows("RL2", 5, "eval_every", "test_freq", "trainer.test_freq"),
    *_rows("RL2", 5, "steps", "trainer.total_steps"),
    *_rows("RL2", 2.0, "epochs", "trainer.n_epochs"),
    *_rows("RL2", "runs/x", "run_dir", "trainer.save_dir"),
    *_rows("RL2", "runs/x/checkpoints/step-000010", "resume", "trainer.load_ckpt_from"),
    *_rows("RL2", "file.py:reward_fn", "reward", "reward_fn"),
    Alias("clip_range", _CLIP, "NovaRL", 0.2),
    Alias(
        "kl_coef",
        ("kl.coef",),
        "NovaRL",
        0.1,
        implies={"kl.type": "loss"},
        note="with kl.type=loss unless you name one",
    ),
    *_rows("NovaRL", 0.02, "adaptive_kl.target_kl", "kl_target"),
    *_rows("NovaRL", 2.0, "adaptive_kl.speed", "kl_adaptation_speed"),
    *_rows("NovaRL", "ema", "kl.reference", "reference_model"),
    Alias(
        "value_coef",
        ("critic.coef",),
        "NovaRL",
        0.5,
        implies={"critic.shared": True},
        note="a weight beside the policy's loss is that of a shared trunk",
    ),
    *_rows("OpenRL", 5, "vine.samples", "num_mc_rollouts"),
    *_rows("OpenRL", 8, "vine.max_steps", "max_step_for_value_estimation"),
    *_rows("kit", 1e-5, "optim.lr", "learning_rate", "lr"),
    *_rows("kit", 4, "prompts_per_rollout", "batch_size"),
    *_rows("kit", "runs/x", "run_dir", "output_dir"),
    Alias("clip_ratio", _CLIP, "kit", 0.2),
    *_rows("NanoRL", "small", "model", "model_id"),
    *_rows("NanoRL", "mean", "adv.estimator", "baseline", "adv.baseline"),
    *_rows("NanoRL", 0.5, "adv.ema_beta", "ema_beta"),
    *_rows("NanoRL", 4, "responses_per_prompt", "group_size"),
    *_rows("NanoRL", 0.5, "task_options.brevity_penalty_scale", "brevity_penalty_scale"),
    *_rows("NanoRL", 0.5, "optim.max_grad_norm", "grad_clip"),
    *_rows("NanoRL", 2.0, "epochs", "num_epochs"),
    *_rows("TRL", 3, "steps", "max_steps"),
    *_rows("TRL", 2.0, "epochs", "num_train_epochs"),
    *_rows("TRL", "small", "model", "model_name_or_path"),
    *_rows("TRL", "rows.jsonl", "data", "dataset_name"),
    *_rows("TRL", "file.py:reward_fn", "reward", "reward_funcs"),
    *_rows("TRL", 4, "responses_per_prompt", "num_generations"),
    *_rows("TRL", 99, "rollout.max_tokens", "max_completion_length"),
    *_rows("TRL", 2, "epochs_per_rollout", "num_iterations"),
    *_rows("TRL", 0.3, "clip.high", "epsilon_high"),
    *_rows("TRL", 5, "save_every", "save_steps"),
    *_rows("TRL", 5, "eval_every", "eval_steps"),
    *_rows("TRL", 5, "optim.warmup_steps", "warmup_steps"),
    *_rows("TRL", "cosine", "optim.schedule", "lr_scheduler_type"),
    *_rows("TRL", 8, "lora.rank", "lora_r"),
    *_rows("TRL", 32.0, "lora.alpha", "lora_alpha"),
    *_rows("TRL", ["q_proj"], "lora.target", "lora_target_modules"),
)

VALUES: dict[str, dict[str, Any]] = {
    "adv.estimator": {
        "reinforce": "group",
        "loo": "leave_one_out",
        "rloo": "leave_one_out",
        "batch": "mean",
        "remax": "scst",
        "multistep": "n_step",
        "mc": "monte_carlo",
    },
    "loss.agg": {"token_mean": "token", "sequence_mean": "sequence"},
    "dtype": {"fp32": "float32", "float": "float32", "bf16": "bfloat16"},
    "resume": {"latest": "auto"},
    "kl.reference": {"copy": "start"},
    "adv.values": {"vine": "continuations"},
    "adaptive_kl.controller_type": {"adaptive": "dead_band"},
}
"""By our key: another library's name of a value, and ours. RL2's `reinforce` subtracts the prompt's mean reward."""

OBJECTIVE_NAMES = {"kl_penalty": "kl"}
DIRECTIONS = {"reward": "max", "kl": "min", "entropy": "max"}
"""RL2 lists objectives by name alone; these have a direction that everybody means. Its weights carry the sign of a sum,
so a negative one on an objective that is to be small says the same once more."""

_SUPPORT = "training samples from the full distribution: under a cut one the learner would not know what it was"

FIXED: tuple[Fixed, ...] = (
    Fixed("rollout.partial_rollout", (False,), "RL2", "every answer is finished in its own step"),
    *(
        Fixed(f"{section}.dropout", (0, 0.0), "RL2", "dropout would train another distribution than was sampled from")
        for section in ("lora", "actor.lora")
    ),
    Fixed("adv.global_norm", (False,), "RL2", "write adv.estimator=mean adv.whiten=true"),
    *(Fixed(f"rollout.{part}top_p", (1, 1.0), "RL2", _SUPPORT) for part in ("", "train_sampling_params.")),
    *(Fixed(f"rollout.{part}top_k", (0, -1), "RL2", _SUPPORT) for part in ("", "train_sampling_params.")),
    *(Fixed(f"rollout.{part}min_p", (0, 0.0), "RL2", _SUPPORT) for part in ("", "train_sampling_params.")),
    Fixed(
        "rollout.test_sampling_params.temperature", (0, 0.0), "RL2", "the score is greedy; pass@k has eval.temperature"
    ),
)

LATER: dict[str, str] = {
    "hyperopt": "the tuner",
    "memory_optimization": "the memory planner",
    "experiment_tracking": "experiment trackers",
    **{
        f"{part}{size}": "sharded models"
        for part in ("", "actor.")
        for size in ("ddp_size", "tp_size", "sp_size", "cp_size")
    },
}
"""A name, or the section it begins, and what it waits for."""

KL_PLACES = {"reward_estimator": "reward", "loss_estimator": "loss"}
"""RL2 names the estimator by the place it is used in."""
