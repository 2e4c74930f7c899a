"""What TRL computes for losses on preferences: its trainers' own loss functions, called on recorded log-probabilities.

Everything is float64, and no trainer's mean or clamp is taken apart: the numbers are what TRL would minimise.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

from tests.oracles.inputs import BAD, BETA, CENTRING, GAMMA, GOOD, PAIRS, WRONG, Preferences, preferences
from tests.oracles.trl_trainer import recorded, stand_in


def outputs(logp: Tensor) -> Any:
    """What TRL's models give with a fused head; the columns that only feed its metrics are zeros."""
    zeros = torch.zeros_like(logp)
    return SimpleNamespace(log_probs=logp, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def inputs(rows: Preferences) -> dict[str, Tensor]:
    """One prompt token before every answer."""
    mask = torch.cat([torch.zeros(2 * PAIRS, 1), rows.mask], 1).long()
    return {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def dpo(rows: Preferences, name: str) -> dict[str, Any]:
    from trl.trainer.dpo_trainer import DPOTrainer

    logp = rows.logp.clone().requires_grad_()
    trainer = stand_in(
        beta=BETA,
        label_smoothing=WRONG,
        loss_types=[name],
        loss_weights=[1.0],
        use_weighting=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
    )
    chosen, rejected = rows.ref.chunk(2)
    batch = {**inputs(rows), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    return recorded(DPOTrainer._compute_loss(trainer, lambda **_: outputs(logp), batch, False), logp, rows.mask)


def kto(rows: Preferences) -> dict[str, Any]:
    from trl.trainer.kto_trainer import KTOTrainer

    logp = rows.logp.clone().requires_grad_()
    trainer = stand_in(
        beta=BETA,
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=GOOD,
        undesirable_weight=BAD,
        _compute_kl_logps=lambda model, batch: rows.strangers,
    )
    batch = {**inputs(rows), "label": rows.label, "ref_logps": rows.ref, "ref_KL_logps": rows.stranger_ref}
    return recorded(KTOTrainer._compute_loss(trainer, lambda **_: outputs(logp), batch, False), logp, rows.mask)


def averages(rows: Preferences, logp: Tensor) -> tuple[Tensor, ...]:
    return (logp.sum(1) / rows.mask.sum(1)).chunk(2)


def simpo(rows: Preferences) -> dict[str, Any]:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    logp = rows.logp.clone().requires_grad_()
    trainer = stand_in(beta=BETA, alpha=0.0, loss_type="simpo", simpo_gamma=GAMMA, label_smoothing=WRONG)
    losses, _, _ = CPOTrainer.cpo_loss(trainer, *averages(rows, logp))
    return recorded(losses.mean(), logp, rows.mask)


def orpo(rows: Preferences) -> dict[str, Any]:
    """The odds ratio alone, in float32, as TRL casts it; its likelihood term takes the prompt in and is left out."""
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    logp = rows.logp.clone().requires_grad_()
    losses, *_ = ORPOTrainer.odds_ratio_loss(stand_in(beta=BETA), *averages(rows, logp))
    return recorded(-losses.mean(), logp, rows.mask)


def reward(rows: Preferences, *, margin: bool, centring: float | None) -> dict[str, Any]:
    from trl.trainer.reward_trainer import RewardTrainer

    values = rows.reward.clone().requires_grad_()
    trainer = stand_in(args=SimpleNamespace(center_rewards_coefficient=centring))
    model = MagicMock(return_value=SimpleNamespace(logits=values[:, None]))
    batch = {"attention_mask": torch.ones(2 * PAIRS, 2), **({"margin": rows.margin} if margin else {})}
    return recorded(RewardTrainer.compute_loss(trainer, model, batch), values)


def numbers() -> dict[str, dict[str, Any]]:
    rows = preferences()
    return {
        **{name: dpo(rows, name) for name in ("sigmoid", "hinge", "ipo", "robust")},
        "kto": kto(rows),
        "simpo": simpo(rows),
        "orpo, odds ratio": orpo(rows),
        "bt": reward(rows, margin=False, centring=None),
        "bt, margin and centring": reward(rows, margin=True, centring=CENTRING),
    }
