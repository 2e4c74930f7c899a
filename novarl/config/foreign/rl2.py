"""RL2's names, of its first configurations and of its newest (`rollout.train.*`, `actor.optimizer.*`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from novarl.config.foreign.rows import (
    ON_ROWS,
    TRAINING,
    Alias,
    Fixed,
    Row,
    hinted,
    later,
    never_at_minus_one,
    off_at_zero,
    rows,
)


def _sections(new: str, *olds: str, leaves: Mapping[str, Any]) -> list[Alias]:
    """The keys of a section under the other names of it."""
    return [
        Alias(f"{old}.{leaf}", (f"{new}.{leaf}",), "RL2", example) for old in olds for leaf, example in leaves.items()
    ]


def _split_last(value: Any) -> Any:
    """RL2 writes the split of a published data set before its name."""
    split, at, name = str(value).partition("@")
    return f"{name}@{split}" if at and "/" in name and "/" not in split and not name.startswith("/") else value


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
_TOKENS = "the loss is the mean over the tokens of all answers"
_CURVES = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant"}
_CURVES |= {"constant_with_warmup": "constant"}

ROWS: tuple[Row, ...] = (
    *(
        Alias(old, (new,), "RL2", "train@org/rows", _split_last, note="`SPLIT@NAME` is `NAME@SPLIT` here")
        for new, olds in (
            ("data", ("data.path", "data.train.path", "data.train_data_path", "train_data.path", "rollout.train.path")),
            ("eval.data", ("data.test.path", "data.test_data_path", "test_data.path", "rollout.test.path")),
        )
        for old in olds
    ),
    *rows("RL2", "question", "prompt_key", "data.train.prompt_key", "train_data.prompt_key"),
    *rows("RL2", "question", "prompt_key", "rollout.train.prompt_key"),
    *rows("RL2", "chat", "messages_key", "data.train.messages_key", "train_data.messages_key"),
    *rows("RL2", "chat", "messages_key", "rollout.train.messages_key"),
    *rows("RL2", "response", "completion_key", "response_key", "data.train.response_key"),
    *rows("RL2", "better", "chosen_key", "data.train.chosen_key"),
    *rows("RL2", "worse", "rejected_key", "data.train.rejected_key"),
    *rows("RL2", False, "apply_chat_template", "rollout.apply_chat_template", "actor.rollout.apply_chat_template"),
    *rows("RL2", False, "apply_chat_template", "data.train.apply_chat_template", "train_data.apply_chat_template"),
    *rows("RL2", False, "apply_chat_template", "rollout.train.apply_chat_template"),
    *rows("RL2", 64, "batch_size", "data.batch_size", "data.train.batch_size"),
    *rows("RL2", 512, "max_length", "data.max_length", "data.train.max_length"),
    *rows("RL2", 4, "prompts_per_rollout", "data.prompts_per_rollout", "rollout.train_prompts_per_rollout"),
    *rows("RL2", 4, "prompts_per_rollout", "rollout.train.prompts_per_rollout"),
    *rows("RL2", 4, "responses_per_prompt", "data.responses_per_prompt", "rollout.responses_per_prompt"),
    *rows("RL2", 4, "responses_per_prompt", "rollout.train.responses_per_prompt"),
    *rows("RL2", "small", "model", "actor.model_name", "model_name"),
    Alias("critic.model_name", ("model",), "RL2", "small", commands=("rm",)),
    *rows("RL2", 1e-5, "optim.lr", "actor.lr", "actor.optimizer.lr"),
    Alias("critic.optimizer.lr", ("critic.lr",), "RL2", 1e-5, commands=("rl",)),
    Alias("critic.optimizer.lr", ("optim.lr",), "RL2", 1e-5, commands=("rm",)),
    *rows("RL2", 0.01, "optim.weight_decay", "actor.weight_decay", "actor.optimizer.weight_decay"),
    Alias("critic.optimizer.weight_decay", ("optim.weight_decay",), "RL2", 0.01, commands=("rm",)),
    *rows("RL2", 0.5, "optim.max_grad_norm", "actor.max_grad_norm", "actor.optimizer.clip_grad"),
    Alias("critic.max_grad_norm", ("optim.max_grad_norm",), "RL2", 0.5, commands=("rm",)),
    *(
        Alias(name, ("optim.schedule",), "RL2", "cosine", values=_CURVES, otherwise="write optim.schedule", commands=of)
        for name, of in (("actor.scheduler.name", ("rl", "sft", "dpo")), ("critic.scheduler.name", ("rm",)))
    ),
    Alias("actor.dtype", ("dtype",), "RL2", "bfloat16", commands=("rl", "sft", "dpo")),
    Alias("critic.dtype", ("dtype",), "RL2", "bfloat16", commands=("rm",)),
    Alias("actor.clip", ("clip.low", "clip.high"), "RL2", 0.2),
    *(
        Alias(
            name,
            ("correction.tis_max",),
            "RL2",
            2.0,
            off_at_zero,
            implies={"updates_per_rollout": 1},
            needs={"updates_per_rollout": (1,)},
            note="0 there is null here; with updates_per_rollout=1, the only number for which both mean the same",
            otherwise="RL2's tis_coef bounds pi / mu, pi being the policy as it is trained; correction.tis_max bounds "
            "pi_old / mu, pi_old being the policy before the step's first update. With several updates they differ",
        )
        for name in ("actor.tis_coef", "tis_coef")
    ),
    *rows("RL2", "sequence", "loss.agg", "actor.avg_level"),
    *rows("RL2", 2, "updates_per_rollout", "update_per_rollout", "actor.update_per_rollout"),
    *rows("RL2", 4096, "micro.max_tokens", "actor.max_length_per_device"),
    Alias("critic.max_length_per_device", ("micro.max_tokens",), "RL2", 4096, commands=("rm",)),
    *rows("RL2", True, "micro.gradient_checkpointing", "actor.gradient_checkpointing"),
    *rows("RL2", True, "micro.gradient_checkpointing", "actor.enable_gradient_checkpointing"),
    Alias("critic.enable_gradient_checkpointing", ("micro.gradient_checkpointing",), "RL2", True, commands=("rm",)),
    Alias("actor.beta", ("beta",), "RL2", 0.2, commands=("dpo",)),
    *rows("RL2", 0.1, "kl.coef", "actor.kl.coef"),
    *rows("RL2", "reward", "kl.type", "actor.kl.type"),
    *rows("RL2", 0.01, "entropy.coef", "actor.entropy.coef"),
    *rows("RL2", "env.py", "rollout.env_path", "actor.rollout.env_path", "env_path"),
    *rows("RL2", 3, "rollout.max_turns", "rollout.train.max_turns", "actor.rollout.max_turns", "max_turns"),
    *(
        Alias(f"rollout.{part}.{old}", (f"rollout.{new}",), "RL2", example)
        for part in ("train_sampling_params", "train.sampling_params")
        for old, new, example in (
            ("temperature", "temperature", 0.8),
            ("max_new_tokens", "max_tokens", 99),
            ("stop", "stop", ["END"]),
            ("top_p", "top_p", 0.9),
            ("top_k", "top_k", 20),
            ("min_p", "min_p", 0.05),
        )
    ),
    *rows("RL2", True, "dynamic_sampling.enabled", "rollout.dynamic_filtering"),
    *rows("RL2", True, "dynamic_sampling.enabled", "rollout.train.dynamic_filtering"),
    *rows("RL2", True, "adv.norm_std", "adv.norm_var"),
    *rows("RL2", 0.95, "adv.lam", "adv.lamda", "lamda"),
    *rows("RL2", 12, "critic.updates_per_rollout", "critic.update_per_rollout"),
    *rows("RL2", 2, "critic.warmup_steps", "actor.freeze_steps"),
    *_sections("lora", "actor.lora", leaves={"rank": 8, "alpha": 32.0}),
    *rows("RL2", ["q_proj"], "lora.target", "actor.lora.target_modules", "lora.target_modules", "actor.lora.target"),
    *_sections("adaptive_kl", "actor.kl.adaptive_kl", "kl.adaptive_kl", leaves=_ADAPTIVE),
    *_sections(
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
    *rows("RL2", 5, "save_every", "save_freq", "actor.save_freq"),
    *rows("RL2", 5, "eval_every", "test_freq"),
    *(
        Alias(old, (new,), "RL2", 5, never_at_minus_one, note="null, or verl's -1, is never")
        for new, old in (("save_every", "trainer.save_freq"), ("eval_every", "trainer.test_freq"))
    ),
    *rows("RL2", 2.0, "epochs", "trainer.n_epochs"),
    *rows("RL2", "runs/x", "run_dir", "trainer.save_dir"),
    *rows("RL2", "runs/x/checkpoints/step-000010", "resume", "trainer.load_ckpt_from"),
    *rows("RL2", "file.py:reward_fn", "reward", "reward_fn"),
    *(
        Fixed(name, (False,), "RL2", "every answer is finished in its own step")
        for name in ("rollout.partial_rollout", "rollout.train.partial_rollout")
    ),
    *(
        Fixed(f"{section}.dropout", (0, 0.0), "RL2", "dropout would train another distribution than was sampled from")
        for section in ("lora", "actor.lora")
    ),
    Fixed("adv.global_norm", (False,), "RL2", "write adv.estimator=mean adv.whiten=true"),
    *(
        Fixed(f"rollout.{part}.temperature", (0, 0.0), "RL2", "the score is greedy; pass@k has eval.temperature")
        for part in ("test_sampling_params", "test.sampling_params")
    ),
    Fixed("rollout.test.responses_per_prompt", (1,), "RL2", "the score is greedy; write eval.k for pass@k"),
    Fixed(
        "trainer.use_wandb",
        (False,),
        "RL2",
        "experiment trackers are not supported yet; metrics.jsonl and tb/ hold the curves",
        TRAINING,
    ),
    Fixed("actor.avg_level", ("token",), "RL2", _TOKENS, ("sft",)),
    Fixed("trainer.eval_only", (False,), "RL2", "evaluation is a command: run novarl eval"),
    *(
        Fixed(
            f"{part}.use_liger_kernel", (False,), "RL2", "NovaRL uses its own kernels and chooses them itself", TRAINING
        )
        for part in ("actor", "critic", "ref_actor")
    ),
    *(
        Fixed(
            f"{part}.{size}",
            (1,),
            "RL2",
            "sharded models are not supported yet: each process holds the whole model",
            TRAINING,
        )
        for part in ("actor", "critic", "ref_actor")
        for size in ("ddp_size", "tp_size", "cp_size", "sp_size")
    ),
    *(
        Fixed(
            f"{part}.offload_{what}", (False,), "RL2", "offloading to the CPU's memory is not supported yet", TRAINING
        )
        for part in ("actor", "critic", "ref_actor")
        for what in ("model", "optimizer")
    ),
    *later("RL2", "Megatron", "leave it out", "actor.tf_config", "critic.tf_config", "ref_actor.tf_config"),
    *later("RL2", "Megatron", "leave it out", "actor.ddp_config", "critic.ddp_config", "ref_actor.ddp_config"),
    *hinted(
        "RL2",
        "NovaRL samples with its own engine, on the weights that it trains",
        "leave it out",
        *("rollout.server_args", "rollout.bucket_size"),
        commands=("rl",),
    ),
    *hinted(
        "RL2",
        "adv.responses_per_prompt repeats responses_per_prompt",
        "leave it out",
        "adv.responses_per_prompt",
        commands=("rl",),
    ),
    *(
        row
        for section, feature in (
            ("hyperopt", "the tuner"),
            ("memory_optimization", "the memory planner"),
            ("experiment_tracking", "experiment trackers"),
        )
        for row in later("RL2", feature, "leave it out", section)
    ),
    *later(
        "RL2",
        "sharded models",
        "leave it out: each process holds the whole model",
        *(f"{size}_size" for size in ("ddp", "tp", "sp", "cp")),
    ),
    *hinted("RL2", "a configuration is one file; others are not added to it", "write all keys in it", "defaults"),
    *(
        row
        for part, of in (("actor", ("rl", "sft", "dpo")), ("critic", TRAINING))
        for row in (
            *hinted(
                "RL2",
                "the last learning rate is a share of the first here, and another number there",
                "write optim.min_lr_ratio: min_lr divided by lr",
                f"{part}.scheduler.min_lr",
                f"{part}.optimizer.min_lr",
                commands=of,
            ),
            *hinted(
                "RL2",
                "warm-up is counted in updates",
                "write optim.warmup_steps: that share of all updates",
                f"{part}.scheduler.warmup_ratio",
                commands=of,
            ),
            *hinted(
                "RL2",
                "of a schedule there are optim.schedule, optim.warmup_steps and optim.min_lr_ratio",
                "write these",
                f"{part}.scheduler",
                commands=of,
            ),
        )
    ),
    *hinted(
        "RL2",
        "the critic has a learning rate of its own, critic.lr, and shares all else with the policy",
        "leave it out, or write the policy's",
        *(f"critic.{name}" for name in ("model_name", "dtype", "enable_gradient_checkpointing", "max_grad_norm")),
        *("critic.optimizer.weight_decay", "critic.max_length_per_device", "critic.avg_level"),
        commands=("rl",),
    ),
    *hinted(
        "RL2",
        "passes without a gradient are cut by micro.max_tokens too, and change no result",
        "leave it out",
        *(f"{part}.max_inference_length_per_device" for part in ("actor", "critic", "ref_actor")),
        commands=("rl", "dpo"),
    ),
    *hinted(
        "RL2",
        "the reference is the model as it was at the start, and shares all settings with it",
        "leave it out; another one is kl.reference=PATH",
        "ref_actor",
        commands=("rl",),
    ),
    *hinted("RL2", "the reference is the model as it was at the start", "leave it out", "ref_actor", commands=("dpo",)),
    *hinted(
        "RL2",
        "it repeats what another key says",
        "leave it out",
        *("actor.temperature", "actor.adv_estimator"),
        commands=("rl",),
    ),
    *hinted(
        "RL2",
        "all answers are written to rollouts/ in run_dir",
        "leave it out, or write log.rollouts_every",
        *("rollout.train.save_dir", "rollout.test.save_dir"),
        commands=("rl",),
    ),
    *rows("RL2", 4, "eval.n", "rollout.test.prompts_per_rollout"),
    *hinted(
        "RL2",
        "held-out rows are rendered and answered as those of training",
        "leave it out",
        "rollout.test",
        "rollout.test_sampling_params",
        commands=("rl",),
    ),
    *hinted(
        "RL2",
        "held-out rows are read and cut as those of training",
        "leave it out",
        "data.test",
        "test_data",
        commands=ON_ROWS,
    ),
    *hinted(
        "RL2",
        "without held-out rows of your own a share of the rows is set aside",
        "leave it out, or write eval.data and eval.n",
        "rollout.test_ratio",
        "data.test_ratio",
    ),
)
