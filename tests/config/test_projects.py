"""Other projects' configurations, as they write them: every main name is a key, stands for one, or is refused with the
reason; a name that means something else elsewhere is never taken for ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from novarl.config.base import Config
from novarl.config.flags import arguments
from novarl.config.foreign.aliases import READ_TOGETHER, RUN_NAMES
from novarl.config.foreign.rows import SEVERAL, Alias, Hint
from novarl.config.foreign.tables import rows
from novarl.config.keys import is_key, keys, sections
from novarl.config.load import load
from novarl.config.names import rows_of
from novarl.config.tree import TREES, DPOConfig, RLConfig, RMConfig, SFTConfig
from novarl.core.errors import NovaError, NovaErrors

MODEL = """model_name_or_path model_revision dtype attn_implementation trust_remote_code use_peft lora_r lora_alpha
lora_dropout lora_target_modules lora_target_parameters lora_modules_to_save lora_task_type use_rslora use_dora
load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant dataset_name dataset_config dataset_train_split
dataset_test_split dataset_streaming logging_steps gradient_checkpointing bf16 model_init_kwargs"""
NAMES: dict[tuple[str, str], str] = {
    (
        "TRL's GRPO",
        "rl",
    ): f"""{MODEL} disable_dropout cast_lm_head_to_fp32 remove_unused_columns num_generations
num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs chat_template_kwargs
repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta
epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
importance_sampling_level reward_weights reward_funcs multi_objective_aggregation scale_rewards loss_type
mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_cap
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl
log_completions num_completions_to_print log_unique_prompts use_transformers_paged normalize_advantages""",
    (
        "TRL's SFT",
        "sft",
    ): f"""{MODEL} chat_template_path dataset_text_field dataset_kwargs dataset_num_proc eos_token pad_token
max_length max_seq_length truncation_mode shuffle_dataset packing packing_strategy padding_free pad_to_multiple_of
eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading""",
    (
        "TRL's DPO",
        "dpo",
    ): f"""{MODEL} disable_dropout dataset_num_proc max_length truncation_mode padding_free
precompute_ref_log_probs precompute_ref_batch_size loss_type loss_weights ld_alpha f_divergence_type
f_alpha_divergence_coef label_smoothing beta use_weighting discopop_tau activation_offloading sync_ref_model
ref_model_mixup_alpha ref_model_sync_steps pad_token desirable_weight undesirable_weight""",
    (
        "TRL's reward model",
        "rm",
    ): f"""{MODEL} chat_template_path disable_dropout dataset_num_proc eos_token max_length
pad_to_multiple_of center_rewards_coefficient activation_offloading pad_token""",
    (
        "OpenRLHF's PPO",
        "rl",
    ): """actor.model_name_or_path critic.model_name_or_path reward.model_name_or_path
