"""verl's dotted keys (`actor_rollout_ref.actor.clip_ratio`), and those of its supervised fine-tuning."""

from __future__ import annotations

from novarl.config.foreign.rows import ON_ROWS, TRAINING, Alias, Fixed, Row, as_many, hinted, later, rows

_RL = ("rl",)
_OUT = "leave it out"
_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
_OPTIM = f"{_ACTOR}.optim"
_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_CURVES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
_OWN_ENGINE = "NovaRL samples with its own engine, on the weights that it trains"

_ALIASES: tuple[Row, ...] = (
    *rows("verl", "rows.jsonl", "data", "data.train_files"),
    *rows("verl", "held_out.jsonl", "eval.data", "data.val_files"),
    *rows("verl", 4, "prompts_per_rollout", "data.train_batch_size", commands=_RL),
    *rows("verl", 64, "batch_size", "data.train_batch_size", commands=ON_ROWS),
    *rows("verl", 100, "max_length", "data.max_prompt_length", commands=_RL),
    *rows("verl", 99, "rollout.max_tokens", "data.max_response_length", f"{_ROLLOUT}.response_length"),
    *rows("verl", 100, "max_length", f"{_ROLLOUT}.prompt_length", commands=_RL),
    Alias(
        "data.truncation",
        ("on_long",),
        "verl",
        "left",
        values={"left": "truncate", "error": "refuse"},
        note="a row that is too long is left out and counted",
        otherwise="write on_long=truncate, by which a prompt loses its beginning, or refuse",
        commands=_RL,
    ),
    *rows("verl", "response", "completion_key", "data.response_key", commands=("sft",)),
    *rows("verl", "chat", "messages_key", "data.multiturn.messages_key", commands=("sft",)),
    *rows("verl", "{{ messages }}", "chat_template", f"{_MODEL}.custom_chat_template", "data.chat_template"),
    *rows("verl", "small", "model", f"{_MODEL}.path", "model.partial_pretrain"),
    *(
        row
        for part in (_MODEL, "model")
        for row in (
            *rows("verl", 8, "lora.rank", f"{part}.lora_rank"),
            *rows("verl", 32.0, "lora.alpha", f"{part}.lora_alpha"),
            *rows("verl", ["q_proj"], "lora.target", f"{part}.target_modules"),
            *rows("verl", True, "micro.gradient_checkpointing", f"{part}.enable_gradient_checkpointing"),
        )
    ),
    *rows("verl", 1e-5, "optim.lr", f"{_OPTIM}.lr"),
    *rows("verl", 0.02, "optim.weight_decay", f"{_OPTIM}.weight_decay"),
    *rows("verl", [0.9, 0.99], "optim.betas", f"{_OPTIM}.betas"),
    *rows("verl", 0.5, "optim.max_grad_norm", f"{_OPTIM}.clip_grad", f"{_ACTOR}.grad_clip", "optim.clip_grad"),
    *rows("verl", 0.2, "optim.min_lr_ratio", f"{_OPTIM}.min_lr_ratio"),
    Alias(f"{_OPTIM}.lr_warmup_steps", ("optim.warmup_steps",), "verl", 5, unset=(-1,)),
    *(
        Alias(old, ("optim.schedule",), "verl", "cosine", values=_CURVES, otherwise="write optim.schedule")
        for old in (f"{_OPTIM}.lr_scheduler_type", f"{_OPTIM}.warmup_style", "optim.lr_scheduler")
    ),
    Alias(f"{_ACTOR}.clip_ratio", ("clip.low", "clip.high"), "verl", 0.1),
    *rows("verl", 0.1, "clip.low", f"{_ACTOR}.clip_ratio_low"),
    *rows("verl", 0.3, "clip.high", f"{_ACTOR}.clip_ratio_high"),
    *rows("verl", 4.0, "clip.dual", f"{_ACTOR}.clip_ratio_c"),
    *rows("verl", 2.0, "loss.tau_pos", f"{_ACTOR}.tau_pos"),
    *rows("verl", 2.0, "loss.tau_neg", f"{_ACTOR}.tau_neg"),
    Alias(
        f"{_ACTOR}.loss_agg_mode",
        ("loss.agg",),
        "verl",
        "token-mean",
        values={"token-mean": "token", "seq-mean-token-mean": "sequence"},
        elsewhere={
            "seq-mean-token-sum": (
                "the mean over answers of their sums",
                "algo=reinforce or rloo with loss.agg=constant",
            ),
            "seq-mean-token-sum-norm": ("the sum over a fixed number", "algo=dr_grpo, whose mean is over answers too"),
        },
        otherwise="write loss.agg: token, sequence or constant",
    ),
    Alias(
        f"{_ACTOR}.policy_loss.loss_mode",
        ("loss.surrogate",),
        "verl",
        "gspo",
        values={"vanilla": "dual_clip", "gspo": "gspo", "gpg": "gpg", "sapo": "sapo"},
        note="vanilla also bounds the ratio of bad tokens, by clip.dual",
        otherwise="write loss.surrogate",
    ),
    *rows("verl", 0.01, "entropy.coef", f"{_ACTOR}.entropy_coeff"),
    *(
        Alias(old, ("kl.type",), "verl", True, values={True: place}, otherwise="write kl.type", unset=(False,))
        for old, place in ((f"{_ACTOR}.use_kl_loss", "loss"), ("algorithm.use_kl_in_reward", "reward"))
    ),
    *(
        Alias(
            old,
            ("kl.coef",),
            "verl",
            0.1,
            needs={"kl.type": (place,)},
            otherwise=f"verl uses it only with {switch}=true, which is kl.type={place} here",
        )
        for old, place, switch in (
            (f"{_ACTOR}.kl_loss_coef", "loss", f"{_ACTOR}.use_kl_loss"),
            ("algorithm.kl_ctrl.kl_coef", "reward", "algorithm.use_kl_in_reward"),
        )
    ),
    *(
        Alias(old, ("kl.estimator",), "verl", "low_var_kl", values=_ESTIMATORS, otherwise="write kl.estimator")
        for old in (f"{_ACTOR}.kl_loss_type", "algorithm.kl_penalty")
    ),
    Alias(
        f"{_ACTOR}.ppo_epochs",
        ("epochs_per_rollout",),
        "verl",
        2,
        implies={"updates_per_rollout": as_many},
        note="with as many updates_per_rollout unless you name them",
    ),
    *rows("verl", 4096, "micro.max_tokens", f"{_ACTOR}.ppo_max_token_len_per_gpu"),
    *rows("verl", 0.8, "rollout.temperature", f"{_ROLLOUT}.temperature"),
    *rows("verl", 0.9, "rollout.top_p", f"{_ROLLOUT}.top_p"),
    *rows("verl", 20, "rollout.top_k", f"{_ROLLOUT}.top_k"),
    *rows("verl", 4, "responses_per_prompt", f"{_ROLLOUT}.n"),
    *rows("verl", 4, "eval.k", f"{_ROLLOUT}.val_kwargs.n"),
    *rows("verl", 3, "rollout.max_turns", f"{_ROLLOUT}.multi_turn.max_assistant_turns"),
    *rows("verl", 1e-5, "critic.lr", "critic.optim.lr"),
    *rows("verl", 0.3, "critic.clip", "critic.cliprange_value"),
    *rows("verl", 2, "critic.warmup_steps", "trainer.critic_warmup"),
    Alias(
        "algorithm.adv_estimator",
        ("adv.estimator",),
        "verl",
        "rloo",
        values={"gae": "gae", "rloo": "leave_one_out", "opo": "opo", "remax": "scst"},
        elsewhere={
            "grpo": ("an algorithm", "algo=grpo"),
            "reinforce_plus_plus": ("no baseline and advantages whitened", "adv.estimator=none adv.whiten=true"),
            "reinforce_plus_plus_baseline": (
                "the group's mean and advantages whitened",
                "adv.estimator=group adv.whiten=true",
            ),
        },
        otherwise="write adv.estimator",
    ),
    *rows("verl", True, "adv.norm_std", "algorithm.norm_adv_by_std_in_grpo"),
    *rows("verl", 0.99, "adv.gamma", "algorithm.gamma"),
    *rows("verl", 0.95, "adv.lam", "algorithm.lam"),
    *rows("verl", 2.0, "epochs", "trainer.total_epochs"),
    *rows("verl", "runs/x", "run_dir", "trainer.default_local_dir"),
    *rows("verl", 3, "keep", "trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    Alias(
        "trainer.resume_mode",
        ("resume",),
        "verl",
        "auto",
        values={"auto": "auto", "disable": None},
        otherwise="write resume=auto, or a path",
    ),
    *rows("verl", "runs/x/checkpoints/step-000010", "resume", "trainer.resume_from_path"),
    *rows("verl", 3, "seed", "trainer.seed", "data.seed"),
    *rows("verl", "cpu", "device", "trainer.device"),
)

