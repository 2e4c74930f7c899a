"""OpenRLHF's flags: those of its newest command line (`--rollout.batch_size`), and the earlier ones (`--eps_clip`)."""

from __future__ import annotations

from novarl.config.foreign.rows import (
    ON_ROWS,
    TRAINING,
    Alias,
    Fixed,
    Row,
    as_many,
    hinted,
    later,
    never_at_minus_one,
    rows,
)

_RL = ("rl",)
_OUT = "leave it out"
_CURVES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}
_OWN_ENGINE = "NovaRL samples with its own engine, on the weights that it trains"

_ALIASES: tuple[Row, ...] = (
    *rows("OpenRLHF", "small", "model", "pretrain", "actor.model_name_or_path", "model.model_name_or_path"),
    *rows("OpenRLHF", "rows.jsonl", "data", "prompt_data", "data.prompt_dataset", commands=_RL),
    *rows("OpenRLHF", "rows.jsonl", "data", "dataset", "data.dataset", commands=ON_ROWS),
    *rows("OpenRLHF", "held_out.jsonl", "eval.data", "eval_dataset", "eval.dataset"),
    *rows("OpenRLHF", "question", "prompt_key", "input_key", "data.input_key"),
    *rows("OpenRLHF", "solution", "answer_key", "label_key", "data.label_key", commands=_RL),
    *rows("OpenRLHF", "response", "completion_key", "output_key", "data.output_key", commands=("sft",)),
    *rows("OpenRLHF", "better", "chosen_key", "data.chosen_key"),
    *rows("OpenRLHF", "worse", "rejected_key", "data.rejected_key"),
    *rows("OpenRLHF", False, "apply_chat_template", "data.apply_chat_template"),
    *rows("OpenRLHF", "{{ messages }}", "chat_template", "tokenizer_chat_template", "data.tokenizer_chat_template"),
    *rows("OpenRLHF", 4, "prompts_per_rollout", "rollout_batch_size", "rollout.batch_size"),
    *rows("OpenRLHF", 4, "responses_per_prompt", "n_samples_per_prompt", "rollout.n_samples_per_prompt"),
    *rows("OpenRLHF", 64, "batch_size", "train_batch_size", "train.batch_size", commands=ON_ROWS),
    *(
        Alias(
            old,
            ("epochs_per_rollout",),
            "OpenRLHF",
            2,
            implies={"updates_per_rollout": as_many},
            note="with as many updates_per_rollout unless you name them",
            commands=_RL,
        )
        for old in ("max_epochs", "train.max_epochs")
    ),
    *rows("OpenRLHF", 2.0, "epochs", "max_epochs", "train.max_epochs", commands=ON_ROWS),
    *rows("OpenRLHF", 512, "max_length", "max_len", "data.max_len", commands=ON_ROWS),
    *rows("OpenRLHF", 99, "rollout.max_tokens", "generate_max_len", "rollout.max_new_tokens"),
    *rows("OpenRLHF", 100, "max_length", "prompt_max_len", commands=_RL),
    *(Alias(old, ("clip.low", "clip.high"), "OpenRLHF", 0.1) for old in ("eps_clip", "actor.eps_clip")),
    *(
        Alias(old, ("clip.low", "clip.high"), "OpenRLHF", [0.1, 0.3], each=True)
        for old in ("eps_clip_low_high", "actor.eps_clip_low_high")
    ),
    *rows("OpenRLHF", 4.0, "clip.dual", "dual_clip", "actor.dual_clip"),
    *rows("OpenRLHF", 0.3, "critic.clip", "value_clip", "critic.value_clip"),
    *rows("OpenRLHF", 0.95, "adv.lam", "lambd", "algo.advantage.lambd"),
    *rows("OpenRLHF", 0.99, "adv.gamma", "algo.advantage.gamma"),
    *(
        Alias(
            old,
            ("adv.estimator",),
            "OpenRLHF",
            "rloo",
            values={"gae": "gae", "rloo": "leave_one_out"},
            elsewhere={
                "reinforce": ("no baseline and advantages whitened", "adv.estimator=none adv.whiten=true"),
                "reinforce_baseline": (
                    "the group's mean and advantages whitened",
                    "adv.estimator=group adv.whiten=true",
                ),
                "group_norm": ("an algorithm", "algo=grpo"),
                "dr_grpo": ("an algorithm", "algo=dr_grpo"),
            },
            otherwise="write adv.estimator",
        )
        for old in ("advantage_estimator", "algo.advantage.estimator")
    ),
    *(
        Alias(
            old,
            ("adv.norm_std",),
            "OpenRLHF",
            True,
            values={True: False},
            otherwise="write adv.norm_std",
            unset=(False,),
        )
        for old in ("no_advantage_std_norm", "algo.advantage.no_std_norm")
    ),
    *(
        Alias(
            old,
            ("kl.coef",),
            "OpenRLHF",
            0.1,
            implies={"kl.type": "reward"},
            note="with kl.type=reward unless you name one or write use_kl_loss",
        )
        for old in ("algo.kl.init_coef",)
    ),
    *(
        Alias(
            old,
            ("kl.type",),
            "OpenRLHF",
            True,
            values={True: "loss"},
            otherwise="write kl.type",
            unset=(False,),
        )
        for old in ("use_kl_loss", "algo.kl.use_loss")
    ),
    *rows("OpenRLHF", "k3", "kl.estimator", "kl_estimator", "algo.kl.estimator"),
    *rows("OpenRLHF", 0.01, "entropy.coef", "entropy_loss_coef", "actor.entropy_coef"),
    *(
        Alias(
            old,
            ("loss.surrogate",),
            "OpenRLHF",
            "gspo",
            values={"ppo": "ppo_clip", "gspo": "gspo"},
            otherwise="write loss.surrogate",
        )
        for old in ("policy_loss_type", "actor.policy_loss_type")
    ),
    *rows("OpenRLHF", True, "dynamic_sampling.enabled", "algo.dynamic_filtering_enable"),
    *(
        Alias(
            old,
            ("rollout.staleness",),
            "OpenRLHF",
            True,
            values={True: 1, False: 0},
            otherwise="write rollout.staleness",
        )
        for old in ("async_train", "train.async_enable")
    ),
    *(
        Alias(old, ("critic.warmup_steps",), "OpenRLHF", 2, unset=(-1,))
        for old in ("freezing_actor_steps", "critic.freezing_steps")
    ),
    *rows("OpenRLHF", 1e-5, "optim.lr", "actor_learning_rate", "actor.adam.lr", "adam.lr"),
    *rows("OpenRLHF", 1e-5, "critic.lr", "critic_learning_rate", "critic.adam.lr"),
    *rows("OpenRLHF", [0.9, 0.99], "optim.betas", "adam_betas", "actor.adam.betas", "adam.betas"),
    *rows("OpenRLHF", 1e-6, "optim.eps", "actor.adam.eps", "adam.eps"),
    *rows("OpenRLHF", 0.01, "optim.weight_decay", "l2", "actor.adam.weight_decay", "adam.weight_decay"),
    *rows("OpenRLHF", 0.5, "optim.max_grad_norm", "max_norm", "actor.max_norm"),
    *(
        Alias(
            old,
            ("optim.schedule",),
            "OpenRLHF",
            "cosine",
            values=_CURVES,
            elsewhere={
                "cosine_with_min_lr": ("a schedule with an end", "optim.schedule=cosine optim.min_lr_ratio=0.1")
            },
            otherwise="write optim.schedule",
        )
        for old in ("lr_scheduler", "actor.lr_scheduler")
    ),
    *rows("OpenRLHF", 0.2, "optim.min_lr_ratio", "min_lr_ratio", "actor.min_lr_ratio"),
    *rows("OpenRLHF", 4096, "micro.max_tokens", "train_max_tokens_per_gpu", "train.max_tokens_per_gpu"),
    *rows(
        "OpenRLHF",
        True,
        "micro.gradient_checkpointing",
        *("actor.gradient_checkpointing_enable", "model.gradient_checkpointing_enable"),
    ),
    *rows("OpenRLHF", 8, "lora.rank", "ds.lora.rank"),
    *rows("OpenRLHF", 32.0, "lora.alpha", "ds.lora.alpha"),
    *rows("OpenRLHF", ["q_proj"], "lora.target", "ds.lora.target_modules"),
    Alias(
        "ds.attn_implementation",
        ("attn",),
        "OpenRLHF",
        "flash_attention_2",
        values={"flash_attention_2": "flash", "sdpa": "sdpa", "eager": "eager"},
        otherwise="write attn=auto, sdpa, flash or eager",
    ),
    *(
        Alias(
            old,
            ("dtype",),
            "OpenRLHF",
            "bf16",
            values={"bf16": "bfloat16"},
            otherwise="write dtype=bfloat16 or float32",
        )
        for old in ("param_dtype", "ds.param_dtype")
    ),
    *(Alias(old, ("save_every",), "OpenRLHF", 5, never_at_minus_one) for old in ("ckpt.save_steps",)),
    *(Alias(old, ("eval_every",), "OpenRLHF", 5, never_at_minus_one) for old in ("eval.steps",)),
    *rows("OpenRLHF", "runs/x", "run_dir", "save_path", "ckpt.output_dir"),
    *rows("OpenRLHF", 3, "keep", "max_ckpt_num", "ckpt.max_num"),
    *(
        Alias(
            old,
            ("resume",),
            "OpenRLHF",
            True,
            values={True: "auto", False: None},
            otherwise="write resume=auto, or a path",
        )
        for old in ("load_checkpoint", "ckpt.load_enable")
    ),
    *rows("OpenRLHF", 3, "seed", "train.seed"),
    *rows("OpenRLHF", 4, "eval.k", "eval_n_samples_per_prompt", "eval.n_samples_per_prompt"),
    *rows("OpenRLHF", 0.5, "eval.temperature", "eval_temperature"),
    *rows("OpenRLHF", 0.2, "beta", "model.beta", commands=("dpo",)),
    *rows("OpenRLHF", 0.1, "label_smoothing", "model.label_smoothing", commands=("dpo",)),
    *(
        Alias(
            old,
            ("loss",),
            "OpenRLHF",
            True,
            values={True: "ipo"},
            otherwise="write loss",
            unset=(False,),
            commands=("dpo",),
        )
        for old in ("ipo", "model.ipo_enable")
    ),
)