reward.remote_url data.prompt_dataset data.input_key data.label_key data.apply_chat_template data.input_template
data.prompt_split data.max_len data.max_samples eval.dataset eval.steps eval.temperature eval.n_samples_per_prompt
rollout.batch_size rollout.micro_batch_size rollout.n_samples_per_prompt rollout.max_new_tokens rollout.temperature
rollout.top_p train.batch_size train.micro_batch_size train.max_epochs train.num_episodes train.seed train.async_enable
train.colocate_all train.agent_func_path train.partial_rollout_enable train.dynamic_batch_enable
train.max_tokens_per_gpu actor.adam.lr actor.adam.betas actor.adam.weight_decay critic.adam.lr actor.max_norm
actor.lr_scheduler actor.lr_warmup_ratio actor.min_lr_ratio actor.optim actor.eps_clip actor.eps_clip_low_high
actor.dual_clip actor.policy_loss_type actor.entropy_coef actor.gradient_checkpointing_enable actor.num_nodes
actor.num_gpus_per_node critic.value_clip critic.freezing_steps algo.kl.init_coef algo.kl.use_loss algo.kl.estimator
algo.kl.target algo.kl.horizon algo.advantage.estimator algo.advantage.lambd algo.advantage.gamma
algo.advantage.no_std_norm algo.advantage.is_correction_enable algo.dynamic_filtering_enable
algo.dynamic_filtering_range reward.normalize_enable reward.clip_range reward.overlong_buffer_len vllm.num_engines
vllm.tensor_parallel_size vllm.enable_sleep ds.zero_stage ds.param_dtype ds.attn_implementation ds.packing_samples
ds.adam_offload ds.lora.rank ds.lora.alpha ds.lora.target_modules ds.lora.dropout ds.ring_attn_size ckpt.output_dir
ckpt.path ckpt.save_steps ckpt.save_hf ckpt.max_num ckpt.load_enable logger.wandb.key logger.tensorboard_dir
logger.logging_steps pretrain reward_pretrain remote_rm_url prompt_data input_key label_key apply_chat_template
rollout_batch_size train_batch_size micro_rollout_batch_size micro_train_batch_size n_samples_per_prompt max_epochs
num_episodes prompt_max_len generate_max_len max_len zero_stage param_dtype actor_learning_rate critic_learning_rate
init_kl_coef use_kl_loss kl_estimator advantage_estimator lambd gamma eps_clip eps_clip_low_high dual_clip value_clip
dynamic_filtering dynamic_filtering_reward_range normalize_reward adam_offload gradient_checkpointing packing_samples
colocate_all_models vllm_num_engines vllm_gpu_memory_utilization save_path ckpt_path save_steps eval_steps use_wandb
load_checkpoint lr_warmup_ratio lr_scheduler l2 adam_betas max_norm entropy_loss_coef freezing_actor_steps""",
    (
        "OpenRLHF's SFT",
        "sft",
    ): """model.model_name_or_path pretrain data.dataset dataset data.input_key data.output_key
input_key output_key data.multiturn data.max_len max_len train.batch_size train_batch_size train.max_epochs max_epochs
adam.lr adam.betas learning_rate lr_scheduler lr_warmup_ratio min_lr_ratio max_norm model.gradient_checkpointing_enable
ds.packing_samples packing_samples eval.dataset eval.steps ckpt.output_dir save_path ds.zero_stage ds.param_dtype
model.aux_loss_coef model.pretrain_mode_enable data.tokenizer_chat_template data.apply_chat_template""",
    (
        "OpenRLHF's DPO",
        "dpo",
    ): """model.beta model.ipo_enable model.label_smoothing model.nll_loss_coef ref.model_name_or_path
data.dataset data.prompt_key data.chosen_key data.rejected_key data.max_len train.batch_size beta ipo nll_loss_coef
ref_pretrain chosen_key rejected_key prompt_key""",
    (
        "OpenRLHF's reward model",
        "rm",
    ): "model.loss_type model.margin_loss_enable model.compute_fp32_loss_enable value_head_prefix",
    (
        "RL2's PPO",
        "rl",
    ): """actor.model_name actor.use_liger_kernel actor.dtype actor.enable_gradient_checkpointing
actor.ddp_size actor.tp_size actor.cp_size actor.max_length_per_device actor.max_inference_length_per_device
actor.optimizer.lr actor.optimizer.weight_decay actor.max_grad_norm actor.scheduler.name actor.scheduler.min_lr
actor.scheduler.warmup_ratio actor.offload_optimizer actor.offload_model actor.temperature actor.update_per_rollout
actor.clip actor.tis_coef actor.avg_level actor.freeze_steps actor.adv_estimator actor.kl.coef actor.kl.type
actor.kl.reward_estimator actor.kl.loss_estimator actor.entropy.coef ref_actor.model_name ref_actor.tp_size
critic.model_name critic.optimizer.lr critic.update_per_rollout critic.clip critic.avg_level critic.cp_size
rollout.server_args.tp_size rollout.train.path rollout.train.prompt_key rollout.train.messages_key
rollout.train.apply_chat_template rollout.train.prompts_per_rollout rollout.train.responses_per_prompt
rollout.train.max_turns rollout.train.sampling_params.temperature rollout.train.sampling_params.max_new_tokens
rollout.train.sampling_params.stop rollout.train.dynamic_filtering rollout.train.partial_rollout rollout.train.save_dir
rollout.test.path rollout.test.prompts_per_rollout rollout.test.responses_per_prompt
rollout.test.sampling_params.temperature rollout.test_ratio rollout.env_path rollout.bucket_size adv.estimator adv.gamma
adv.lamda adv.global_norm adv.norm_var adv.responses_per_prompt trainer.project trainer.experiment_name
trainer.load_ckpt_from trainer.total_steps trainer.eval_only trainer.test_freq trainer.save_dir trainer.save_freq
trainer.use_wandb""",
    (
        "RL2's SFT",
        "sft",
    ): """data.train.path data.train.max_length data.train.batch_size data.train.prompt_key
