"""NovaRL's side: each case by name, what it is compared with, and the library's answer to the same inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from novarl.algos import (
    advantages,
    aggregate,
    calibration,
    kl,
    off_policy,
    preference_losses as preference,
    reward_modeling,
    surrogates,
)
from tests.oracles import inputs
from tests.oracles.inputs import BETA, CLIP, DISCOUNT, HIGH, KL, LAMBDA, LOW, NARROW, STD_EPS, TWO_SIDED

TOLERANCE = 1e-6
Answer = dict[str, Tensor]


@cache
def recorded() -> dict[str, Any]:
    """The committed numbers, with the versions and conventions of the libraries that gave them."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("numbers.json").read_text())
    return found


@dataclass(frozen=True, slots=True)
class Case:
    """`ours` and `theirs` name the functions; `compute` gives everything that theirs was recorded to give."""

    name: str
    ours: str
    theirs: str
    compute: Callable[[], Answer]

    def numbers(self) -> Answer:
        return {
            name: torch.tensor(value, dtype=torch.float64) for name, value in recorded()["numbers"][self.name].items()
        }

    def error(self) -> float:
        """The largest difference of any element; infinite where the shapes differ or one side is not a number."""
        worst, answer = 0.0, self.compute()
        for name, theirs in self.numbers().items():
            if answer[name].shape != theirs.shape:
                return float("inf")
            difference = (answer[name].detach().double() - theirs).abs().max()
            worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
        return worst


def temporal(name: str, theirs: str, function: str, **options: float) -> Case:
    """`function` by name, so that a fault planted in it is met."""

    def compute() -> Answer:
        given = inputs.steps()
        columns = {key: getattr(given, key) for key in ("rewards", "values", "mask", "bootstrap")}
        if function in ("vtrace", "retrace"):
            columns |= {"logp": given.logp, "behavior_logp": given.behavior_logp}
        advantage, returns = getattr(advantages, function)(**columns, gamma=DISCOUNT, **options)
        return {"advantage": advantage, "returns": returns}

    return Case(name, f"advantages.{function}", f"rlax.{theirs}", compute)


def temporal_cases() -> list[Case]:
    far = float("inf")
    vtrace, retrace = "vtrace_td_error_and_advantage", "general_off_policy_returns_from_q_and_v"
    return [
        temporal("vtrace", vtrace, "vtrace"),
        temporal("vtrace, lam", vtrace, "vtrace", lam=LAMBDA),
        temporal("vtrace, clips apart", vtrace, "vtrace", lam=LAMBDA, rho_max=1.7, pg_rho_max=1.3),
        temporal("vtrace, no clips", f"leaky_{vtrace}", "vtrace", lam=LAMBDA, rho_max=far, c_max=far, pg_rho_max=far),
        temporal("retrace, returns", retrace, "retrace", lam=LAMBDA),
        temporal("retrace, advantage", "retrace_continuous", "retrace", lam=LAMBDA),
        temporal("td_lambda", "lambda_returns", "td_lambda", lam=LAMBDA),
        temporal("gae", "truncated_generalized_advantage_estimation", "gae", lam=LAMBDA),
        temporal("monte_carlo", "discounted_returns", "monte_carlo"),
        *[temporal(f"n_step, n={n}", "n_step_bootstrapped_returns", "n_step", n=n) for n in (1, 3, 9)],
    ]


def differentiated(loss: Callable[[Tensor], Tensor], at: Tensor, inside: Tensor | None = None) -> Answer:
    """The loss and its gradient, 0 outside the mask."""
    at = at.clone().requires_grad_()
    value = loss(at)
    (gradient,) = torch.autograd.grad(value, at)
    return {"loss": value, "gradient": gradient if inside is None else torch.where(inside, gradient, 0.0)}


