"""Suppliers of an estimator's inputs other than rewards: critic, continuations, process rewards."""

from __future__ import annotations

from dataclasses import replace

from novarl.compose.parts import Parts
from novarl.compose.weights import optim_settings
from novarl.learn.critic import Critic, SharedCritic, ValueScorer
from novarl.learn.policy import SharedValue
from novarl.learn.prime import ProcessRewards
from novarl.learn.supplier import Supplier
from novarl.learn.vine import Continuations
from novarl.models.heads import ScalarHead, ValueModel, with_head
from novarl.models.lora import sibling
from novarl.run.continuations import Continue


def shared_value(parts: Parts) -> SharedValue | None:
    """The value head on the policy's trunk, if the critic is shared."""
    section = parts.config.critic
    if parts.plan.algorithm.values != "critic" or not section.shared:
        return None
    return SharedValue(with_head(parts.policy.model).head, section.coef, section.clip)


def build_supplier(parts: Parts, value: SharedValue | None) -> Supplier | None:
    """The supplier that the algorithm needs, if any."""
    row = parts.plan.algorithm
    if "process" in row.needs:
        return _process_rewards(parts)
    if row.values == "continuations":
        return _continuations(parts)
    if row.values == "critic":
        return _critic(parts, value)
    return None


def _continuations(parts: Parts) -> Continuations:
    config, tokenizer = parts.config, parts.policy.tokenizer
    return Continuations(
        continuations(parts, config.vine.samples),
        lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        split=parts.plan.split,
        most=config.vine.max_steps,
        ranks=parts.ranks,
    )


def continuations(parts: Parts, samples: int) -> Continue:
    """Estimates values from `samples` continuations of each state."""
    return Continue(
        parts.sampler,
        parts.judge,
        samples=samples,
        max_tokens=parts.plan.max_tokens,
        ends=parts.policy.eos_ids,
        apply_chat_template=parts.config.apply_chat_template,
    )


def _critic(parts: Parts, value: SharedValue | None) -> Supplier:
    config, row = parts.config, parts.plan.algorithm
    budget, bootstrap = config.micro.max_tokens, config.adv.bootstrap_truncated
    if value is not None:
        assert isinstance(value.head, ScalarHead)
        model = ValueModel(parts.policy.model, value.head)
        scorer = ValueScorer(
            model, layout=parts.scorer.layout, compute_dtype=parts.scorer.compute_dtype, splits=parts.scorer.splits
        )
        return SharedCritic(scorer, bootstrap=bootstrap, ranks=parts.ranks, budget=budget)
    updates = config.critic.updates_per_rollout or row.updates_per_rollout
    model = with_head(parts.policy.model, separate=True)
    return Critic(
        ValueScorer(model, layout=parts.scorer.layout, compute_dtype=parts.scorer.compute_dtype),
        optim=optim_settings(config.optim, lr=parts.plan.critic_lr, total=config.steps * updates),
        ranks=parts.ranks,
        budget=budget,
        passes=updates // row.updates_per_rollout,
        clip=config.critic.clip,
        bootstrap=bootstrap,
    )


def _process_rewards(parts: Parts) -> ProcessRewards:
    section, named = parts.config.prime, parts.process_model
    beta = parts.plan.prime_beta if named is None else parts.plan.prime_beta or named.beta
    assert beta is not None
    # At the policy's temperature, as the reference is scored: phi = ref must give rewards of 0.
    if named is None:
        scorer, reference = replace(parts.scorer, model=sibling(parts.policy.model)), None
    else:
        scorer, reference = replace(parts.scorer, model=named.model), replace(parts.scorer, model=named.reference)
        named.model.requires_grad_(section.lr != 0.0)
    return ProcessRewards(
        scorer,
        beta=beta,
        threshold=section.threshold,
        optim=optim_settings(parts.config.optim, lr=parts.plan.prime_lr, total=parts.config.steps),
        reference=reference,
        ranks=parts.ranks,
        budget=parts.config.micro.max_tokens,
    )
