"""TRL's names of settings (GRPO, RLOO, SFT, DPO and reward training, and those of transformers that they take).

Where a name means something else there, or has no partner, a hint says what to do instead: what looks alike is no fix.
"""

from __future__ import annotations

from typing import Any

from novarl.config.foreign.rows import ON_ROWS, TRAINING, Alias, Fixed, Row, as_many, hinted, later, rows

_RL = ("rl",)


def _last_one(value: Any) -> Any:
    """TRL's true is the last checkpoint of the directory; a path is text, in which the command line writes true too."""
    return {"true": "auto", "false": None}.get(str(value).lower(), value)


def _only(value: Any) -> Any:
    """The one element of a list."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


_ALIASES: tuple[Row, ...] = (
    Alias(
        "max_steps",
        ("steps",),
        "TRL",
        3,
        needs={"updates_per_rollout": (1, None)},
        note="for `rl` with one update a rollout: TRL counts updates, `steps` rollouts",
        otherwise="TRL counts optimiser updates, and here a step is a rollout with updates_per_rollout of them: write "
        "steps instead, which is that number divided by updates_per_rollout",
        unset=(-1,),
    ),
    *rows("TRL", 2.0, "epochs", "num_train_epochs"),
    *rows("TRL", "rows.jsonl", "data", "dataset_name"),
    *rows("TRL", "file.py:reward_fn", "reward", "reward_funcs"),
    *rows("TRL", 4, "responses_per_prompt", "num_generations"),
    *rows("TRL", 99, "rollout.max_tokens", "max_completion_length", "response_length"),
    Alias(
        "num_iterations",
        ("epochs_per_rollout",),
        "TRL",
        2,
        implies={"updates_per_rollout": as_many},
        note="with as many updates_per_rollout unless you name them",
        means="the passes over the answers of each rollout",
    ),
    *(
        Alias(
            old,
            ("epochs_per_rollout",),
            "TRL",
            2,
            implies={"updates_per_rollout": as_many},
            note="with as many updates_per_rollout unless you name them",
        )
        for old in ("num_ppo_epochs", "ppo_epochs")
    ),
    Alias("epsilon", ("clip.low",), "TRL", 0.3, note="and clip.high, unless that is given"),
    *rows("TRL", 0.3, "clip.high", "epsilon_high"),
    *rows("TRL", 4.0, "clip.dual", "delta"),
    *rows("TRL", 2.0, "loss.tau_pos", "sapo_temperature_pos"),
    *rows("TRL", 2.0, "loss.tau_neg", "sapo_temperature_neg"),
    *rows("TRL", True, "loss.mask_truncated", "mask_truncated_completions"),
    *rows("TRL", True, "adv.whiten", "normalize_advantages"),
    *rows("TRL", True, "kl.corrected", "use_bias_correction_kl"),
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
        commands=_RL,
    ),
    Alias("loss_type", ("loss",), "TRL", "hinge", _only, commands=("dpo",)),
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
    *rows("TRL", "bfloat16", "dtype", "torch_dtype"),
    Alias("use_cpu", ("device",), "TRL", True, values={True: "cpu"}, otherwise="write device", unset=(False,)),
    Alias(
        "report_to",
        ("log.tensorboard",),
        "TRL",
        "none",
        values={"none": False, "tensorboard": True},
        otherwise="write none or tensorboard: other trackers are not here yet",
    ),
    *rows("TRL", True, "compile", "torch_compile"),
    *rows("TRL", True, "micro.gradient_checkpointing", "activation_checkpointing"),
    Alias("resume_from_checkpoint", ("resume",), "TRL", True, _last_one, note="true there is auto here"),
    *rows("TRL", 3, "keep", "save_total_limit"),
    *rows("TRL", "cosine", "optim.schedule", "lr_scheduler_type"),
    *rows("TRL", 1e-6, "optim.eps", "adam_epsilon"),
    *rows("TRL", 0.01, "centring", "center_rewards_coefficient"),
    Alias("max_seq_length", ("max_length",), "TRL", 512, commands=("sft",)),
    Alias("dataset_text_field", ("text_key",), "TRL", "text", commands=("sft",)),
    *rows("TRL", "{{ messages }}", "chat_template", "chat_template_path"),
    *rows("TRL", 8, "lora.rank", "lora_r"),
    *rows("TRL", ["q_proj"], "lora.target", "lora_target_modules"),
)

_ANSWERS_ONLY = "only answers are learnt; a text of text_key, which has none, is learnt whole"

_FIXED: tuple[Row, ...] = (
    Fixed("repetition_penalty", (1, 1.0), "TRL", "the learner could not compute probabilities with a penalty"),
    Fixed("use_vllm", (False,), "TRL", "NovaRL samples by an engine of its own"),
    Fixed("fp16", (False,), "TRL", "there is no float16, only bf16=true, which is dtype=bfloat16", TRAINING),
    Fixed(
        "shuffle_dataset", (True,), "TRL", "rows come in an order drawn from the seed, another in each epoch", TRAINING
    ),
    Fixed("disable_dropout", (True,), "TRL", "models are trained without dropout", TRAINING),
    Fixed("assistant_only_loss", (True,), "TRL", _ANSWERS_ONLY, ("sft",)),
    Fixed("completion_only_loss", (True,), "TRL", _ANSWERS_ONLY, ("sft",)),
    Fixed(
        "packing", (True, False), "TRL", "rows are always packed and never see each other; a batch is of rows", ("sft",)
    ),
    Fixed("top_entropy_quantile", (1, 1.0), "TRL", "every token of an answer is learnt from"),
    Fixed("multi_objective_aggregation", ("sum_then_normalize",), "TRL", "rewards are summed, then compared"),
    Fixed("use_adaptive_entropy", (False,), "TRL", "its controller differs from ours, which is entropy.target"),
    Fixed("whiten_rewards", (False,), "TRL", "write adv.whiten=true, which whitens advantages"),
    Fixed(
        "missing_eos_penalty", (None,), "TRL", "a reward of your own may subtract it; or use loss.mask_truncated=true"
    ),
    Fixed("truncation_mode", ("keep_start",), "TRL", "a long row loses its end; on_long has other ways", ("sft",)),
    Fixed("f_divergence_type", ("reverse_kl",), "TRL", "the losses are of the reverse KL", ("dpo",)),
    Fixed("use_weighting", (False,), "TRL", "pairs are not weighted", ("dpo",)),
    Fixed("label_smoothing_factor", (0, 0.0), "TRL", "the loss of tokens is not smoothed", TRAINING),
    *(
        Fixed(name, (False,), "TRL", f"{what} is not supported yet", TRAINING)
        for name, what in (
            ("activation_offloading", "offloading to the CPU's memory"),
            ("load_in_4bit", "quantised training"),
            ("load_in_8bit", "quantised training"),
            ("use_dora", "DoRA"),
            ("use_rslora", "rank-stabilised LoRA"),
        )
    ),
    Fixed("lora_task_type", ("CAUSAL_LM",), "TRL", "adapters are for language models", TRAINING),
)

_OWN_ENGINE = "NovaRL samples by an engine of its own, on the weights that it trains"
_ROWS_AT_HAND = "rows are read once, before the first step, and none is left out"
_MICRO = "micro-batches follow micro.max_tokens and change no result"
_OUT = "leave it out"
_PROMPTS = "write prompts_per_rollout: the answers of a step divided by responses_per_prompt"

_HINTS: tuple[Row, ...] = (
    *hinted(
        "TRL",
        "TRL counts the answers on one device in one pass; prompts_per_rollout counts the prompts of a step, whole",
        _PROMPTS,
        "per_device_train_batch_size",
        commands=_RL,
    ),
    *hinted(
        "TRL", "TRL counts answers; prompts_per_rollout counts prompts", _PROMPTS, "generation_batch_size", commands=_RL
    ),
    *hinted(
        "TRL",
        "TRL counts the rows on one device in one pass; batch_size counts those of an update, whole",
        "write batch_size: the product with gradient_accumulation_steps and the devices",
        "per_device_train_batch_size",
        commands=ON_ROWS,
    ),
    *hinted(
        "TRL",
        _MICRO,
        "leave it out; prompts_per_rollout is the whole step's, all devices together",
        "gradient_accumulation_steps",
        commands=_RL,
    ),
    *hinted(
        "TRL",
        _MICRO,
        "leave it out; batch_size is the whole update's, all devices together",
        "gradient_accumulation_steps",
        commands=ON_ROWS,
    ),
    *hinted("TRL", "how evaluations are cut up changes no result", _OUT, "per_device_eval_batch_size"),
    *hinted(
        "TRL", "how evaluations are cut up changes no result", _OUT, "eval_accumulation_steps", "eval_do_concat_batches"
    ),
    *hinted(
        "TRL",
        "TRL counts passes of one device; updates_per_rollout counts optimiser updates",
        "leave it out, or write updates_per_rollout",
        "steps_per_generation",
        "num_mini_batches",
        "mini_batch_size",
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "every step is logged, in metrics.jsonl",
        _OUT,
        *(f"logging_{name}" for name in ("steps", "strategy", "first_step", "nan_inf_filter")),
        *("log_on_each_node", "include_num_input_tokens_seen", "log_level", "log_level_replica"),
    ),
    *hinted("TRL", "log.console=false is quiet", "leave it out, or write log.console=false", "disable_tqdm"),
    *hinted("TRL", "all of a run's logs are in its run_dir", "leave it out, or write run_dir", "logging_dir"),
    *hinted(
        "TRL", "save_every says when: each so many steps, or null", "leave it out, or write save_every", "save_strategy"
    ),
    *hinted("TRL", "a checkpoint holds all that resuming needs", _OUT, "save_only_model", "save_on_each_node"),
    *hinted("TRL", "a signal saves a checkpoint and ends the run", _OUT, "enable_jit_checkpoint"),
    *hinted("TRL", "a resumed run goes on exactly where it stopped", _OUT, "ignore_data_skip"),
    *hinted("TRL", "a resumed run goes on exactly where it stopped", _OUT, "restore_callback_states_from_checkpoint"),
    *hinted(
        "TRL",
        "eval_every says when: each so many steps, or null",
        "leave it out, or write eval_every",
        *("eval_strategy", "evaluation_strategy", "eval_delay"),
    ),
    *hinted(
        "TRL",
        "what was best on held-out rows is kept as well, by keep_best",
        _OUT,
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ),
    *hinted(
        "TRL",
        "nothing is uploaded",
        _OUT,
        *("push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo", "hub_always_push"),
        *(
            "hub_revision",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "log_completions_hub_repo",
        ),
    ),
    *hinted(
        "TRL",
        _OWN_ENGINE,
        _OUT,
        *(f"vllm_{name}" for name in ("mode", "model_impl", "gpu_memory_utilization", "max_model_length")),
        *(f"vllm_{name}" for name in ("server_base_url", "server_host", "server_port", "server_timeout", "group_port")),
        *("vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex"),
        *("cache_implementation", "generation_kwargs", "ds3_gather_for_generation", "use_transformers_paged"),
        *("use_transformers_continuous_batching", "transformers_continuous_batching_config"),
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "the sampler is the learner's own model, and the ratio to other weights is corrected where there are any",
        "leave it out, or write correction.type=token, or sequence, and correction.tis_max",
        *(f"vllm_importance_sampling_{name}" for name in ("correction", "mode", "cap", "clip_max", "clip_min")),
        commands=_RL,
    ),
    *hinted(
        "TRL",
        _ROWS_AT_HAND,
        _OUT,
        *(f"dataloader_{name}" for name in ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")),
        *(f"dataloader_{name}" for name in ("drop_last", "multiprocessing_context", "in_order")),
        *("dataset_num_proc", "dataset_kwargs", "dataset_streaming", "train_sampling_strategy", "length_column_name"),
        *("pad_to_multiple_of", "padding_free", "packing_strategy", "eval_packing"),
    ),
    *hinted("TRL", "a reward is given every column of its row", _OUT, "remove_unused_columns", "label_names"),
    *hinted(
        "TRL",
        "the part of a published data set is written after its name",
        "write data=NAME@SPLIT",
        *("dataset_train_split", "dataset_test_split", "dataset_config"),
    ),
    *hinted(
        "TRL",
        "all that is drawn is drawn from one seed, each purpose by itself",
        "leave it out, or write seed",
        "data_seed",
    ),
    *hinted("TRL", "the same seed gives the same run, bit for bit", _OUT, "full_determinism"),
    *hinted(
        "TRL", "where memory runs out a micro-batch is split and tried again, in any run", _OUT, "auto_find_batch_size"
    ),
    *hinted("TRL", "memory is given back where it runs short", _OUT, "torch_empty_cache_steps", "skip_memory_metrics"),
    *hinted("TRL", "a run is evaluated before its first step", _OUT, "eval_on_start"),
    *hinted("TRL", "what is measured on held-out rows is fixed", _OUT, "include_for_metrics", "batch_eval_metrics"),
    *hinted(
        "TRL", "what is measured on held-out rows is fixed", _OUT, "prediction_loss_only", "eval_use_gather_object"
    ),
    *hinted("TRL", "a run is called by its directory", "leave it out, or write run_dir", "run_name", "project"),
    *hinted(
        "TRL",
        "a directory that holds a run is never written over",
        "leave it out, or write another run_dir",
        "overwrite_output_dir",
    ),
    *hinted("TRL", "each command does one thing: novarl rl trains, novarl eval evaluates", _OUT, "do_train", "do_eval"),
    *hinted("TRL", "each command does one thing: novarl rl trains, novarl eval evaluates", _OUT, "do_predict"),
    *hinted("TRL", "it has no settings", _OUT, "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
    *hinted("TRL", "a cache of keys and values is used where it helps", _OUT, "use_cache"),
    *hinted("TRL", "it has no settings", _OUT, "torch_compile_backend", "torch_compile_mode"),
    *hinted(
        "TRL",
        "NovaRL has kernels of its own, and chooses them itself",
        _OUT,
        *("use_liger_loss", "use_liger_kernel", "liger_kernel_config", "cast_lm_head_to_fp32", "tf32"),
    ),
    *hinted("TRL", "evaluations are computed as training is", _OUT, "bf16_full_eval", "fp16_full_eval"),
    *hinted(
        "TRL",
        "the two are one key here, and TRL's are 0.9 and 0.999 unless given",
        "write optim.betas=[0.9, 0.999]",
        *("adam_beta1", "adam_beta2"),
    ),
    *hinted("TRL", "AdamW is the optimiser, and it has no other settings", _OUT, "optim_args", "optim_target_modules"),
    *hinted("TRL", "a mean over tokens is over all devices'", _OUT, "average_tokens_across_devices"),
    *hinted(
        "TRL", "warm-up is counted in updates", "write optim.warmup_steps: that share of all updates", "warmup_ratio"
    ),
    *hinted(
        "TRL",
        "of a schedule there are optim.schedule, optim.warmup_steps and optim.min_lr_ratio",
        "write these",
        "lr_scheduler_kwargs",
    ),
    *hinted("TRL", "noise on embeddings is not supported", _OUT, "neftune_noise_alpha"),
    *hinted(
        "TRL",
        "a lora.rank above 0 says that adapters are trained",
        "for true write lora.rank=16, for false leave it out",
        "use_peft",
    ),
    *hinted("TRL", "adapters are on linear layers, which lora.target names", _OUT, "lora_target_parameters"),
    *hinted("TRL", "adapters are on linear layers, which lora.target names", _OUT, "lora_modules_to_save"),
    *hinted("TRL", "quantised training is not supported yet", _OUT, "bnb_4bit_quant_type", "use_bnb_nested_quant"),
    *hinted("TRL", "quantised training is not supported yet", _OUT, "bnb_4bit_quant_storage"),
    *hinted(
        "TRL",
        "a model is loaded as its folder says; dtype, attn and device are keys",
        "leave it out, or write these",
        *("model_init_kwargs", "model_revision", "router_aux_loss_coef"),
    ),
    *hinted(
        "TRL",
        "the end of a turn is the chat template's",
        "leave it out, or write rollout.stop",
        "eos_token",
        commands=_RL,
    ),
    *hinted("TRL", "the end of a turn is the chat template's", _OUT, "eos_token", "pad_token", commands=ON_ROWS),
    *hinted(
        "TRL",
        "for rl the length of a run is counted in rollouts",
        "write steps: once through the rows is their number divided by prompts_per_rollout",
        "num_train_epochs",
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "an answer is printed each log.samples_every steps, and all are written each log.rollouts_every",
        _OUT,
        *("log_completions", "num_completions_to_print", "log_unique_prompts", "log_multimodal"),
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "it goes with the algorithm: of algo=gspo the ratio is the answer's, of most others the token's",
        "for sequence write algo=gspo, for token leave it out",
        "importance_sampling_level",
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "pass@k of held-out rows is eval.k samples",
        "leave it out, or write eval.k",
        "num_generations_eval",
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "the most turns are rollout.max_turns",
        "write rollout.max_turns",
        "max_tool_calling_iterations",
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "an entropy is held by entropy.target, which moves entropy.coef by factors",
        "leave it out, or write entropy.target",
        *(f"entropy_{name}" for name in ("coef_min", "coef_max", "coef_delta", "target")),
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "whole answers are masked by their ratio, not by their KL",
        "leave it out, or write correction.type=sequence_mask",
        "off_policy_mask_threshold",
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "there is no such surrogate",
        "leave it out, or write loss.surrogate",
        *(f"vespo_{name}" for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")),
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "a reference that moves is kl.reference=ema, with kl.ema_decay as the share of the past at each step",
        "write kl.reference=ema, or leave it out: the reference stands still",
        *("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        commands=_RL,
    ),
    *hinted(
        "TRL",
        "the reference is the model as it was at the start",
        _OUT,
        *("ref_model", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        commands=("dpo", "rm"),
    ),
    *hinted(
        "TRL",
        "the reference's log-probabilities are computed once, before the first step",
        _OUT,
        *("precompute_ref_log_probs", "precompute_ref_batch_size"),
        commands=("dpo",),
    ),
    *hinted(
        "TRL",
        "one loss is minimised, the one that loss names",
        "leave it out, or write loss",
        *("loss_weights", "ld_alpha", "rpo_alpha", "discopop_tau", "f_alpha_divergence_coef"),
        commands=("dpo",),
    ),
    *hinted("TRL", "the loss is the mean negative log-likelihood of tokens", _OUT, "loss_type", commands=("sft",)),
    *hinted(
        "TRL",
        "max_length bounds prompt and answer together; where it is exceeded, half of it is the prompt's",
        "write max_length",
        *("max_prompt_length", "max_completion_length"),
        commands=("dpo", "rm"),
    ),
    *hinted(
        "TRL",
        "on_long says what a long row loses",
        "leave it out, or write on_long",
        "truncation_mode",
        commands=("dpo", "rm"),
    ),
    *later("TRL", "sharded models", _OUT, "fsdp", commands=("dpo", "rm")),
    *later("TRL", "settings of sharded models", _OUT, "fsdp_config", "deepspeed", "parallelism_config"),
    *hinted(
        "TRL",
        "processes are started with torchrun, and need no settings",
        _OUT,
        *(f"ddp_{name}" for name in ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")),
        *("ddp_backend", "ddp_timeout", "accelerator_config", "local_rank", "debug", "ignore_bias_buffers"),
    ),
)

ROWS: tuple[Row, ...] = (*_ALIASES, *_FIXED, *_HINTS)
"""Of two rows with one name, each is for other commands."""