def policy(
    name: str, theirs: str, function: str, how: str, *, constant: float = 1.0, estimator: str = "", **options: float
) -> Case:
    """A surrogate, an aggregation, and `estimator` of the KL, "k3" or "k3 corrected"."""

    def loss(logp: Tensor) -> Tensor:
        rows = inputs.rollouts()
        advantage = rows.advantage[:, None].expand_as(logp)
        per_token, _ = getattr(surrogates, function)(logp, rows.old_logp, advantage, rows.mask, **options)
        if estimator:
            penalty = kl.k3(logp, rows.ref_logp)
            if estimator == "k3 corrected":
                penalty = kl.corrected(penalty, logp, rows.old_logp)
            per_token = per_token + KL * penalty
        owner = torch.arange(len(logp))[:, None].expand_as(logp).flatten()
        mask, count = rows.mask.flatten(), len(logp)
        options_of_weights = {"how": how, "constant": constant, "trajectories": count, "dtype": logp.dtype}
        weights = aggregate.weights(mask, owner, **options_of_weights)
        return (per_token.flatten() * weights).sum()

    rows = inputs.rollouts()
    ours = f"surrogates.{function}, {how}" + (f", kl.{estimator}" if estimator else "")
    return Case(name, ours, f"GRPOTrainer, {theirs}", lambda: differentiated(loss, rows.logp, rows.mask))


def policy_cases() -> list[Case]:
    clip = {"clip_low": CLIP[0], "clip_high": CLIP[1]}
    narrow = {"clip_low": NARROW[0], "clip_high": NARROW[1]}
    tokens = float(inputs.rollouts().mask.shape[1])
    bias = "use_bias_correction_kl"
    return [
        policy("grpo", "loss_type=grpo", "ppo_clip", "sequence", **clip),
        policy("bnpo", "loss_type=bnpo", "ppo_clip", "token", **clip),
        policy("dapo", "loss_type=dapo", "ppo_clip", "token", **clip),
        policy("dr_grpo", "loss_type=dr_grpo", "ppo_clip", "constant", constant=tokens, **clip),
        policy("delta", f"grpo, delta={TWO_SIDED}", "dual_clip", "sequence", clip_dual=TWO_SIDED, **clip),
        policy("gspo", "grpo, importance_sampling_level=sequence", "gspo", "sequence", **narrow),
        policy("cispo", "loss_type=cispo", "cispo", "token", clip_low=1.0, clip_high=inputs.CISPO_HIGH - 1.0),
        policy("sapo", "loss_type=sapo", "sapo", "sequence", tau_pos=inputs.TAU_POS, tau_neg=inputs.TAU_NEG),
        policy("grpo, k3", f"grpo, {bias}=False", "ppo_clip", "sequence", estimator="k3", **clip),
        policy("grpo, k3 corrected", f"grpo, {bias}=True", "ppo_clip", "sequence", estimator="k3 corrected", **clip),
        policy("dapo, k3 corrected", f"dapo, {bias}=True", "ppo_clip", "token", estimator="k3 corrected", **clip),
    ]


def credit_cases() -> list[Case]:
    rows = inputs.rollouts()
    rewards, group, every = rows.rewards, rows.group, torch.ones_like(rows.rewards, dtype=torch.bool)

    def case(name: str, ours: str, theirs: str, compute: Callable[[], Tensor]) -> Case:
        return Case(name, f"advantages.{ours}", theirs, lambda: {"advantage": compute()})

    return [
        case("group", "group", "GRPOTrainer, scale_rewards=none", lambda: advantages.group(rewards, group)),
        case(
            "group, norm_std",
            f"group, norm_std, eps={STD_EPS:g}",
            "GRPOTrainer, scale_rewards=group",
            lambda: advantages.group(rewards, group, norm_std=True, eps=STD_EPS),
        ),
        case("leave_one_out", "leave_one_out", "RLOOTrainer", lambda: advantages.leave_one_out(rewards, group)),
        case(
            "leave_one_out, whitened",
            f"leave_one_out, whiten, eps={STD_EPS:g}",
            "RLOOTrainer, normalize_advantages",
            lambda: advantages.whiten(advantages.leave_one_out(rewards, group), every, eps=STD_EPS),
        ),
    ]


def correction_cases() -> list[Case]:
    def case(mode: str, function: str, **bounds: float) -> Case:
        def compute() -> Answer:
            rows = inputs.rollouts()
            return {"weight": getattr(off_policy, function)(rows.old_logp, rows.behavior_logp, rows.mask, **bounds)}

        return Case(mode, f"off_policy.{function}", f"GRPOTrainer, vllm_importance_sampling_mode={mode}", compute)

    return [
        case("token_truncate", "truncated_weight", maximum=HIGH),
        case("token_mask", "masked_weight", low=LOW, high=HIGH),
        case("sequence_truncate", "sequence_truncated_weight", maximum=HIGH),
        case("sequence_mask", "sequence_masked_weight", low=LOW, high=HIGH),
    ]


