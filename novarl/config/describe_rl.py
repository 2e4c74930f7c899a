"""An algorithm in words: advantages, values, loss, and coefficients that adapt during a run."""

from __future__ import annotations

from collections.abc import Iterator

from novarl.algos.axes import CORRECTIONS, ESTIMATORS, SURROGATES, estimator
from novarl.config.adapting import AdaptiveKL
from novarl.config.tree import RLConfig

MEANS = {
    "token": "mean over tokens",
    "sequence": "mean over answers of the mean over their tokens",
    "constant": "sum over tokens, divided by a constant",
}
REFERENCES = {"start": "the initial policy", "ema": "a moving average of the policy", "tie": "the policy itself"}
CONSTRAINTS = {
    "lagrangian": "enforced by a multiplier that grows while the constraint is violated",
    "penalty": "enforced by a penalty proportional to the violation",
    "early_stop": "enforced by skipping the remaining updates of the rollout",
    "rollback": "enforced by shortening or undoing the update that violates it",
}


def algorithm(config: RLConfig) -> list[str]:
    """Sentences about the algorithm of a run; only about the parts that it uses."""
    parts = (_credit(config), _values(config), _process(config), _loss(config), _correction(config), _kl(config))
    moving = (_controller(config), _entropy(config), _constraint(config), _objectives(config), _guard(config))
    return [line for line in (_overlap(config), *parts, *moving) if line]


def unread(config: RLConfig) -> list[str]:
    """The sections that the run does not use, once the algorithm's values are filled in."""
    if config.adv.estimator is None:
        return []
    used = {
        "critic": config.adv.values == "critic",
        "vine": config.adv.values == "continuations",
        "prime": "process" in estimator(config.adv.estimator).needs,
    }
    return [section for section, reads in used.items() if not reads]


def _overlap(config: RLConfig) -> str | None:
    rollout = config.rollout
    if rollout.staleness == 0:
        return None
    shared = f"{rollout.threads} CPU threads" if rollout.threads else "half of the CPU threads"
    return (
        "Overlap: while a step is trained on, a second process samples and scores the next step's answers, with "
        f"{shared} and weights that are one step old."
    )


def _credit(config: RLConfig) -> str:
    adv = config.adv
    spread = ", divided by the group standard deviation" if adv.norm_std else ""
    whole = "; normalized over all tokens" if adv.whiten else ""
    if adv.estimator is None:
        return f"Advantage: reward minus the algorithm's baseline{spread}{whole}."
    if adv.estimator not in ESTIMATORS:
        return f"Advantage: computed by {adv.estimator}{whole}."
    row = ESTIMATORS[adv.estimator]
    words = row.words.format(adv=adv)
    if row.temporal:
        known = (("gamma", adv.gamma), ("lambda", adv.lam), ("n", adv.n if "adv.n" in row.reads else None))
        options = ", ".join(f"{name} {value:g}" for name, value in known if value is not None)
        level = " per answer" if adv.is_level == "trajectory" else ""
        return f"Advantage: {words}{level} over the tokens of an answer, {options}{whole}."
    if "process" in row.needs:
        return f"Advantage: {words}{whole}."
    return f"Advantage: reward minus {words}{spread}{whole}."


def _values(config: RLConfig) -> str | None:
    critic, vine = config.critic, config.vine
    if config.adv.values == "continuations":
        end = "every token is a step" if not vine.split else f"a step ends with {vine.split!r}"
        return (
            f"Values: the mean reward of {vine.samples} continuations from the start of each step of an answer; {end}, "
            f"at most {vine.max_steps} steps."
        )
    if config.adv.values != "critic":
        return None
    clip = f", value clip {critic.clip:g}" if critic.clip else ""
    if critic.shared:
        return f"Values: a critic that shares the policy's trunk, loss weight {critic.coef:g}{clip}."
    rate = f", learning rate {critic.lr:g}" if critic.lr else ""
    often = critic.updates_per_rollout
    updates = f", {often} update{'s' * (often > 1)} per step" if often else ""
    warm = f"; only the critic is trained in the first {critic.warmup_steps} steps" if critic.warmup_steps else ""
    return f"Values: a separate critic{rate}{updates}{clip}{warm}."


def _process(config: RLConfig) -> str | None:
    if config.adv.estimator is None or "process" not in estimator(config.adv.estimator).needs:
        return None
    prime = config.prime
    scale = "beta" if prime.beta is None else f"{prime.beta:g}"
    start = f" starts from {prime.model} and is" if prime.model else ""
    if prime.lr == 0.0:
        return f"Token rewards: {scale} x (log model - log reference), with the fixed model {prime.model}."
    rate = f", learning rate {prime.lr:g}" if prime.lr else ""
    return (
        f"Token rewards: {scale} x (log model - log reference); the model{start or ' is'} trained on outcomes "
        f"(correct if the reward is at least {prime.threshold:g}){rate}."
    )