data.train.response_key data.train.messages_key data.train.apply_chat_template data.test.path data.test.max_length
data.test_ratio actor.model_name actor.optimizer.lr actor.avg_level actor.cp_size trainer.project
trainer.experiment_name trainer.n_epochs trainer.save_freq trainer.use_wandb""",
    (
        "RL2's DPO",
        "dpo",
    ): "data.train.chosen_key data.train.rejected_key actor.beta ref_actor.model_name trainer.project",
    ("RL2's reward model", "rm"): "critic.model_name critic.optimizer.lr critic.max_length_per_device data.test_ratio",
    (
        "verl's PPO",
        "rl",
    ): """data.train_files data.val_files data.prompt_key data.train_batch_size data.max_prompt_length
data.max_response_length data.filter_overlong_prompts data.truncation data.shuffle data.reward_fn_key
actor_rollout_ref.model.path actor_rollout_ref.model.enable_gradient_checkpointing actor_rollout_ref.model.lora_rank
actor_rollout_ref.model.lora_alpha actor_rollout_ref.model.target_modules actor_rollout_ref.model.use_remove_padding
actor_rollout_ref.actor.optim.lr actor_rollout_ref.actor.optim.weight_decay
actor_rollout_ref.actor.optim.lr_warmup_steps actor_rollout_ref.actor.optim.lr_warmup_steps_ratio
actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
actor_rollout_ref.actor.use_dynamic_bsz actor_rollout_ref.actor.ppo_max_token_len_per_gpu
actor_rollout_ref.actor.clip_ratio actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio_high
actor_rollout_ref.actor.clip_ratio_c actor_rollout_ref.actor.loss_agg_mode actor_rollout_ref.actor.entropy_coeff
actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type
actor_rollout_ref.actor.ppo_epochs actor_rollout_ref.actor.grad_clip actor_rollout_ref.actor.fsdp_config.param_offload
actor_rollout_ref.actor.fsdp_config.optimizer_offload actor_rollout_ref.actor.policy_loss.loss_mode
actor_rollout_ref.actor.ulysses_sequence_parallel_size actor_rollout_ref.ref.fsdp_config.param_offload
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu actor_rollout_ref.rollout.name actor_rollout_ref.rollout.n
actor_rollout_ref.rollout.temperature actor_rollout_ref.rollout.top_p actor_rollout_ref.rollout.top_k
actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.gpu_memory_utilization
actor_rollout_ref.rollout.val_kwargs.n actor_rollout_ref.rollout.val_kwargs.temperature
actor_rollout_ref.rollout.multi_turn.enable actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
critic.optim.lr critic.model.path critic.ppo_micro_batch_size_per_gpu critic.cliprange_value algorithm.adv_estimator
algorithm.gamma algorithm.lam algorithm.norm_adv_by_std_in_grpo algorithm.use_kl_in_reward algorithm.kl_penalty
algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.type algorithm.rollout_correction.rollout_is custom_reward_function.path
custom_reward_function.name reward_model.enable reward_model.reward_manager trainer.total_epochs
trainer.total_training_steps trainer.project_name trainer.experiment_name trainer.logger trainer.nnodes
trainer.n_gpus_per_node trainer.save_freq trainer.test_freq trainer.resume_mode trainer.val_before_train
trainer.critic_warmup trainer.default_local_dir trainer.max_actor_ckpt_to_keep""",
    (
        "verl's SFT",
        "sft",
    ): """data.train_files data.val_files data.prompt_key data.response_key data.train_batch_size
