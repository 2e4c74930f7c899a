"""What TRL computes for GRPO and its family: the trainer's own loss, advantages, importance weights and conventions."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.oracles import inputs
from tests.oracles.inputs import CLIP, GENERATIONS, HIGH, KL, LOW, NARROW, TAU_NEG, TAU_POS, TWO_SIDED, rollouts
from tests.oracles.trl_trainer import recorded, stand_in, statements


def loss(
    loss_type: str,
    *,
    clip: tuple[float, float] = CLIP,
    level: str = "token",
    beta: float = 0.0,
    delta: float | None = None,
    corrected: bool = True,
) -> dict[str, Any]:
    """`GRPOTrainer._compute_loss`, one step of accumulation."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows = rollouts()
    logp = rows.logp.clone().requires_grad_()
    trainer = stand_in(
        args=SimpleNamespace(
            use_bias_correction_kl=corrected,
            delta=delta,
            sapo_temperature_pos=TAU_POS,
            sapo_temperature_neg=TAU_NEG,
            steps_per_generation=1,
        ),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        beta=beta,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=rows.mask.shape[1],
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
    )
    answers, prompts = torch.zeros_like(rows.mask, dtype=torch.int64), torch.zeros(len(rows.mask), 0, dtype=torch.int64)
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": prompts,
        "completion_ids": answers,
        "completion_mask": rows.mask.long(),
        "advantages": rows.advantage,
        "old_per_token_logps": rows.old_logp,
        "ref_per_token_logps": rows.ref_logp,
        "num_items_in_batch": rows.mask.sum(),
    }
    return recorded(GRPOTrainer._compute_loss(trainer, None, batch), logp, rows.mask)


def group_advantage(rewards: Tensor, scale: str) -> Tensor:
    """The statements of GRPO's trainer that make advantages of rewards."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = SimpleNamespace(
        multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1), scale_rewards=scale
    )
    space = statements(
        GRPOTrainer._generate_and_score_completions,
        "if self.multi_objective_aggregation ==",
        "advantages = torch.nan_to_num",
        self=trainer,
        rewards_per_func=rewards[:, None],
        unscorable_mask=torch.zeros(len(rewards), dtype=torch.bool),
        num_generations=GENERATIONS,
        device=rewards.device,
    )
    found: Tensor = space["advantages"]
    return found


def leave_one_out(*, normalised: bool) -> Tensor:
    """The statements of RLOO's trainer that do."""
    from trl.trainer.rloo_trainer import RLOOTrainer

    space = statements(
        RLOOTrainer._generate_and_score_completions,
        "grouped_rewards =",
        "advantages = torch.nan_to_num",
        self=SimpleNamespace(normalize_advantages=normalised),
        rewards=rollouts().rewards,
        num_generations=GENERATIONS,
    )
    found: Tensor = space["advantages"]
    return found


def importance(mode: str) -> dict[str, Any]:
    """The statements that make importance weights of the sampler's log-probs; 0 outside the mask."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    rows = rollouts()
    space = statements(
        GRPOTrainer._generate_and_score_completions,
        "mask = completion_mask if tool_mask is None",
        "if self.vllm_importance_sampling_mode in",
        self=SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=None if mode.endswith("truncate") else LOW,
            vllm_importance_sampling_clip_max=HIGH,
        ),
        completion_mask=rows.mask.long(),
        tool_mask=None,
        old_per_token_logps=rows.old_logp,
        sampling_per_token_logps=rows.behavior_logp,
    )
    return {"weight": (space["vllm_importance_sampling_ratio"] * rows.mask).tolist()}


def numbers() -> dict[str, dict[str, Any]]:
    rewards = rollouts().rewards
    losses = {
        "grpo": loss("grpo"),
        "bnpo": loss("bnpo"),
        "dapo": loss("dapo"),
        "dr_grpo": loss("dr_grpo"),
        "delta": loss("grpo", delta=TWO_SIDED),
        "gspo": loss("grpo", level="sequence", clip=NARROW),
        # TRL's epsilon_high is the bound itself here, where it is 1 + epsilon_high elsewhere.
        "cispo": loss("cispo", clip=(0.0, inputs.CISPO_HIGH)),
        "sapo": loss("sapo"),
        "grpo, k3": loss("grpo", beta=KL, corrected=False),
        "grpo, k3 corrected": loss("grpo", beta=KL),
        "dapo, k3 corrected": loss("dapo", beta=KL),
    }
    credit = {
        "group": group_advantage(rewards, "none"),
        "group, norm_std": group_advantage(rewards, "group"),
        "leave_one_out": leave_one_out(normalised=False),
        "leave_one_out, whitened": leave_one_out(normalised=True),
    }
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    return {
        **losses,
        **{name: {"advantage": value.tolist()} for name, value in credit.items()},
        **{mode: importance(mode) for mode in modes},
    }


def conventions() -> dict[str, Any]:
    """What TRL does unless told otherwise, measured where it can be and else read off its configuration."""
    from trl import DPOConfig, GRPOConfig
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    deviation = nanstd(rewards)
    eps = (rewards - rewards.mean())[1] / group_advantage(rewards, "group")[1] - deviation
    defaults = {
        config.__name__: {field.name: field.default for field in dataclasses.fields(config) if field.name in names}
        for config, names in (
            (
                GRPOConfig,
                {
                    *("beta", "delta", "epsilon", "epsilon_high", "importance_sampling_level", "loss_type"),
                    *("sapo_temperature_neg", "sapo_temperature_pos", "scale_rewards", "use_bias_correction_kl"),
                    *("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"),
                },
            ),
            (DPOConfig, {"beta", "label_smoothing"}),
        )
    }
    sample = torch.isclose(deviation, rewards.std())
    return {"deviation": "sample" if sample else "population", "eps": round(eps.item(), 9), "defaults": defaults}


def versions() -> dict[str, str]:
    import transformers
    import trl

    return {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