_FIXED: tuple[Row, ...] = (
    Fixed(
        "data.shuffle", (True,), "verl", "rows come in an order drawn from the seed, another in each epoch", TRAINING
    ),
    Fixed("algorithm.kl_ctrl.type", ("fixed",), "verl", "a coefficient that moves is adaptive_kl.enabled=true"),
    Fixed("algorithm.use_pf_ppo", (False,), "verl", "answers are not sampled again by their rewards"),
    Fixed("trainer.val_before_train", (True,), "verl", "a run is evaluated before its first step"),
    Fixed("trainer.val_only", (False,), "verl", "evaluation is a command: run novarl eval"),
    *(
        Fixed(old, (False,), "verl", "it takes the models whose code may run: write trust_remote_code=MODEL", TRAINING)
        for old in (f"{_MODEL}.trust_remote_code", "data.trust_remote_code", "model.trust_remote_code")
    ),
)

_HINTS: tuple[Row, ...] = (
    *hinted(
        "verl",
        "on_long says what a long row loses",
        "leave it out, or write on_long",
        "data.truncation",
        commands=ON_ROWS,
    ),
    *hinted("verl", "it is chat_template_kwargs", "write chat_template_kwargs", "data.apply_chat_template_kwargs"),
    *hinted(
        "verl",
        "verl counts the prompts of one update; here the answers of a step are shared among updates_per_rollout",
        "write updates_per_rollout: train_batch_size divided by ppo_mini_batch_size, times epochs_per_rollout",
        f"{_ACTOR}.ppo_mini_batch_size",
        commands=_RL,
    ),
    *hinted(
        "verl",
        "micro-batches follow micro.max_tokens and change no result",
        _OUT,
        *(f"{_ACTOR}.{name}" for name in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz")),
        *(f"{part}.log_prob_micro_batch_size" for part in (_ROLLOUT, "actor_rollout_ref.ref")),
        *(f"{part}.log_prob_micro_batch_size_per_gpu" for part in (_ROLLOUT, "actor_rollout_ref.ref")),
        *(f"{part}.log_prob_use_dynamic_bsz" for part in (_ROLLOUT, "actor_rollout_ref.ref")),
        *(f"{part}.log_prob_max_token_len_per_gpu" for part in (_ROLLOUT, "actor_rollout_ref.ref")),
        *("data.micro_batch_size", "data.micro_batch_size_per_gpu"),
    ),
    *hinted(
        "verl",
        "for rl the length of a run is counted in rollouts",
        "write steps: once through the rows is their number divided by prompts_per_rollout",
        "trainer.total_epochs",
        commands=_RL,
    ),
    *hinted(
        "verl",
        "warm-up is counted in updates",
        "write optim.warmup_steps: that share of all updates",
        *(f"{_OPTIM}.lr_warmup_steps_ratio", "optim.lr_warmup_steps_ratio"),
    ),
    *hinted(
        "verl",
        "a prompt longer than max_length is left out and counted, unless on_long=truncate",
        "leave it out",
        *("data.filter_overlong_prompts", "data.filter_overlong_prompts_workers"),
        commands=_RL,
    ),
    *hinted(
        "verl",
        "a reward is a function of your own",
        "write reward=file.py:name",
        "custom_reward_function",
        commands=_RL,
    ),
    *hinted("verl", "a reward is a function of your own", "write reward=file.py:name", "reward_manager", commands=_RL),
    *hinted("verl", "a reward model is a run of novarl rm", "write reward=model:RUN", "reward_model", commands=_RL),
    *hinted(
        "verl",
        "the sampler is the learner's own model, and the ratio to other weights is corrected where there are any",
        "leave it out, or write correction.type, with tis_max, or low and high",
        "algorithm.rollout_correction",
        commands=_RL,
    ),
    *hinted(
        "verl",
        "a coefficient that moves is adaptive_kl.controller_type=ziegler",
        "write adaptive_kl.enabled=true adaptive_kl.target_kl and adaptive_kl.horizon",
        *("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        commands=_RL,
    ),
    *hinted(
        "verl", "verl's setting of its algorithms has no partner here", "see docs/names.md", "algorithm", commands=_RL
    ),
    *hinted(
        "verl",
        "several turns are played with a file of yours that has interact(messages)",
        "write rollout.env_path=file.py and rollout.max_turns",
        *(f"{_ROLLOUT}.multi_turn", f"{_ROLLOUT}.agent", "data.tool_config_path"),
        commands=_RL,
    ),
    *hinted(
        "verl",
        "held-out rows are answered greedily; pass@k has eval.k and eval.temperature",
        "leave it out, or write these",
        f"{_ROLLOUT}.val_kwargs",
        commands=_RL,
    ),
    *hinted("verl", _OWN_ENGINE, _OUT, _ROLLOUT, commands=_RL),
    *later("verl", "sharded models and offloading", _OUT, f"{_ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config"),
    *later("verl", "sharded models and offloading", _OUT, f"{_ACTOR}.megatron", "model.fsdp_config", "model.strategy"),
    *hinted(
        "verl",
        "the reference is the model as it was at the start, and shares all settings with it",
        "leave it out; another one is kl.reference=PATH",
        "actor_rollout_ref.ref",
        commands=_RL,
    ),
    *hinted(
        "verl",
        "verl's setting of the actor, its kernels or its processes has no partner here",
        "leave it out",
        "actor_rollout_ref",
        commands=_RL,
    ),
    *hinted(
        "verl",
        "the critic starts as the policy; of its own it has critic.lr, critic.clip and critic.updates_per_rollout",
        _OUT,
        *(f"critic.{name}" for name in ("optim", "model", "strategy", "enable", "checkpoint", "use_dynamic_bsz")),
        *(f"critic.{name}" for name in ("ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")),
        *(f"critic.{name}" for name in ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu", "ppo_epochs")),
        *(f"critic.{name}" for name in ("forward_micro_batch_size", "forward_micro_batch_size_per_gpu", "shuffle")),
        *(f"critic.{name}" for name in ("ulysses_sequence_parallel_size", "grad_clip", "loss_agg_mode", "rollout_n")),
        *("critic.data_loader_seed", "critic.profiler"),
        commands=_RL,
    ),
    *hinted(
        "verl",
        "all rows of one file or data set are read, as they are",
        "leave it out, or prepare the file",
        *(f"data.{name}" for name in ("train_max_samples", "val_max_samples", "val_batch_size", "reward_fn_key")),
        *(f"data.{name}" for name in ("return_raw_input_ids", "return_raw_chat", "return_full_prompt", "use_shm")),
        *(f"data.{name}" for name in ("validation_shuffle", "custom_cls", "sampler", "datagen", "tokenizer")),
        *(f"data.{name}" for name in ("video_key", "image_patch_size", "return_multi_modal_inputs")),
        *(f"data.{name}" for name in ("prompt_dict_keys", "response_dict_keys", "balance_dp_token")),
    ),
    *later(
        "verl",
        "experiment trackers. metrics.jsonl and tb/ in run_dir hold the curves",
        "leave it out, or write log.tensorboard",
        *("trainer.logger", "trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    ),
    *hinted(
        "verl",
        "processes are started with torchrun",
        _OUT,
        *(f"trainer.{name}" for name in ("n_gpus_per_node", "nnodes", "balance_batch", "use_legacy_worker_impl")),
        *("trainer.ray_wait_register_center_timeout", "ray_kwargs", "global_profiler", "transfer_queue"),
        *("use_remove_padding", "ulysses_sequence_parallel_size"),
    ),
    *hinted(
        "verl",
        "checkpoints are in run_dir; keep says how many",
        "leave it out, or write keep",
        *(f"trainer.{name}" for name in ("default_hdfs_dir", "del_local_ckpt_after_load", "max_critic_ckpt_to_keep")),
        *("trainer.checkpoint", "trainer.esi_redundant_time"),
    ),
    *hinted(
        "verl",
        "a model is loaded as its folder says",
        _OUT,
        *("model.external_lib", "model.use_liger", "model.use_shm"),
    ),
)

ROWS: tuple[Row, ...] = (*_ALIASES, *_FIXED, *_HINTS)
"""Of two rows with one name, each is for other commands. What no other row names is answered by the one around it."""
