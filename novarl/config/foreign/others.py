"""Names from documents that NovaRL follows (its own, the RLHF Systems Kit's, NanoRL's, VinePPO's), and names that
several projects share."""

from __future__ import annotations

from novarl.config.foreign.rows import SEVERAL, TRAINING, Alias, Fixed, Hint, Row, never_at_minus_one, rows

_CLIP = ("clip.low", "clip.high")

ROWS: tuple[Row, ...] = (
    *rows(SEVERAL, 1e-5, "optim.lr", "learning_rate", "lr"),
    *rows(SEVERAL, 0.01, "optim.weight_decay", "weight_decay"),
    *rows(SEVERAL, 0.5, "optim.max_grad_norm", "max_grad_norm"),
    *rows(SEVERAL, 5, "optim.warmup_steps", "warmup_steps"),
    *rows(SEVERAL, "runs/x", "run_dir", "output_dir"),
    *rows(SEVERAL, "small", "model", "model_name_or_path"),
    *rows(SEVERAL, "question", "prompt_key", "data.prompt_key"),
    *rows(SEVERAL, True, "micro.gradient_checkpointing", "gradient_checkpointing"),
    *rows(SEVERAL, 0.8, "rollout.temperature", "temperature"),
    *rows(SEVERAL, 0.9, "rollout.top_p", "top_p"),
    *rows(SEVERAL, 20, "rollout.top_k", "top_k"),
    *rows(SEVERAL, 0.05, "rollout.min_p", "min_p"),
    *rows(SEVERAL, 99, "rollout.max_tokens", "max_new_tokens"),
    *rows(SEVERAL, 0.01, "entropy.coef", "entropy_coef"),
    *rows(SEVERAL, 0.99, "adv.gamma", "gamma"),
    *rows(SEVERAL, 0.95, "adv.lam", "lam"),
    *rows(SEVERAL, True, "dynamic_sampling.enabled", "dynamic_filtering"),
    *rows(SEVERAL, 8, "lora.rank", "lora_rank"),
    *rows(SEVERAL, 32.0, "lora.alpha", "lora_alpha"),
    *rows(SEVERAL, ["q_proj"], "lora.target", "target_modules"),
    *(
        Alias(old, ("steps",), SEVERAL, 5, unset=(-1,))
        for old in ("trainer.total_steps", "trainer.total_training_steps")
    ),
    *(
        Alias(
            old,
            (new,),
            SEVERAL,
            5,
            never_at_minus_one,
            needs={"updates_per_rollout": (1, None)},
            note="for `rl` with one update a rollout",
            otherwise=f"TRL counts optimiser updates in it, and OpenRLHF rollouts, as {new} does; they differ where a "
            f"rollout has several updates: write {new} instead",
        )
        for new, old in (("save_every", "save_steps"), ("eval_every", "eval_steps"))
    ),
    Alias(
        "attn_implementation",
        ("attn",),
        SEVERAL,
        "flash_attention_2",
        values={"flash_attention_2": "flash", "sdpa": "sdpa", "eager": "eager"},
        otherwise="write attn=auto, sdpa, flash or eager",
    ),
    Fixed("lora_dropout", (0, 0.0), SEVERAL, "adapters are trained without dropout", TRAINING),
    Alias("cliprange", _CLIP, SEVERAL, 0.1),
    *rows(SEVERAL, 0.3, "critic.clip", "cliprange_value"),
    Alias(
        "init_kl_coef",
        ("kl.coef",),
        SEVERAL,
        0.1,
        implies={"kl.type": "reward"},
        note="with kl.type=reward unless you name one",
    ),
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
    *rows("VinePPO", 5, "vine.samples", "num_mc_rollouts"),
    *rows("VinePPO", 8, "vine.max_steps", "max_step_for_value_estimation"),
    Alias("clip_ratio", _CLIP, "RLHF Systems Kit", 0.2),
    Alias(
        "batch_size",
        ("prompts_per_rollout",),
        "RLHF Systems Kit",
        4,
        commands=("rl",),
        means="the prompts of a step",
    ),
    *rows("NanoRL", "small", "model", "model_id"),
    *rows("NanoRL", "mean", "adv.estimator", "baseline", "adv.baseline"),
    *rows("NanoRL", 0.5, "adv.ema_beta", "ema_beta"),
    *rows("NanoRL", 4, "responses_per_prompt", "group_size"),
    *rows("NanoRL", 0.5, "task_options.brevity_penalty_scale", "brevity_penalty_scale"),
    *rows("NanoRL", 0.5, "optim.max_grad_norm", "grad_clip"),
    *rows("NanoRL", 2.0, "epochs", "num_epochs"),
    Hint(
        "num_epochs",
        "for rl the length of a run is counted in rollouts",
        "write steps: once through the rows is their number divided by prompts_per_rollout",
        "NanoRL",
        ("rl",),
    ),
    Hint(
        "batch_size",
        "it counts the answers of a step",
        "write prompts_per_rollout: that number divided by responses_per_prompt",
        "NanoRL",
        ("rl",),
    ),
    Alias(
        "num_iterations",
        ("steps",),
        "VinePPO",
        3,
        commands=("rl",),
        means="the rollouts of the whole run",
    ),
    *rows("VinePPO", 4, "responses_per_prompt", "num_rollouts_per_sample"),
    *rows("VinePPO", True, "adv.whiten", "whiten_advantages"),
    Hint(
        "num_episodes_per_iteration",
        "VinePPO counts the answers of a step; prompts_per_rollout counts prompts",
        "write prompts_per_rollout: that number divided by responses_per_prompt",
        "VinePPO",
        ("rl",),
    ),
)
"""Of `batch_size` and `num_iterations` there are two meanings: which one counts is decided by the other names of a
configuration (`names.meant`)."""
