"""From an algorithm's row to the learner and the stages of its loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from novarl.algos import off_policy, surrogates
from novarl.algos.axes import CORRECTIONS, estimator, keywords, surrogate
from novarl.algos.named import Algorithm
from novarl.compose.custom import is_own, own_estimator, own_surrogate
from novarl.compose.govern import build_governor, build_guard
from novarl.compose.parts import Parts
from novarl.compose.resolve import RLPlan
from novarl.compose.suppliers import build_supplier, shared_value
from novarl.compose.weights import optim_settings
from novarl.config.tree import RLConfig
from novarl.control.guards import AlarmGuard
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
from novarl.run.publish import link


def online_stages(
    parts: Parts,
    *,
    prompts: Sequence[Prompt],
    play: Play,
    reference: Scorer | None,
    check: Callable[[Batch, Sequence[Rollout]], Record],
    keep: Callable[[int, Sequence[Scored], Pending], None],
    keep_measured: Callable[[int, Mapping[str, Tensor]], None],
    bus: Bus,
    guard: AlarmGuard | None,
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
        publish=link(parts.policy.model, parts.sampler.engine),
        check=check,
        keep=keep,
        keep_measured=keep_measured,
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
        guard=guard,
    )


def objective(config: RLConfig, plan: RLPlan) -> Objective:
    """Surrogate, correction, regularizers and aggregation of a run."""
    row = plan.algorithm
    correction = None if plan.correction is None else CORRECTIONS[plan.correction]
    records = {"surrogate": surrogate(row.surrogate), "correction": correction}
    return Objective(
        surrogate=_surrogate(config, row),
        aggregation=row.aggregation,
        constant=float(plan.max_tokens) if row.constant == "max_tokens" else 1.0,
        kl_loss_coef=row.kl_coef if row.kl_type == "loss" else 0.0,
        kl_estimator=row.kl_estimator,
        kl_clamp=config.kl.clamp,
        kl_corrected=config.kl.corrected,
        entropy_coef=row.entropy_coef,
        correction=_correction(plan),
        proportional=not is_own(row.surrogate),
        by_sequence=frozenset(name for name, record in records.items() if record is not None and record.by_sequence),
    )


def _surrogate(config: RLConfig, row: Algorithm) -> Surrogate:
    record = surrogate(row.surrogate)
    bounds = keywords(record.reads, row.options)
    if is_own(row.surrogate):
        given = config.clip.low is not None or config.clip.high is not None
        return own_surrogate(config.object("loss.surrogate") or row.surrogate, bounds, clip_given=given)
    return partial(getattr(surrogates, record.function), **bounds)


def _correction(plan: RLPlan) -> Correction | None:
    if plan.correction is None:
        return None
    record = CORRECTIONS[plan.correction]
    return partial(getattr(off_policy, record.function), **keywords(record.reads, plan.values))


def credit_rule(config: RLConfig, plan: RLPlan) -> CreditRule:
    """The first axis: the estimator, its keywords, and KL in the reward or the advantage."""
    row = plan.algorithm
    return CreditRule(
        estimator=row.estimator,
        options=keywords(estimator(row.estimator).reads, row.options),
        whiten=row.whiten,
        kl_type=row.kl_type if plan.needs_reference else None,
        kl_estimator=row.kl_estimator,
        kl_clamp=config.kl.clamp,
        kl_coef=row.kl_coef,
        gpg=surrogate(row.surrogate).scales_groups,
        own=own_estimator(config.object("adv.estimator") or row.estimator) if is_own(row.estimator) else None,
    )
