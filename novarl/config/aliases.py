"""Names that other libraries' users know, and what they are called here.

All tables are shown in docs/names.md and tested row by row:

    ALIASES  another name of one of our keys, or of several that get the same value
    VALUES   another name of a value
    FIXED    a key that is accepted only at the value that says what NovaRL does anyway
    HINTS    a key without a partner here, or with one of another meaning, and what to do instead
    LATER    a key whose feature is not here yet

TRL's rows are in `trl`. `names.canonical` applies them. A row applies to the kinds of run that it names, an alias to
all that have the keys it leads to; our own names always win.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from novarl.config import trl
from novarl.config.foreign import Alias, Fixed, Hint, rows


def _off_at_zero(value: Any) -> Any:
    return None if value == 0 and not isinstance(value, bool) else value


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
    *rows("RL2", "rows.jsonl", "data", "data.path", "data.train.path", "data.train_data_path", "train_data.path"),
    *rows("RL2", "held_out.jsonl", "eval.data", "data.test.path", "data.test_data_path", "test_data.path"),
    *rows("RL2", "question", "prompt_key", "data.train.prompt_key", "train_data.prompt_key"),
    *rows("RL2", "chat", "messages_key", "data.train.messages_key", "train_data.messages_key"),
    *rows("RL2", "response", "completion_key", "response_key", "data.train.response_key"),
    *rows("RL2", False, "apply_chat_template", "rollout.apply_chat_template", "actor.rollout.apply_chat_template"),
    *rows("RL2", False, "apply_chat_template", "data.train.apply_chat_template", "train_data.apply_chat_template"),
    *rows("RL2", 64, "batch_size", "data.batch_size", "data.train.batch_size"),
    *rows("RL2", 512, "max_length", "data.max_length", "data.train.max_length"),
    *rows("RL2", 4, "prompts_per_rollout", "data.prompts_per_rollout", "rollout.train_prompts_per_rollout"),
    *rows("RL2", 4, "responses_per_prompt", "data.responses_per_prompt", "rollout.responses_per_prompt"),
    *rows("RL2", "small", "model", "actor.model_name", "model_name"),
    *rows("RL2", 1e-5, "optim.lr", "actor.lr"),
    *rows("RL2", 0.01, "optim.weight_decay", "actor.weight_decay", "weight_decay"),
    *rows("RL2", 0.5, "optim.max_grad_norm", "actor.max_grad_norm", "max_grad_norm"),
    Alias("actor.clip", _CLIP, "RL2", 0.2),
    Alias("actor.tis_coef", ("correction.tis_max",), "RL2", 2.0, _off_at_zero, note="0 there is null here"),
    *rows("RL2", "sequence", "loss.agg", "actor.avg_level"),
    *rows("RL2", 2, "updates_per_rollout", "update_per_rollout", "actor.update_per_rollout"),
    *rows("RL2", 4096, "micro.max_tokens", "actor.max_length_per_device"),
    *rows("RL2", True, "micro.gradient_checkpointing", "actor.gradient_checkpointing", "gradient_checkpointing"),
    *rows("RL2", 0.1, "kl.coef", "actor.kl.coef"),
    *rows("RL2", "reward", "kl.type", "actor.kl.type"),
    *rows("RL2", 0.01, "entropy.coef", "actor.entropy.coef", "entropy_coef"),
    *rows("RL2", "env.py", "rollout.env_path", "actor.rollout.env_path", "env_path"),
    *rows("RL2", 3, "rollout.max_turns", "actor.rollout.max_turns", "max_turns"),
    *rows("RL2", 0.8, "rollout.temperature", "rollout.train_sampling_params.temperature", "temperature"),
    *rows("RL2", 99, "rollout.max_tokens", "max_new_tokens", "rollout.train_sampling_params.max_new_tokens"),
    *rows("RL2", ["END"], "rollout.stop", "rollout.train_sampling_params.stop"),
    *rows("RL2", 0.9, "rollout.top_p", "rollout.train_sampling_params.top_p"),
    *rows("RL2", 20, "rollout.top_k", "rollout.train_sampling_params.top_k"),
    *rows("RL2", 0.05, "rollout.min_p", "rollout.train_sampling_params.min_p"),
    *rows("RL2", True, "dynamic_sampling.enabled", "rollout.dynamic_filtering", "dynamic_filtering"),
    *rows("RL2", True, "adv.norm_std", "adv.norm_var"),
    *rows("RL2", 0.99, "adv.gamma", "gamma"),
    *rows("RL2", 0.95, "adv.lam", "adv.lamda", "lamda", "lam"),
    *rows("RL2", 12, "critic.updates_per_rollout", "critic.update_per_rollout"),
    *rows("RL2", 2, "critic.warmup_steps", "actor.freeze_steps"),
    *_sections("RL2", "lora", "actor.lora", leaves={"rank": 8, "alpha": 32.0}),
    *rows("RL2", ["q_proj"], "lora.target", "actor.lora.target_modules", "lora.target_modules", "actor.lora.target"),
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
    *rows("RL2", "tchebycheff", "multi_objective.method", "multi_objective.pareto_method"),
    *rows("RL2", 5, "save_every", "save_freq", "actor.save_freq", "trainer.save_freq"),
    *rows("RL2", 5, "eval_every", "test_freq", "trainer.test_freq"),
    *rows("RL2", 5, "steps", "trainer.total_steps"),
    *rows("RL2", 2.0, "epochs", "trainer.n_epochs"),
    *rows("RL2", "runs/x", "run_dir", "trainer.save_dir"),
    *rows("RL2", "runs/x/checkpoints/step-000010", "resume", "trainer.load_ckpt_from"),
    *rows("RL2", "file.py:reward_fn", "reward", "reward_fn"),
    Alias("clip_range", _CLIP, "NovaRL", 0.2),
    Alias(
        "kl_coef",
        ("kl.coef",),
        "NovaRL",
        0.1,
        implies={"kl.type": "loss"},
        note="with kl.type=loss unless you name one",
    ),
    *rows("NovaRL", 0.02, "adaptive_kl.target_kl", "kl_target"),
    *rows("NovaRL", 2.0, "adaptive_kl.speed", "kl_adaptation_speed"),
    *rows("NovaRL", "ema", "kl.reference", "reference_model"),
    Alias(
        "value_coef",
        ("critic.coef",),
        "NovaRL",
        0.5,
        implies={"critic.shared": True},
        note="a weight beside the policy's loss is that of a shared trunk",
    ),
    *rows("OpenRL", 5, "vine.samples", "num_mc_rollouts"),
    *rows("OpenRL", 8, "vine.max_steps", "max_step_for_value_estimation"),
    *rows("kit", 1e-5, "optim.lr", "learning_rate", "lr"),
    *rows("kit", 4, "prompts_per_rollout", "batch_size"),
    *rows("kit", "runs/x", "run_dir", "output_dir"),
    Alias("clip_ratio", _CLIP, "kit", 0.2),
    *rows("NanoRL", "small", "model", "model_id"),
    *rows("NanoRL", "mean", "adv.estimator", "baseline", "adv.baseline"),
    *rows("NanoRL", 0.5, "adv.ema_beta", "ema_beta"),
    *rows("NanoRL", 4, "responses_per_prompt", "group_size"),
    *rows("NanoRL", 0.5, "task_options.brevity_penalty_scale", "brevity_penalty_scale"),
    *rows("NanoRL", 0.5, "optim.max_grad_norm", "grad_clip"),
    *rows("NanoRL", 2.0, "epochs", "num_epochs"),
    *trl.ALIASES,
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
    "optim.schedule": {"constant_with_warmup": "constant"},
}
"""By our key: another library's name of a value, and ours. RL2's `reinforce` subtracts the prompt's mean reward."""

