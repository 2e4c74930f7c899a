"""From an algorithm's row to the learner and the five verbs of its loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from novarl.algos import off_policy, surrogates
from novarl.algos.named import CLIP_DUAL
from novarl.build.govern import build_governor, build_guard
from novarl.build.own import is_own, own_estimator, own_surrogate
from novarl.build.references import open_reference
from novarl.build.resolve import WEIGHT_MAX
from novarl.build.rows import longest_prompt
from novarl.build.suppliers import build_supplier, shared_value
from novarl.build.weights import optim_settings
from novarl.core.types import Batch, Prompt, Record, Rollout, Scored
from novarl.data.render import render_prompt
from novarl.data.rollout_log import write_rollouts
from novarl.learn.agreement import TOLERANCES, Agreement
from novarl.learn.credit import CreditRule
from novarl.learn.objective import Correction, Objective, Surrogate
from novarl.learn.policy import PolicyLearner
from novarl.loops.admit import Admission
from novarl.loops.online import Stages
from novarl.loops.state import Pending

if TYPE_CHECKING:
    from novarl.build.resolve import RLPlan
    from novarl.build.rl import Online
    from novarl.config.tree import RLConfig

SEQUENCE_CORRECTIONS = ("sequence", "sequence_mask")
"""Corrections that weigh an answer as a whole."""


def online_stages(run: Online) -> Stages:
    """Everything that the loop needs."""
    config, plan, row = run.config, run.plan, run.plan.algorithm
    value = shared_value(run)
    learnt_from = config.steps - config.critic.warmup_steps
    learner = PolicyLearner(
        run.policy.model,
        run.scorer,
        objective=run.objective,
        optim=optim_settings(config.optim, lr=plan.lr, total=learnt_from * row.updates_per_rollout),
        ranks=run.ranks,
        budget=config.micro.max_tokens,
        reference=open_reference(run) if plan.needs_reference else None,
        reference_decay=config.kl.ema_decay if config.kl.reference == "ema" else None,
        needs_old_logp=plan.needs_old_logp,
        value=value,
        guard=build_guard(config),
    )
    return Stages(
        prompts=run.rows.train,
        sample=run.play.sample,
        score=run.play.score,
        credit=run.credit,
        learner=learner,
        governor=build_governor(config, plan),
        supplier=build_supplier(run, value),
        publish=partial(run.engine.publish, None),
        check=partial(_check_agreement, run),
        keep=partial(_keep, run),
        admission=Admission(
            varied=row.dynamic_sampling,
            max_refills=config.dynamic_sampling.max_refills,
            needs_twin="greedy" in row.needs,
        ),
        ranks=run.ranks,
        bus=run.session.bus,
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
        return own_surrogate(row.surrogate, clip_low=row.clip_low, clip_high=row.clip_high, clip_given=given)
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
    """The first axis: the estimator, its keywords, and KL in the reward or the advantage."""
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
        own=own_estimator(row.estimator) if is_own(row.estimator) else None,
    )


def _check_agreement(run: Online, batch: Batch, rollouts: Sequence[Rollout]) -> Record:
    """Before the first update: sampler and learner agree, or the run is refused."""
    limit = longest_prompt(run.config, run.policy, max_tokens=run.plan.max_tokens)

    def render(prompt: Prompt) -> tuple[int, ...]:
        tokens = render_prompt(
            run.policy.tokenizer,
            prompt.messages,
            apply_chat_template=run.config.apply_chat_template,
            template_kwargs=prompt.template_kwargs,
        )
        return tokens[-limit:]

    found = Agreement(
        model=run.policy.model,
        logprobs=lambda batch, temperature: replace(run.scorer, temperature=temperature).logprobs(
            batch, run.ranks, run.config.micro.max_tokens
        ),
        render=render,
        temperature=run.scorer.temperature,
        sampling_temperature=run.sampler.sampling.temperature,
        version=0,
        tolerance=TOLERANCES[run.policy.compute_dtype],
    ).check(batch, rollouts)
    run.session.bus.event("agreement", **found)
    return found


def _keep(run: Online, step: int, scored: Sequence[Scored], pending: Pending) -> None:
    """The rollout log and the samples on the console."""
    if run.ranks.rank != 0:
        return
    log, bus = run.config.log, run.session.bus
    if log.rollouts_every and (step % log.rollouts_every == 0 or step == 1):
        write_rollouts(
            run.session.rundir.path / "rollouts", step, scored, pending.batch, pending.scores, pending.credit
        )
    if log.samples_every and (step % log.samples_every == 0 or step == 1):
        shown = next((item for item in scored if item.reward is not None), None)
        if shown is not None:
            prompt = str(shown.rollout.prompt.messages[-1]["content"])
            bus.event("sample", step=step, prompt=prompt, text=shown.rollout.text, reward=shown.reward)
