"""From an algorithm's row to the learner and the stages of its loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from novarl.algos import off_policy, surrogates
from novarl.algos.named import CLIP_DUAL
from novarl.compose.custom import is_own, own_estimator, own_surrogate
from novarl.compose.govern import build_governor, build_guard
from novarl.compose.parts import Parts
from novarl.compose.resolve import WEIGHT_MAX, RLPlan
from novarl.compose.suppliers import build_supplier, shared_value
from novarl.compose.weights import optim_settings
from novarl.config.tree import RLConfig
from novarl.core.bus import Bus
from novarl.core.types import Batch, Prompt, Record, Rollout, Scored
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Correction, Objective, Surrogate
from novarl.learn.policy import PolicyLearner
from novarl.learn.scorer import Scorer
from novarl.loops.admit import Admission
from novarl.loops.online import Stages
from novarl.loops.state import Pending
from novarl.run.play import Play

SEQUENCE_CORRECTIONS = ("sequence", "sequence_mask")
"""Corrections with sequence-level weights."""


def online_stages(
    parts: Parts,
    *,
    prompts: Sequence[Prompt],
    play: Play,
    reference: Scorer | None,
    check: Callable[[Batch, Sequence[Rollout]], Record],
    keep: Callable[[int, Sequence[Scored], Pending], None],
    bus: Bus,
) -> Stages:
    """The stages of the online loop."""
    config, plan, row = parts.config, parts.plan, parts.plan.algorithm
    value = shared_value(parts)
    trained_steps = config.steps - config.critic.warmup_steps
    learner = PolicyLearner(
        parts.policy.model,
        parts.scorer,
        objective=parts.objective,
        optim=optim_settings(config.optim, lr=plan.lr, total=trained_steps * row.updates_per_rollout),
        ranks=parts.ranks,
        budget=config.micro.max_tokens,
        reference=reference,
        reference_decay=config.kl.ema_decay if config.kl.reference == "ema" else None,
        needs_old_logp=plan.needs_old_logp,
        value=value,
        guard=build_guard(config),
    )
    return Stages(
        prompts=prompts,
        sample=play.sample,
        score=play.score,
        credit=parts.credit,
        learner=learner,
        governor=build_governor(config, plan),
        supplier=build_supplier(parts, value),
        publish=partial(parts.sampler.engine.publish, None),
        check=check,
        keep=keep,
        admission=Admission(
            varied=row.dynamic_sampling,
            max_refills=config.dynamic_sampling.max_refills,
            needs_twin="greedy" in row.needs,
        ),
        ranks=parts.ranks,
        bus=bus,
        prompts_per_rollout=config.prompts_per_rollout,
        updates_per_rollout=row.updates_per_rollout,
        epochs_per_rollout=config.epochs_per_rollout,
        seed=config.seed,
        frozen_steps=config.critic.warmup_steps,
        mask_truncated=config.loss.mask_truncated,
    )


def objective(config: RLConfig, plan: RLPlan) -> Objective:
    """Surrogate, correction, regularizers and aggregation of a run."""
    row = plan.algorithm
    surrogate, correction = _surrogate(config, plan), _correction(config, plan)
    return Objective(
        surrogate=surrogate,
        aggregation=row.aggregation,
        constant=float(plan.max_tokens) if row.constant == "max_tokens" else 1.0,
        kl_loss_coef=row.kl_coef if row.kl_type == "loss" else 0.0,
        kl_estimator=row.kl_estimator,
        kl_clamp=config.kl.clamp,
        kl_corrected=config.kl.corrected,
        entropy_coef=row.entropy_coef,
        correction=correction,
        proportional=not is_own(row.surrogate),
        by_sequence=frozenset(
            name
            for name, whole in (
                ("surrogate", row.surrogate == "gspo"),
                ("correction", plan.correction in SEQUENCE_CORRECTIONS),
            )
            if whole
        ),
    )


def _surrogate(config: RLConfig, plan: RLPlan) -> Surrogate:
    row = plan.algorithm
    if is_own(row.surrogate):
        given = config.clip.low is not None or config.clip.high is not None
        return own_surrogate(
            config.object("loss.surrogate") or row.surrogate,
            clip_low=row.clip_low,
            clip_high=row.clip_high,
            clip_given=given,
        )
    function = getattr(surrogates, row.surrogate)
    bounds = {"clip_low": row.clip_low, "clip_high": row.clip_high}
    options = {
        "ppo_clip": bounds,
        "dual_clip": {**bounds, "clip_dual": config.clip.dual or CLIP_DUAL},
        "gspo": bounds,
        "cispo": bounds,
        "sapo": {"tau_pos": config.loss.tau_pos, "tau_neg": config.loss.tau_neg},
    }
    return partial(function, **options.get(row.surrogate, {}))


def _correction(config: RLConfig, plan: RLPlan) -> Correction | None:
    section = config.correction
    maximum, geometric = section.tis_max or WEIGHT_MAX, section.geometric
    return {
        None: None,
        "token": partial(off_policy.truncated_weight, maximum=maximum),
        "sequence": partial(off_policy.sequence_truncated_weight, maximum=maximum, geometric=geometric),
        "icepop": partial(off_policy.masked_weight, low=section.low, high=section.high),
        "sequence_mask": partial(
            off_policy.sequence_masked_weight, low=section.low, high=section.high, geometric=geometric
        ),
    }[plan.correction]


def credit_rule(config: RLConfig, plan: RLPlan) -> CreditRule:
    """The advantage estimator with its keywords, and KL in the reward or the advantage."""
    row, adv = plan.algorithm, config.adv
    known: dict[str, dict[str, Any]] = {
        "gae": {"gamma": row.gamma, "lam": row.lam},
        "td_lambda": {"gamma": row.gamma, "lam": row.lam},
        "vtrace": {"gamma": row.gamma, "lam": row.lam, "rho_max": adv.rho_max, "c_max": adv.c_max},
        "retrace": {"gamma": row.gamma, "lam": row.lam, "c_max": adv.c_max},
        "n_step": {"gamma": row.gamma, "n": adv.n},
        "clipped_is": {"gamma": row.gamma, "level": adv.is_level, "rho_max": adv.rho_max},
        "monte_carlo": {"gamma": row.gamma},
        "prime": {"gamma": row.gamma},
    }
    options = known.get(row.estimator, {})
    return CreditRule(
        estimator=row.estimator,
        norm_std=row.norm_std,
        ema_beta=adv.ema_beta,
        constant=adv.constant,
        whiten=row.whiten,
        kl_type=row.kl_type if plan.needs_reference else None,
        kl_estimator=row.kl_estimator,
        kl_clamp=config.kl.clamp,
        kl_coef=row.kl_coef,
        gpg=row.surrogate == "gpg",
        options=tuple(options.items()),
        own=own_estimator(config.object("adv.estimator") or row.estimator) if is_own(row.estimator) else None,
    )
