"""TRL's names of settings (GRPO, SFT, DPO and reward training, and those of transformers that they take).

Where a name means something else there, or has no partner, a hint says what to do instead: what looks alike is no fix.
"""

from __future__ import annotations

from typing import Any

from novarl.config.foreign import ON_ROWS, TRAINING, Alias, Fixed, Hint, rows


def _last_one(value: Any) -> Any:
    """TRL's true is the last checkpoint of the directory; a path is text, in which the command line writes true too."""
    return {"true": "auto", "false": None}.get(str(value).lower(), value)


def _as_many(value: Any) -> Any:
    return value


ALIASES: tuple[Alias, ...] = (
    Alias(
        "max_steps",
        ("steps",),
        "TRL",
        3,
        note="TRL counts optimiser updates; for `rl` a step is a rollout with all of its `updates_per_rollout`",
        unset=(-1,),
    ),
    *rows("TRL", 2.0, "epochs", "num_train_epochs"),
    *rows("TRL", "small", "model", "model_name_or_path"),
    *rows("TRL", "rows.jsonl", "data", "dataset_name"),
    *rows("TRL", "file.py:reward_fn", "reward", "reward_funcs"),
    *rows("TRL", 4, "responses_per_prompt", "num_generations"),
    *rows("TRL", 99, "rollout.max_tokens", "max_completion_length"),
    Alias(
        "num_iterations",
        ("epochs_per_rollout",),
        "TRL",
        2,
        implies={"updates_per_rollout": _as_many},
        note="with as many updates_per_rollout unless you name them; TRL's max_steps, save_steps and eval_steps count "
        "updates, ours rollouts",
    ),
    Alias("epsilon", ("clip.low",), "TRL", 0.3, note="and clip.high, unless that is given"),
    *rows("TRL", 0.3, "clip.high", "epsilon_high"),
    Alias(
        "beta",
        ("kl.coef",),
        "TRL",
        0.04,
        implies={"kl.type": "loss"},
        note="with kl.type=loss unless you name one; TRL's estimator is kl.estimator=k3",
    ),
    Alias(
        "max_prompt_length",
        ("max_length",),
        "TRL",
        100,
        implies={"on_long": "truncate"},
        note="with on_long=truncate unless you say otherwise",
        commands=("rl", "eval"),
    ),
    Alias(
        "loss_type",
        ("loss.agg",),
        "TRL",
        "dapo",
        values={"grpo": "sequence", "dapo": "token", "bnpo": "token"},
        elsewhere={
            "dr_grpo": ("an algorithm", "algo=dr_grpo"),
            "cispo": ("a surrogate", "loss.surrogate=cispo"),
            "sapo": ("a surrogate", "loss.surrogate=sapo"),
        },
        otherwise="write loss.agg, the mean over what: token, sequence or constant",
        commands=("rl",),
    ),
    Alias("loss_type", ("loss",), "TRL", "hinge", commands=("dpo",)),
    Alias(
        "scale_rewards",
        ("adv.norm_std",),
        "TRL",
        True,
        values={True: True, "group": True, False: False, "none": False},
        otherwise="write true or false; algo=reinforce_pp scales by the deviation of the whole batch",
    ),
    *rows("TRL", "other", "kl.reference", "ref_model"),
    Alias(
        "bf16",
        ("dtype",),
        "TRL",
        True,
        values={True: "bfloat16", False: "float32"},
        otherwise="write dtype=bfloat16 or float32",
    ),
    Alias(
        "attn_implementation",
        ("attn",),
        "TRL",
        "flash_attention_2",
        values={"flash_attention_2": "flash", "sdpa": "sdpa", "eager": "eager"},
        otherwise="write attn=auto, sdpa, flash or eager",
    ),
    Alias(
        "report_to",
        ("log.tensorboard",),
        "TRL",
        "none",
        values={"none": False, "tensorboard": True},
        otherwise="write none or tensorboard: other trackers are not here yet",
    ),
    *rows("TRL", True, "compile", "torch_compile"),
    Alias("resume_from_checkpoint", ("resume",), "TRL", True, _last_one, note="true there is auto here"),
    *rows("TRL", 3, "keep", "save_total_limit"),
    *rows("TRL", 5, "save_every", "save_steps"),
    *rows("TRL", 5, "eval_every", "eval_steps"),
    *rows("TRL", 5, "optim.warmup_steps", "warmup_steps"),
    *rows("TRL", "cosine", "optim.schedule", "lr_scheduler_type"),
    *rows("TRL", 0.9, "rollout.top_p", "top_p"),
    *rows("TRL", 20, "rollout.top_k", "top_k"),
    *rows("TRL", 0.05, "rollout.min_p", "min_p"),
    *rows("TRL", 1e-6, "optim.eps", "adam_epsilon"),
    *rows("TRL", 0.01, "centring", "center_rewards_coefficient"),
    Alias("max_seq_length", ("max_length",), "TRL", 512, commands=("sft",)),
    Alias("dataset_text_field", ("text_key",), "TRL", "text", commands=("sft",)),
    *rows("TRL", 8, "lora.rank", "lora_r"),
    *rows("TRL", 32.0, "lora.alpha", "lora_alpha"),
    *rows("TRL", ["q_proj"], "lora.target", "lora_target_modules"),
)