def kto(logp: Tensor) -> Tensor:
    rows = inputs.preferences()
    weights = {"desirable_weight": inputs.GOOD, "undesirable_weight": inputs.BAD}
    point = preference.kto_point(rows.strangers, rows.stranger_ref)
    return preference.kto_unpaired(logp.sum(1), rows.ref, rows.label, point, beta=BETA, **weights)


def preference_cases() -> list[Case]:
    rows = inputs.preferences()
    chosen, rejected = rows.mask.sum(1).chunk(2)
    lengths = {"chosen_length": chosen, "rejected_length": rejected}
    wrong = {"label_smoothing": inputs.WRONG}

    def paired(name: str, logp: Tensor, **options: Any) -> Tensor:
        loss: Tensor = getattr(preference, name)(*logp.sum(1).chunk(2), *rows.ref.chunk(2), **options)
        return loss

    def case(name: str, ours: str, theirs: str, loss: Callable[[Tensor], Tensor]) -> Case:
        return Case(
            name,
            f"preference_losses.{ours}",
            theirs,
            lambda: differentiated(lambda x: loss(x).mean(), rows.logp, rows.mask),
        )

    def odds_ratio(logp: Tensor) -> Tensor:
        """ORPO without its likelihood term."""
        return paired("orpo", logp, beta=BETA, **lengths) - paired("orpo", logp, beta=0.0, **lengths)

    def reward(name: str, ours: str, **options: Any) -> Case:
        def loss(values: Tensor) -> Tensor:
            return reward_modeling.bt(*values.chunk(2), **options).mean()

        return Case(name, f"reward_modeling.{ours}", "RewardTrainer", lambda: differentiated(loss, rows.reward))

    return [
        case("sigmoid", "sigmoid", "DPOTrainer, sigmoid", lambda x: paired("sigmoid", x, beta=BETA)),
        case("hinge", "hinge", "DPOTrainer, hinge", lambda x: paired("hinge", x, beta=BETA)),
        case("ipo", "ipo, lengths", "DPOTrainer, ipo", lambda x: paired("ipo", x, beta=BETA, **lengths)),
        case("robust", "robust", "DPOTrainer, robust", lambda x: paired("robust", x, beta=BETA, **wrong)),
        case("kto", "kto_unpaired, kto_point", "KTOTrainer", kto),
        case(
            "simpo",
            "simpo",
            "CPOTrainer, simpo",
            lambda x: paired("simpo", x, beta=BETA, gamma=inputs.GAMMA, **wrong, **lengths),
        ),
        case("orpo, odds ratio", "orpo, odds ratio", "ORPOTrainer (in float32)", odds_ratio),
        reward("bt", "bt"),
        reward("bt, margin and centring", "bt, margin, centring", margin=rows.margin, centring=inputs.CENTRING),
    ]


def calibration_cases() -> list[Case]:
    given, rows = inputs.judgements(), inputs.preferences()

    def case(name: str, theirs: str, compute: Callable[[], Tensor], room: str = "calibration") -> Case:
        return Case(name, f"{room}.{name}", f"sklearn.{theirs}", lambda: {"value": compute()})

    def reliability() -> Answer:
        table = calibration.reliability(given.probability, given.label, bins=inputs.BINS)
        filled = table.rows > 0
        return {name: getattr(table, name)[filled] for name in ("rows", "confidence", "frequency")}

    p, label = given.probability, given.label
    return [
        case("auroc", "metrics.roc_auc_score", lambda: calibration.auroc(given.score, label)),
        case("accuracy", "metrics.accuracy_score", lambda: calibration.accuracy(p, label)),
        case("brier", "metrics.brier_score_loss", lambda: calibration.brier(p, label)),
        Case("reliability", "calibration.reliability", "sklearn.calibration.calibration_curve", reliability),
        case("ece", "calibration.calibration_curve", lambda: calibration.ece(p, label, bins=inputs.BINS)),
        case("bce", "metrics.log_loss", lambda: reward_modeling.bce(rows.reward, rows.label).mean(), "reward_modeling"),
    ]


CASES = {
    case.name: case
    for part in (temporal_cases, policy_cases, credit_cases, correction_cases, preference_cases, calibration_cases)
    for case in part()
}