def _loss(config: RLConfig) -> str:
    named = config.loss.surrogate or "the algorithm's surrogate"
    surrogate = SURROGATES[named].words if named in SURROGATES else named
    clip = (
        f"; ratios clipped to [1 - {config.clip.low:g}, 1 + {config.clip.high:g}]"
        if config.clip.low and config.clip.high
        else ""
    )
    fixed = config.entropy.target is None and config.entropy.coef
    bonus = f"; entropy bonus {config.entropy.coef:g}" if fixed else ""
    mean = f"; {MEANS[config.loss.agg]}" if config.loss.agg else ""
    dual = f", at most {config.clip.dual:g} for negative advantages" if config.clip.dual else ""
    cut = "; truncated answers are excluded" if config.loss.mask_truncated else ""
    return f"Loss: {surrogate}{clip}{dual}{bonus}{mean}{cut}."


def _correction(config: RLConfig) -> str | None:
    section = config.correction
    if section.type is None:
        return None
    words = CORRECTIONS[section.type].words.format(correction=section)
    root = ", using the geometric mean of the token ratios" if section.geometric else ""
    return f"Correction: {words}{root}."


def _kl(config: RLConfig) -> str:
    kl = config.kl
    if config.kl.coef and config.kl.type:
        corrected = ", times pi / pi_old" if kl.corrected else ""
        at_most = f", at most {kl.clamp:g} per token" if kl.clamp else ""
        what = f"{kl.coef:g} x KL ({kl.estimator}{at_most}) in the {kl.type}{corrected}"
    elif config.kl.type:
        what = f"KL ({kl.estimator or 'default estimator'}) in the {kl.type}, with a coefficient that starts at 0"
    elif kl.reference == "start":
        return "KL: no penalty."
    else:
        what = "measured without a penalty"
    decay = f" (decay {kl.ema_decay:g})" if kl.reference == "ema" else ""
    return f"KL: {what}; reference: {REFERENCES.get(kl.reference, kl.reference)}{decay}."


def _controller(config: RLConfig) -> str | None:
    section = config.adaptive_kl
    if not section.enabled:
        return None
    kind, start = section.controller_type, section.initial_coef or config.kl.coef
    begin = f" from {start:g}" if start else ""
    bounds = f", within [{section.min_coef or 0.0:g}, {section.max_coef:g}]" if section.max_coef is not None else ""
    gains = ", ".join(_gains(section))
    settings = f" ({gains})" if gains else ""
    if kind == "fixed":
        return f"KL coefficient: constant at {start or 0.0:g}."
    if kind == "schedule":
        return f"KL coefficient: follows a schedule{begin}{bounds}{settings}."
    return (
        f"KL coefficient: adapted by {kind}{begin} to keep KL at {section.target_kl:g} nats per {_unit(config)}"
        f"{bounds}{settings}."
    )


def _entropy(config: RLConfig) -> str | None:
    section = config.entropy
    if section.target is None:
        return None
    begin = f" from {section.coef:g}" if section.coef else ""
    return (
        f"Entropy bonus: the weight adapts{begin} to keep the entropy at {section.target:g} nats per token "
        f"(rate {section.rate:g})."
    )


def _gains(section: AdaptiveKL) -> Iterator[str]:
    """The settings of this controller only."""
    general = ("enabled", "controller_type", "target_kl", "initial_coef", "min_coef", "max_coef")
    for name, value in section.model_dump(exclude_none=True).items():
        if name not in general:
            yield f"{name} {value if isinstance(value, str) else format(value, 'g')}"


def _constraint(config: RLConfig) -> str | None:
    section = config.constraint_optimization
    if not section.enabled:
        return None
    of_step = section.mode in ("early_stop", "rollback")
    whom = "the policy that sampled" if of_step else "the reference"
    bounds = []
    if section.kl_constraint is not None:
        unit = "token" if of_step else _unit(config)
        bounds.append(f"KL to {whom} at most {section.kl_constraint:g} nats per {unit}")
    if section.entropy_constraint is not None:
        bounds.append(f"entropy at least {section.entropy_constraint:g} nats per token")
    if section.entropy_fraction is not None:
        bounds.append(f"entropy at least {section.entropy_fraction:g} of its initial value")
    return f"Constraints: {' and '.join(bounds)}, {CONSTRAINTS[section.mode]}."


def _guard(config: RLConfig) -> str | None:
    actions = ", ".join(f"{name}: {action}" for name, action in config.guard.on_alert.items())
    return f"Actions on alerts: {actions}; all others only warn." if actions else None


def _objectives(config: RLConfig) -> str | None:
    section = config.multi_objective
    if not section.enabled:
        return None
    found = ", ".join(
        f"{'maximize' if spec.direction == 'max' else 'minimize'} {name} (weight {spec.weight:g})"
        for name, spec in section.objectives.items()
    )
    front = " Without evaluation (eval.n=0) there is no Pareto front." if config.eval.n == 0 else ""
    return f"Objectives: {found}; combined by {section.method}, each scaled by its standard deviation.{front}"


def _unit(config: RLConfig) -> str:
    return "answer" if config.kl.unit == "sequence" else "token"