_ANSWERS_ONLY = "only answers are learnt; a text of text_key, which has none, is learnt whole"

FIXED: tuple[Fixed, ...] = (
    Fixed("lora_dropout", (0, 0.0), "TRL", "adapters are trained without dropout", TRAINING),
    Fixed("repetition_penalty", (1, 1.0), "TRL", "the learner could not compute probabilities with a penalty"),
    Fixed("use_vllm", (False,), "TRL", "NovaRL samples by an engine of its own"),
    Fixed("fp16", (False,), "TRL", "there is no float16, only bf16=true, which is dtype=bfloat16", TRAINING),
    Fixed("mask_truncated_completions", (False,), "TRL", "an answer cut off by a limit is learnt from as it stands"),
    Fixed(
        "shuffle_dataset", (True,), "TRL", "rows come in an order drawn from the seed, another in each epoch", TRAINING
    ),
    Fixed("disable_dropout", (True,), "TRL", "models are trained without dropout", TRAINING),
    Fixed("assistant_only_loss", (True,), "TRL", _ANSWERS_ONLY, ("sft",)),
    Fixed("completion_only_loss", (True,), "TRL", _ANSWERS_ONLY, ("sft",)),
)

_OWN_ENGINE = "NovaRL samples by an engine of its own, on the weights that it trains"
_ROWS_AT_HAND = "rows are read once, before the first step, and none is left out"
_STEPS = "every step is logged, in metrics.jsonl"
_MICRO = "micro-batches follow micro.max_tokens and change no result"
_BEST = "what was best on held-out rows is kept as well, by keep_best"