data.micro_batch_size_per_gpu data.max_length data.truncation data.multiturn.enable data.multiturn.messages_key
model.partial_pretrain model.enable_gradient_checkpointing model.lora_rank model.lora_alpha model.target_modules
model.fsdp_config.cpu_offload model.strategy optim.lr optim.betas optim.weight_decay optim.lr_warmup_steps_ratio
optim.clip_grad optim.lr_scheduler trainer.total_epochs trainer.project_name trainer.experiment_name trainer.logger
trainer.default_local_dir trainer.seed""",
}


def is_known(name: str, tree: type[Config]) -> bool:
    return name in keys(tree) or name in READ_TOGETHER or name in RUN_NAMES or bool(rows_of(name, tree))


@pytest.mark.parametrize(("project", "kind"), NAMES, ids=lambda part: part.replace(" ", "-"))
def test_every_main_name_of_a_project_is_known(project: str, kind: str) -> None:
    assert [name for name in NAMES[project, kind].split() if not is_known(name, TREES[kind])] == []


@pytest.mark.parametrize("kind", ["rl", "sft", "dpo", "rm"])
def test_every_setting_of_transformers_is_known(kind: str) -> None:
    from transformers import TrainingArguments

    tree = TREES[kind]
    named = [field.name for field in fields(TrainingArguments)]
    assert [name for name in named if not is_known(name, tree) and name not in sections(tree)] == []


def test_every_row_of_every_table_leads_to_a_key_or_gives_its_reason() -> None:
    for row in rows():
        if isinstance(row, Alias):
            assert any(all(is_key(new, tree) for new in row.new) for tree in TREES.values()), row.old
            assert all(is_key(path, RLConfig) for path in (*row.implies, *row.needs)), row.old
            assert bool(row.otherwise) == bool(row.values or row.needs), row.old
        else:
            reason, instead = (row.what, row.fix) if isinstance(row, Hint) else (row.reason, "-")
            assert len(reason) > 8 and instead and row.commands and set(row.commands) <= set(TREES), row.old
    assert {row.source for row in rows()} >= {"RL2", "TRL", "OpenRLHF", "verl", "NanoRL", "VinePPO", SEVERAL}


def value_of(config: Config, path: str) -> Any:
    found: Any = config
    for part in path.split("."):
        found = getattr(found, part)
    return found


def said(tree: type[Config], *words: str) -> list[str]:
    with pytest.raises(NovaError) as caught:
        load(tree, overrides=["task=sort", *words])
    return [str(each) for each in caught.value.each] if isinstance(caught.value, NovaErrors) else [str(caught.value)]


SEVERAL_MEANINGS: list[tuple[list[str], Mapping[str, Any] | str]] = [
    (["num_iterations=4"], "VinePPO: the number of rollouts in the run; TRL: the number of epochs over each rollout"),
    (["num_iterations=4"], "(VinePPO: set steps; TRL: set epochs_per_rollout)"),
    (["num_iterations=4", "beta=0.1"], {"epochs_per_rollout": 4, "updates_per_rollout": 4, "steps": 100}),
    (["num_iterations=4", "vllm_mode=null", "scale_rewards=none"], {"epochs_per_rollout": 4, "steps": 100}),
    (["num_iterations=4", "reward_funcs=length"], {"epochs_per_rollout": 4, "steps": 100}),
    (["num_iterations=1000", "num_mc_rollouts=9"], {"steps": 1000, "epochs_per_rollout": 1}),
    (["num_iterations=4", "num_mc_rollouts=9", "num_generations=8"], "this name is ambiguous"),
    (["num_iterations=4", "learning_rate=1e-5", "temperature=0.5"], "this name is ambiguous"),
    (["batch_size=8"], "RLHF Systems Kit: the prompts of a step; NanoRL: it counts the responses of a step"),
    (["batch_size=8", "epochs=2", "steps_per_epoch=3"], {"prompts_per_rollout": 8, "steps": 6}),
    (["batch_size=8", "clip_ratio=0.1"], {"prompts_per_rollout": 8}),
    (
        ["batch_size=8", "group_size=4"],
        "it counts the responses of a step (set prompts_per_rollout to this number divided",
    ),
    (["batch_size=8", "num_generations=8"], "this name is ambiguous"),
    (["actor.tis_coef=2"], {"correction.tis_max": 2.0, "updates_per_rollout": 1}),
    (["tis_coef=2", "update_per_rollout=1"], {"correction.tis_max": 2.0}),
    (["tis_coef=0", "update_per_rollout=4"], {"correction.tis_max": None, "updates_per_rollout": 4}),
    (["tis_coef=2", "update_per_rollout=4"], "RL2's tis_coef limits pi / mu"),
    (["tis_coef=2", "update_per_rollout=4"], "correction.tis_max limits pi_old / mu"),
    (["tis_coef=2", "num_iterations=2", "num_generations=4"], "with several updates they differ"),
    (["max_steps=100"], {"steps": 100}),
    (["max_steps=100", "updates_per_rollout=null"], {"steps": 100}),
    (["max_steps=100", "num_iterations=2", "num_generations=4"], "TRL counts optimizer updates, steps counts rollouts"),
    (["save_steps=5", "updates_per_rollout=1"], {"save_every": 5}),
    (["save_steps=5", "updates_per_rollout=2"], "TRL counts optimizer updates, OpenRLHF and save_every count rollouts"),
    (["eval_steps=5", "updates_per_rollout=2"], "set eval_every instead"),
    (["trainer.save_freq=-1", "updates_per_rollout=2"], {"save_every": None}),
]


@pytest.mark.parametrize(
    ("words", "expected"), SEVERAL_MEANINGS, ids=lambda part: "+".join(part) if type(part) is list else ""
)
def test_a_name_with_several_meanings_is_translated_or_refused(
    words: list[str], expected: Mapping[str, Any] | str
) -> None:
    if isinstance(expected, str):
        assert any(expected in line for line in said(RLConfig, *words)), said(RLConfig, *words)
    else:
        config = load(RLConfig, overrides=["task=sort", *words])
        assert {path: value_of(config, path) for path in expected} == expected


def test_a_setting_that_only_several_updates_make_ambiguous_is_free_for_other_commands() -> None:
    for tree in (SFTConfig, DPOConfig, RMConfig):
        config = load(tree, overrides=["task=sort", "max_steps=7", "save_steps=5", "batch_size=3"])
        assert (config.steps, config.save_every, config.batch_size) == (7, 5, 3)


CASES: list[tuple[type[Config], str, str, Mapping[str, Any]]] = [
    (
        RLConfig,
        "RL2",
        "rollout.train.path=train@org/Countdown rollout.train.prompts_per_rollout=128 rollout.train.max_turns=2 "
        "rollout.train.responses_per_prompt=4 rollout.train.sampling_params.max_new_tokens=1024 "
        "rollout.train.sampling_params.stop=['</answer>'] rollout.train.apply_chat_template=false "
        "rollout.test.path=test@org/Countdown rollout.env_path=envs/countdown.py actor.model_name=Qwen/Qwen2.5-3B "
        "actor.max_length_per_device=8192 actor.optimizer.lr=2e-6 "
        "actor.scheduler.name=constant "
        "trainer.project=Countdown trainer.experiment_name=3b trainer.total_steps=512 trainer.test_freq=8 "
        "trainer.save_freq=32",
        {
            **{"data": "org/Countdown@train", "eval.data": "org/Countdown@test", "prompts_per_rollout": 128},
            **{"responses_per_prompt": 4, "rollout.max_tokens": 1024, "rollout.stop": ("</answer>",), "steps": 512},
            **{"apply_chat_template": False, "rollout.env_path": "envs/countdown.py", "model": "Qwen/Qwen2.5-3B"},
            **{"micro.max_tokens": 8192, "optim.lr": 2e-6, "run_dir": "runs/Countdown/3b", "eval_every": 8},
            **{"save_every": 32, "rollout.max_turns": 2},
        },
    ),
    (
        RMConfig,
        "RL2",
        "data.train.path=org/SkyworkRM data.train.max_length=2048 critic.model_name=org/Llama critic.optimizer.lr=5e-6 "
        "critic.max_length_per_device=8192 trainer.project=RM trainer.experiment_name=8b",
        {
            **{"data": "org/SkyworkRM", "max_length": 2048, "model": "org/Llama", "optim.lr": 5e-6},
            **{"micro.max_tokens": 8192, "run_dir": "runs/RM/8b"},
        },
    ),
    (
        RLConfig,
        "OpenRLHF",
        "--actor.model_name_or_path org/Llama --data.prompt_dataset org/prompts --data.input_key context "
        "--reward length "
        "--data.apply_chat_template --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.max_epochs 2 "
        "--rollout.max_new_tokens 512 --actor.adam.lr 5e-7 --actor.adam.betas 0.9 0.95 "
        "--actor.eps_clip_low_high 0.2 0.27 "
        "--algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 --algo.dynamic_filtering_enable "
        "--ds.packing_samples --ds.param_dtype bf16 --actor.gradient_checkpointing_enable --ckpt.output_dir out "
        "--ckpt.save_steps -1",
        {
            **{"model": "org/Llama", "data": "org/prompts", "prompt_key": "context", "apply_chat_template": True},
            **{
                "prompts_per_rollout": 128,
                "responses_per_prompt": 8,
                "epochs_per_rollout": 2,
                "updates_per_rollout": 2,
            },
            **{"rollout.max_tokens": 512, "optim.lr": 5e-7, "optim.betas": (0.9, 0.95), "clip.low": 0.2},
            **{"clip.high": 0.27, "kl.coef": 1e-3, "kl.type": "loss", "kl.estimator": "k3", "dtype": "bfloat16"},
            **{
                "dynamic_sampling.enabled": True,
                "micro.gradient_checkpointing": True,
                "run_dir": "out",
                "save_every": None,
            },
        },
    ),
    (
        RLConfig,
        "OpenRLHF",
        "--pretrain org/Llama --prompt_data rows.jsonl --reward length --init_kl_coef 0.01 --rollout_batch_size 8 "
        "--advantage_estimator rloo --no_advantage_std_norm=false --async_train --eps_clip 0.1 --dual_clip 3",
        {
            **{"model": "org/Llama", "data": "rows.jsonl", "kl.coef": 0.01, "kl.type": "reward", "clip.low": 0.1},
            **{"adv.estimator": "leave_one_out", "rollout.staleness": 1, "clip.high": 0.1, "clip.dual": 3.0},
        },
    ),
    (
        RLConfig,
        "verl",
        "data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=1024 reward=math "
        "data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.model.path=org/Qwen "
        "actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.use_kl_loss=True algo=grpo "
        "actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl "
        "actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.loss_agg_mode=token-mean "
        "actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.rollout.n=5 algorithm.use_kl_in_reward=False "
        "trainer.total_training_steps=300 trainer.save_freq=-1 trainer.test_freq=5 trainer.project_name=grpo "
        "trainer.experiment_name=gsm8k trainer.critic_warmup=0",
        {
            **{"data": "train.parquet", "eval.data": "test.parquet", "prompts_per_rollout": 1024, "max_length": 512},
            **{"rollout.max_tokens": 1024, "model": "org/Qwen", "optim.lr": 1e-6, "kl.type": "loss", "kl.coef": 0.001},
            **{"kl.estimator": "k3", "entropy.coef": 0, "loss.agg": "token", "clip.high": 0.28, "steps": 300},
            **{"responses_per_prompt": 5, "save_every": None, "eval_every": 5, "run_dir": "runs/grpo/gsm8k"},
        },
    ),
    (
        SFTConfig,
        "verl",
        "data.train_files=train.parquet data.prompt_key=question data.response_key=answer data.train_batch_size=64 "
        "model.partial_pretrain=org/Qwen model.lora_rank=32 optim.lr=1e-4 optim.clip_grad=0.5 trainer.total_epochs=4.0",
        {
            **{"data": "train.parquet", "prompt_key": "question", "completion_key": "answer", "batch_size": 64},
            **{"model": "org/Qwen", "lora.rank": 32, "optim.lr": 1e-4, "optim.max_grad_norm": 0.5, "epochs": 4.0},
        },
    ),
    (
        SFTConfig,
        "TRL",
        "--model_name_or_path org/Qwen --dataset_name org/Capybara --learning_rate 2e-4 --num_train_epochs 1.0 "
        "--gradient_checkpointing --packing --lora_r 32 --lora_alpha 16.0 "
        "--lora_target_modules q_proj v_proj --output_dir out",
        {
            **{"model": "org/Qwen", "data": "org/Capybara", "optim.lr": 2e-4, "epochs": 1.0, "lora.rank": 32},
            **{"lora.target": ("q_proj", "v_proj"), "run_dir": "out", "micro.gradient_checkpointing": True},
        },
    ),
]


@pytest.mark.parametrize(
    ("tree", "project", "line", "expected"), CASES, ids=[f"{case[1]}-{case[0].kind}" for case in CASES]
)
def test_a_projects_own_command_line(tree: type[Config], project: str, line: str, expected: Mapping[str, Any]) -> None:
    """What its scripts write, less what is refused with the reason."""
    config = load(tree, *arguments(line.split(), tree))
    assert {path: value_of(config, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("tree", "words", "expected"),
    [
        (RLConfig, ["reward.remote_url=file.py"], "set reward=file.py:name"),
        (RLConfig, ["reward={remote_url: file.py}"], "set reward=file.py:name"),
        (RLConfig, ["vllm.num_engines=2"], "NovaRL samples with its own inference engine"),
        (RLConfig, ["logger.wandb.key=x"], "W&B reads its key from WANDB_API_KEY"),
        (RLConfig, ["actor_rollout_ref.actor.fsdp_config.param_offload=true"], "sharded models and offloading"),
        (RLConfig, ["actor_rollout_ref.actor.nothing=true"], "has no equivalent"),
        (
            RLConfig,
            ["train.batch_size=128"],
            "rollout_batch_size times n_samples_per_prompt divided by train_batch_size",
        ),
        (RLConfig, ["data.max_len=2048"], "max_length limits the prompt, rollout.max_tokens the response"),
        (RLConfig, ["advantage_estimator=group_norm"], "group_norm is an algorithm (set algo=grpo)"),
        (RLConfig, ["algorithm.adv_estimator=reinforce_plus_plus"], "set adv.estimator=none adv.whiten=true"),
        (
            RLConfig,
            ["actor_rollout_ref.actor.kl_loss_coef=0.1", "algo=grpo"],
            "only with actor_rollout_ref.actor.use_kl",
        ),
        (RLConfig, ["algorithm.kl_ctrl.kl_coef=0.1", "kl.type=loss"], "only with algorithm.use_kl_in_reward=true"),
        (RLConfig, ["eps_clip_low_high=0.2"], "must be 2 values, got 0.2"),
        (RLConfig, ["trainer.project=p"], "set trainer.experiment_name too, or set run_dir"),
        (RLConfig, ["trainer.experiment_name=3"], "must be text, got 3"),
        (RLConfig, ["trainer.save_dir=ckpts/${trainer.experiment_name}"], "refers to another key"),
        (RLConfig, ["actor.dtype=${ref_actor.dtype}"], "write the value itself"),
        (SFTConfig, ["packing=7"], "rows are always packed"),
        (SFTConfig, ["load_in_4bit=true"], "true is not supported: quantized training is not supported yet"),
        (SFTConfig, ["data.test.max_length=3"], "held-out rows are read and truncated like training rows"),
        (DPOConfig, ["loss_type=[sigmoid, sft]"], "must be 'sigmoid'"),
    ],
)
def test_what_has_no_partner_is_refused_with_the_reason(tree: type[Config], words: list[str], expected: str) -> None:
    (line,) = said(tree, *words)
    assert expected in line


def test_the_run_directory_is_named_once() -> None:
    def run_dir(*words: str) -> str | None:
        return load(RLConfig, overrides=["task=sort", *words]).run_dir

    named = ("trainer.project=a", "trainer.experiment_name=b")
    assert run_dir(*named) == "runs/a/b" and run_dir("experiment_name=b") == "runs/b"
    assert run_dir(*named, "output_dir=c") == "c" and run_dir("run_dir=c", *named) == "c"
    assert run_dir("trainer.project=null", "trainer.experiment_name=null") is None
    assert run_dir(*named, "trainer.experiment_name=c") == "runs/a/c", "later values win"


def test_a_name_says_nothing_at_the_value_that_means_so() -> None:
    plain = load(RLConfig, overrides=["task=sort"])
    for word in (
        *("num_iterations=null", "batch_size=null", "delta=null", "critic.freezing_steps=-1", "use_kl_loss=false"),
        *("actor_rollout_ref.actor.kl_loss_coef=null", "vllm.num_engines=null", "trainer.total_training_steps=null"),
        "rollout.train.sampling_params.stop=null",
    ):
        assert load(RLConfig, overrides=["task=sort", word]) == plain, word
    for never in ("save_freq=null", "trainer.save_freq=null", "trainer.save_freq=-1", "save_steps=-1"):
        assert load(RLConfig, overrides=["task=sort", never]).save_every is None, never
    assert load(RLConfig, overrides=["task=sort", "save_steps=null"]).save_every == plain.save_every, "TRL's is unset"