OBJECTIVE_NAMES = {"kl_penalty": "kl"}
DIRECTIONS = {"reward": "max", "kl": "min", "entropy": "max"}
"""RL2 lists objectives by name alone; these have a direction that everybody means. Its weights carry the sign of a sum,
so a negative one on an objective that is to be small says the same once more."""

FIXED: tuple[Fixed, ...] = (
    Fixed("rollout.partial_rollout", (False,), "RL2", "every answer is finished in its own step"),
    *(
        Fixed(f"{section}.dropout", (0, 0.0), "RL2", "dropout would train another distribution than was sampled from")
        for section in ("lora", "actor.lora")
    ),
    Fixed("adv.global_norm", (False,), "RL2", "write adv.estimator=mean adv.whiten=true"),
    Fixed(
        "rollout.test_sampling_params.temperature", (0, 0.0), "RL2", "the score is greedy; pass@k has eval.temperature"
    ),
    *trl.FIXED,
)

HINTS: tuple[Hint, ...] = trl.HINTS

LATER: dict[str, str] = {
    "hyperopt": "the tuner",
    "memory_optimization": "the memory planner",
    "experiment_tracking": "experiment trackers",
    **{
        f"{part}{size}": "sharded models"
        for part in ("", "actor.")
        for size in ("ddp_size", "tp_size", "sp_size", "cp_size")
    },
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), "sharded models"),
}
"""A name, or the section it begins, and what it waits for."""

KL_PLACES = {"reward_estimator": "reward", "loss_estimator": "loss"}
"""RL2 names the estimator by the place it is used in."""