HINTS: tuple[Hint, ...] = (
    Hint(
        "per_device_train_batch_size",
        "TRL counts the answers on one device in one pass; prompts_per_rollout counts the prompts of a step, whole",
        "write prompts_per_rollout: the answers of a step divided by responses_per_prompt",
        commands=("rl",),
    ),
    Hint(
        "generation_batch_size",
        "TRL counts answers; prompts_per_rollout counts prompts",
        "write prompts_per_rollout: the answers of a step divided by responses_per_prompt",
        commands=("rl",),
    ),
    Hint(
        "per_device_train_batch_size",
        "TRL counts the rows on one device in one pass; batch_size counts those of an update, whole",
        "write batch_size: the product with gradient_accumulation_steps and the devices",
        commands=ON_ROWS,
    ),
    Hint(
        "gradient_accumulation_steps",
        _MICRO,
        "leave it out; prompts_per_rollout is the whole step's, all devices together",
        commands=("rl",),
    ),
    Hint(
        "gradient_accumulation_steps",
        _MICRO,
        "leave it out; batch_size is the whole update's, all devices together",
        commands=ON_ROWS,
    ),
    Hint("per_device_eval_batch_size", "how evaluations are cut up changes no result", "leave it out"),
    Hint(
        "steps_per_generation",
        "TRL counts passes of one device; updates_per_rollout counts optimiser updates",
        "leave it out, or write updates_per_rollout",
        commands=("rl",),
    ),
    *(Hint(f"logging_{name}", _STEPS, "leave it out") for name in ("steps", "strategy", "first_step")),
    Hint("logging_dir", "all of a run's logs are in its run_dir", "leave it out, or write run_dir"),
    Hint("save_strategy", "save_every says when: each so many steps, or null", "leave it out, or write save_every"),
    *(
        Hint(name, "eval_every says when: each so many steps, or null", "leave it out, or write eval_every")
        for name in ("eval_strategy", "evaluation_strategy")
    ),
    *(Hint(name, _BEST, "leave it out") for name in ("load_best_model_at_end", "metric_for_best_model")),
    *(Hint(name, "nothing is uploaded", "leave it out") for name in ("push_to_hub", "hub_model_id")),
    *(
        Hint(f"vllm_{name}", _OWN_ENGINE, "leave it out", commands=("rl",))
        for name in (
            "mode",
            "model_impl",
            "server_base_url",
            "server_host",
            "server_port",
            "server_timeout",
            "gpu_memory_utilization",
            "max_model_length",
            "tensor_parallel_size",
            "enable_sleep_mode",
        )
    ),
    *(
        Hint(
            f"vllm_importance_sampling_{name}",
            "the sampler is the learner's own model, and the ratio to other weights is corrected where there are any",
            "leave it out, or write correction.type=token, or sequence, and correction.tis_max",
            commands=("rl",),
        )
        for name in ("correction", "mode", "cap")
    ),
    *(
        Hint(name, _OWN_ENGINE, "leave it out", commands=("rl",))
        for name in ("cache_implementation", "generation_kwargs", "ds3_gather_for_generation", "use_transformers_paged")
    ),
    *(
        Hint(f"dataloader_{name}", _ROWS_AT_HAND, "leave it out")
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "drop_last")
    ),
    Hint("dataset_num_proc", _ROWS_AT_HAND, "leave it out"),
    Hint("remove_unused_columns", "a reward is given every column of its row", "leave it out"),
    *(
        Hint(name, "the part of a published data set is written after its name", "write data=NAME@SPLIT")
        for name in ("dataset_train_split", "dataset_test_split")
    ),
    Hint(
        "data_seed", "all that is drawn is drawn from one seed, each purpose by itself", "leave it out, or write seed"
    ),
    Hint(
        "auto_find_batch_size",
        "where memory runs out a micro-batch is split and tried again, in any run",
        "leave it out",
    ),
    Hint("eval_on_start", "a run is evaluated before its first step, unless eval.n=0", "leave it out"),
    *(
        Hint(name, "a run is called by its directory", "leave it out, or write run_dir")
        for name in ("run_name", "project")
    ),
    Hint(
        "overwrite_output_dir",
        "a directory that holds a run is never written over",
        "leave it out, or write another run_dir",
    ),
    Hint("gradient_checkpointing_kwargs", "it has no settings", "leave it out"),
    *(
        Hint(name, "NovaRL has kernels of its own, and chooses them itself", "leave it out")
        for name in ("use_liger_loss", "use_liger_kernel")
    ),
    *(
        Hint(
            name,
            "the two are one key here, and TRL's are 0.9 and 0.999 unless given",
            "write optim.betas=[0.9, 0.999]",
        )
        for name in ("adam_beta1", "adam_beta2")
    ),
    Hint("warmup_ratio", "warm-up is counted in updates", "write optim.warmup_steps: that share of all updates"),
    Hint(
        "use_peft",
        "a lora.rank above 0 says that adapters are trained",
        "for true write lora.rank=16, for false leave it out",
    ),
    Hint(
        "num_train_epochs",
        "for rl the length of a run is counted in rollouts",
        "write steps: once through the rows is their number divided by prompts_per_rollout",
        commands=("rl",),
    ),
    Hint(
        "log_completions",
        "an answer is printed each log.samples_every steps, and all are written each log.rollouts_every",
        "leave it out",
        commands=("rl",),
    ),
    Hint(
        "importance_sampling_level",
        "it goes with the algorithm: of algo=gspo the ratio is the answer's, of most others the token's",
        "for sequence write algo=gspo, for token leave it out",
        commands=("rl",),
    ),
    *(
        Hint(
            name,
            "a reference that moves is kl.reference=ema, with kl.ema_decay as the share of the past at each step",
            "write kl.reference=ema, or leave it out: the reference stands still",
            commands=("rl",),
        )
        for name in ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
    ),
    *(
        Hint(name, "the reference is the model as it was at the start", "leave it out", commands=("dpo", "rm"))
        for name in ("ref_model", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
    ),
    *(
        Hint(
            name,
            "max_length bounds prompt and answer together; where it is exceeded, half of it is the prompt's",
            "write max_length",
            commands=("dpo", "rm"),
        )
        for name in ("max_prompt_length", "max_completion_length")
    ),
    Hint(
        "packing",
        "rows are always packed and never see each other; batch_size counts rows, not packs",
        "leave it out",
        commands=("sft",),
    ),
)
"""Of two rows with one name, each is for other commands."""