_FIXED: tuple[Row, ...] = (
    *(
        Fixed(old, (True,), "OpenRLHF", "rows are always packed and never see each other", TRAINING)
        for old in ("packing_samples", "ds.packing_samples")
    ),
    *(
        Fixed(old, (False,), "OpenRLHF", "every answer is finished in its own step")
        for old in ("partial_rollout", "train.partial_rollout_enable")
    ),
    Fixed("ds.lora.dropout", (0, 0.0), "OpenRLHF", "adapters are trained without dropout", TRAINING),
    *(
        Fixed(old, (0, 0.0), "OpenRLHF", "the loss that balances experts is not added", TRAINING)
        for old in ("aux_loss_coef", "actor.aux_loss_coef", "model.aux_loss_coef")
    ),
    *(
        Fixed(old, (0, 0.0), "OpenRLHF", "there is no second loss; loss=orpo or dpop have one of their own", ("dpo",))
        for old in ("nll_loss_coef", "model.nll_loss_coef")
    ),
    Fixed("model.loss_type", ("sigmoid",), "OpenRLHF", "it is loss=bt", ("rm",)),
    Fixed("actor.optim", ("adam",), "OpenRLHF", "AdamW is the optimiser", TRAINING),
)

_HINTS: tuple[Row, ...] = (
    *hinted(
        "OpenRLHF",
        "OpenRLHF counts the answers of one update; here the answers of a step are shared among updates_per_rollout",
        "write updates_per_rollout: rollout_batch_size times n_samples_per_prompt divided by train_batch_size, times "
        "epochs_per_rollout",
        *("train_batch_size", "train.batch_size"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "for rl the length of a run is counted in rollouts",
        "write steps: once through the rows is their number divided by prompts_per_rollout",
        *("num_episodes", "train.num_episodes"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "OpenRLHF bounds prompt and answer together; max_length bounds the prompt, rollout.max_tokens the answer",
        "write both",
        *("max_len", "data.max_len"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "micro-batches follow micro.max_tokens and change no result",
        _OUT,
        *("micro_train_batch_size", "train.micro_batch_size", "micro_rollout_batch_size", "rollout.micro_batch_size"),
        *(
            "use_dynamic_batch",
            "train.dynamic_batch_enable",
            "rollout_max_tokens_per_gpu",
            "rollout.max_tokens_per_gpu",
        ),
    ),
    *hinted(
        "OpenRLHF",
        "rewards are functions of your own, which may call a server",
        "write reward=file.py:name",
        *("remote_rm_url", "reward.remote_url"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "a reward model is a run of novarl rm",
        "write reward=model:RUN",
        *("reward_pretrain", "reward.model_name_or_path"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "rewards are used as they are; adv.norm_std and adv.whiten scale advantages",
        "leave it out, or do it in the reward function",
        *("normalize_reward", "reward.normalize_enable", "reward_clip_range", "reward.clip_range"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "a penalty on long answers is a reward of its own",
        "add a reward, or write loss.mask_truncated=true",
        *("overlong_buffer_len", "reward.overlong_buffer_len", "overlong_penalty_factor"),
        *("reward.overlong_penalty_factor", "stop_properly_penalty_coef", "reward.stop_properly_penalty_coef"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "an agent is a file with interact(messages)",
        "write rollout.env_path=file.py and rollout.max_turns",
        *("agent_func_path", "train.agent_func_path"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "groups are replaced where all their rewards are equal, whatever they are",
        "leave it out",
        *("dynamic_filtering_reward_range", "algo.dynamic_filtering_range"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "the KL coefficient moves by adaptive_kl",
        "write adaptive_kl.enabled=true adaptive_kl.controller_type=ziegler, and its target_kl and horizon",
        *("kl_horizon", "algo.kl.target", "algo.kl.horizon"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "the sampler is the learner's own model, and the ratio to other weights is corrected where there are any",
        "leave it out, or write correction.type: token, icepop or sequence_mask",
        *("enable_vllm_is_correction", "vllm_enable_is_correction", "vllm_is_truncated_threshold"),
        *("vllm_is_correction_type", "algo.advantage.is_correction_enable", "algo.advantage.is_correction_threshold"),
        "algo.advantage.is_correction_type",
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        _OWN_ENGINE,
        _OUT,
        *("vllm", "vllm_num_engines", "vllm_sync_backend", "vllm_sync_with_ray", "vllm_enable_sleep", "enforce_eager"),
        *("enable_prefix_caching", "vllm_generate_batch_size", "rollout.vllm_generate_batch_size", "async_queue_size"),
        "train.async_queue_size",
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "processes are started with torchrun, and each holds the policy, the critic and the reference",
        _OUT,
        *(f"{part}{end}" for part in ("ref", "actor", "critic", "reward") for end in ("_num_nodes", ".num_nodes")),
        *(f"{part}_num_gpus_per_node" for part in ("ref", "actor", "critic", "reward")),
        *(f"{part}.num_gpus_per_node" for part in ("ref", "actor", "critic", "reward")),
        *("colocate_all_models", "colocate_actor_ref", "colocate_critic_reward", "train.colocate_all"),
        *("train.colocate_actor_ref", "train.colocate_critic_reward", "actor_init_on_gpu"),
        commands=_RL,
    ),
    *hinted(
        "OpenRLHF",
        "the critic starts as the policy; of its own it has critic.lr and critic.updates_per_rollout",
        _OUT,
        *("critic_pretrain", "critic.model_name_or_path", "save_value_network", "critic.save_value_network"),
        *("critic.adam", "critic.lr_scheduler", "critic.lr_warmup_ratio", "critic.min_lr_ratio", "critic.max_norm"),
        commands=_RL,
    ),
    *hinted("OpenRLHF", "AdamW is the optimiser", _OUT, "muon", "actor.muon", "critic.muon"),
    *hinted(
        "OpenRLHF",
        "warm-up is counted in updates",
        "write optim.warmup_steps: that share of all updates",
        *("lr_warmup_ratio", "actor.lr_warmup_ratio"),
    ),
    *hinted(
        "OpenRLHF",
        "a template of another form",
        "write chat_template, in Jinja, or apply_chat_template=false",
        *("input_template", "data.input_template"),
    ),
    *hinted(
        "OpenRLHF",
        "the part of a published data set is written after its name",
        "write data=NAME@SPLIT",
        *("prompt_split", "data.prompt_split", "dataset_split", "data.dataset_split", "train_split"),
        *("eval_split", "eval.split"),
    ),
    *hinted(
        "OpenRLHF",
        "all rows of one file or data set are read",
        "leave it out, or prepare the file",
        *("max_samples", "data.max_samples", "prompt_data_probs", "data.prompt_probs", "dataset_probs"),
        *("data.dataset_probs", "data.dataloader_num_workers", "data.disable_fast_tokenizer", "disable_fast_tokenizer"),
    ),
    *hinted("OpenRLHF", "conversations of several turns are always read", _OUT, "multiturn", "data.multiturn"),
    *hinted("OpenRLHF", "a text is learnt whole where text_key names its column", "write text_key", "pretrain_mode"),
    *hinted(
        "OpenRLHF",
        "a text is learnt whole where text_key names its column",
        "write text_key",
        "model.pretrain_mode_enable",
    ),
    *hinted("OpenRLHF", "images are not supported yet", _OUT, "image_key", "data.image_key", "max_images_per_prompt"),
    *hinted("OpenRLHF", "images are not supported yet", _OUT, "data.max_images_per_prompt", "freeze_visual_encoder"),
    *hinted("OpenRLHF", "images are not supported yet", _OUT, "actor.freeze_visual_encoder"),
    *hinted(
        "OpenRLHF",
        "the reference is the model as it was at the start",
        "leave it out; for rl another one is kl.reference=PATH",
        *(
            "ref_pretrain",
            "ref.model_name_or_path",
            "ref_reward_offload",
            "ref_offload",
            "ref.offload",
            "reward.offload",
        ),
    ),
    *hinted("OpenRLHF", "no average of the weights is saved", _OUT, "enable_ema", "train.enable_ema", "train.ema_beta"),
    *hinted("OpenRLHF", "the same seed gives the same run, bit for bit", _OUT, "train.full_determinism_enable"),
    *hinted(
        "OpenRLHF",
        "a margin is read where a row has one, or is margin",
        "leave it out",
        "margin_loss",
        commands=("rm",),
    ),
    *hinted(
        "OpenRLHF",
        "a margin is read where a row has one, or is margin",
        _OUT,
        "model.margin_loss_enable",
        commands=("rm",),
    ),
    *hinted("OpenRLHF", "the loss is always computed in float32", _OUT, "compute_fp32_loss", commands=("rm",)),
    *hinted(
        "OpenRLHF", "the loss is always computed in float32", _OUT, "model.compute_fp32_loss_enable", commands=("rm",)
    ),
    *hinted("OpenRLHF", "there is no second loss", _OUT, "ptx_coef", commands=_RL),
    *hinted(
        "OpenRLHF",
        "checkpoints are in run_dir, and hold the model in Hugging Face's form; keep says how many, keep_best the best",
        "leave it out, or write these",
        *("ckpt", "ckpt_path", "save_hf_ckpt", "disable_ds_ckpt", "max_ckpt_mem", "best_metric_key"),
        "use_ds_universal_ckpt",
    ),
    *later(
        "OpenRLHF",
        "experiment trackers. metrics.jsonl and tb/ in run_dir hold the curves",
        "leave it out, or write log.tensorboard",
        *("use_wandb", "wandb_org", "wandb_group", "wandb_project", "wandb_run_name", "use_tensorboard", "logger"),
    ),
    *later(
        "OpenRLHF",
        "sharded models and offloading",
        _OUT,
        *("ds", "zero_stage", "zpg", "adam_offload", "overlap_comm", "grad_accum_dtype", "ds_tensor_parallel_size"),
        *("deepspeed_enable_sleep", "deepcompile", "ring_attn_size", "ring_head_stride"),
    ),
    *hinted(
        "OpenRLHF",
        "gradient checkpointing has no settings",
        _OUT,
        *("gradient_checkpointing_use_reentrant", "actor.gradient_checkpointing_reentrant"),
        "model.gradient_checkpointing_reentrant",
    ),
    *hinted("OpenRLHF", "models come from a directory or from Hugging Face", _OUT, "use_ms"),
    *hinted("OpenRLHF", "times are in metrics.jsonl", _OUT, "perf"),
    *hinted("OpenRLHF", "a reward model's head is score", _OUT, "value_head_prefix", "ds.value_head_prefix"),
)

ROWS: tuple[Row, ...] = (*_ALIASES, *_FIXED, *_HINTS)
"""Of two rows with one name, each is for other commands."""
